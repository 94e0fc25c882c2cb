"""A base in 8 and in 4 bits beside one in bfloat16, under the official SDK: how fast each trains and samples.

    python benchmarks/fewer_bits.py --out benchmarks/results
    python benchmarks/fewer_bits.py --tiny                         # the same code on a CPU

Three servers share a GPU, each with one copy of the base, and take turns: a step of training on sequences of 64 to
2,048 tokens, and samples with that adapter of 1, 64 and 512 sequences at a time, whose prompts have 8 tokens. Each has
as much memory, and micro-batches of 3,072 tokens, whose activations fit in all of them, so that none computes them
again. Random weights in the shape of Qwen3-8B, one adapter of rank 32.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import os
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from control_plane import served
from engine import room_for_models
from harness import machine, processes
from harness.scale import SCALES
from on_cpu import Line, in_turns
from stacks import MODEL, Run, keep, side_by_side

WAYS = {"bfloat16": (), "int8": ("--base-precision", "int8"), "int4": ("--base-precision", "int4")}
SAMPLES = {1: 128, 64: 128, 512: 64}
"""Tokens of each, by how many there are at a time."""
SHARE = "0.32"
"""Of the GPU, for each of three servers."""


def measure(options: argparse.Namespace, folder: Path, logs: Path) -> Iterator[Line]:
    scale = SCALES["tiny" if options.tiny else "full"]
    processes.write_text_model(scale.name, folder, logs)
    if not options.tiny:
        scale = dataclasses.replace(scale, kv_cache_bytes=6 * 2**30, micro_batch_tokens=3072, prompt_tokens=8)
    serve = ["--model", f"{MODEL}={folder / 'text'}", "--kv-cache", str(scale.kv_cache_bytes / 2**30)]
    serve += ["--micro-batch-tokens", str(scale.micro_batch_tokens), "--max-rank", str(scale.rank)]
    serve += ["--shared-weights", "always", "--max-context-length", str(min(4096, scale.text.positions)), "--verbose"]
    serve += [] if options.tiny else ["--gpu-memory-utilization", SHARE]
    with contextlib.ExitStack() as stack:
        makers: dict[str, Any] = {
            way: served(folder / f"data-{way}", *serve, *more, log=logs / f"serve-{way}.log")
            for way, more in WAYS.items()
        }
        runner = stack.enter_context(asyncio.Runner())
        runs = {way: Run(runner, url, scale) for way, url in side_by_side(makers, stack).items()}
        trained = {way: run.train for way, run in runs.items()}
        yield from lines("training", trained, options.rounds, runs["bfloat16"].trained_tokens)
        for run in runs.values():
            run.hand_over(0)
        for count, tokens in SAMPLES.items():
            asked = dataclasses.replace(
                scale, requests=count, output_tokens=scale.output_tokens if options.tiny else tokens
            )
            sampled = {way: partial(run.sample, scale=asked) for way, run in runs.items()}
            yield from lines(f"sampling, {count} at a time", sampled, options.rounds, count * asked.output_tokens)


def lines(what: str, ways: dict[str, Any], rounds: int, tokens: int) -> Iterator[Line]:
    """Each precision behind bfloat16, whose line is there for both, so that the table compares them with it."""
    found = dict(in_turns(ways, rounds, tokens))
    for way in ("int8", "int4"):
        yield Line(what, "bfloat16", found["bfloat16"])
        yield Line(what, way, found[way])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6, help="of each")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, on a CPU")
    parser.add_argument("--out", type=Path, help="folder for dated files of the result")
    options = parser.parse_args()
    if not options.tiny and not machine.gpu():
        parser.error("no NVIDIA GPU here; --tiny runs the same code on a CPU")
    os.environ.update(processes.environment())
    with tempfile.TemporaryDirectory(dir=None if options.tiny else room_for_models()) as folder:
        logs = (options.out or Path(folder)) / "fewer-bits-logs"
        logs.mkdir(parents=True, exist_ok=True)
        keep("fewer_bits", measure(options, Path(folder), logs), [*machine.describe(), ""], options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
