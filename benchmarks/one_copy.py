"""One copy of the frozen weights, which trainer and sampler both read, beside a copy each: memory and speed on one GPU.

    python benchmarks/one_copy.py --out benchmarks/results
    python benchmarks/one_copy.py --tiny                         # the same code on a CPU, without its memory

A server with one copy starts alone, then one with two beside it, or with --two-first the other way round. Each says
what the GPU had in use more when it was ready, and at the peak of training and sampling, contexts and KV cache
included. Then both take turns under the official SDK: a step of training on sequences of 64 to 2,048 tokens, a save of
weights up to the first token that is sampled with them, and samples of 256 tokens with that adapter. Random weights in
the shape of Qwen3-8B, one adapter of rank 32, micro-batches of 4,096 tokens.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from control_plane import served
from engine import room_for_models
from harness import machine, processes
from harness.scale import SCALES
from on_cpu import Line, in_turns
from stacks import MODEL, Run, keep

WAYS = {"one copy": "always", "two copies": "off"}
"""What `--shared-weights` is."""
SAVES = 25
"""In a round: one is short, and files of the adapter take a different time each."""


class UsedMemory:
    """While open, watches what the first GPU has in use, by its driver; `peak`: GiB. 0 without a GPU."""

    def __init__(self) -> None:
        self.peak = self.now()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "UsedMemory":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    @staticmethod
    def now() -> float:
        if not machine.gpu():
            return 0.0
        gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
        asked = ["nvidia-smi", f"--id={gpu}", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        return int(subprocess.run(asked, capture_output=True, text=True, check=True).stdout) / 1024

    def _watch(self) -> None:
        while not self._stop.wait(0.1):
            self.peak = max(self.peak, self.now())


def measure(options: argparse.Namespace, folder: Path, logs: Path) -> Iterator[Line]:
    scale = SCALES["tiny" if options.tiny else "full"]
    processes.write_text_model(scale.name, folder, logs)
    if not options.tiny:
        scale = dataclasses.replace(
            scale, requests=64, output_tokens=256, kv_cache_bytes=6 * 2**30, micro_batch_tokens=4096
        )
    serve = ["--model", f"{MODEL}={folder / 'text'}", "--kv-cache", str(scale.kv_cache_bytes / 2**30)]
    serve += ["--micro-batch-tokens", str(scale.micro_batch_tokens), "--max-rank", str(scale.rank)]
    serve += ["--max-context-length", str(min(8192, scale.text.positions)), "--verbose"]
    runs: dict[str, Run] = {}
    with contextlib.ExitStack() as stack:
        runner = stack.enter_context(asyncio.Runner())
        for way, shared in reversed(WAYS.items()) if options.two_first else WAYS.items():
            before, name = UsedMemory.now(), way.replace(" ", "-")
            more = [*serve, "--shared-weights", shared]
            url = stack.enter_context(served(folder / f"data-{name}", *more, log=logs / f"serve-{name}.log"))
            yield Line("GiB when ready", way, [UsedMemory.now() - before])
            runs[way] = Run(runner, url, scale)
            with UsedMemory() as memory:
                for turn in range(2):
                    runs[way].train(turn)
                    runs[way].hand_over(turn)
                    runs[way].sample(turn)
            yield Line("GiB at the peak", way, [memory.peak - before])
        trained, sampled = runs["one copy"].trained_tokens, scale.requests * scale.output_tokens
        for what, tokens, method, often in (
            ("training", trained, "train", 1),
            ("saves to a first token in 1000 s", 1000, "hand_over", SAVES),
            ("sampling, the SDK", sampled, "sample", 1),
        ):
            ways = {way: getattr(run, method) for way, run in sorted(runs.items(), reverse=True)}
            yield from (Line(what, *found) for found in in_turns(ways, often * options.rounds, tokens))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="of each way")
    parser.add_argument("--two-first", action="store_true", help="start the server with two copies first")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, on a CPU")
    parser.add_argument("--out", type=Path, help="folder for dated files of the result")
    options = parser.parse_args()
    if not options.tiny and not machine.gpu():
        parser.error("no NVIDIA GPU here; --tiny runs the same code on a CPU")
    os.environ.update(processes.environment())
    with tempfile.TemporaryDirectory(dir=None if options.tiny else room_for_models()) as folder:
        logs = (options.out or Path(folder)) / "one-copy-logs"
        logs.mkdir(parents=True, exist_ok=True)
        keep("one_copy", measure(options, Path(folder), logs), [*machine.describe(), ""], options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
