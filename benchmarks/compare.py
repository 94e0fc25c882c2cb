"""Compare two checkouts on one GPU, in alternating runs under the official SDK: has a change made anything slower?

    git worktree add ../before COMMIT
    python benchmarks/compare.py ../before --out benchmarks/results
    python benchmarks/compare.py ../before --tiny                         # the same code on a CPU

Two servers run at the same time, one of each checkout, and take turns: four steps of training, sent before the first
is waited for, on sequences of 64 to 2,048 tokens of a model with dense layers, of one with experts and of one with
linear attention; and with the dense one from a save of weights to the first token that is sampled with them, and
samples of 512 tokens with that adapter. Random weights in the shapes of Qwen3-8B, Qwen3-30B-A3B and Qwen3.5-9B with
fewer layers. The server that goes first changes each time. Only the API is used, so that a checkout may be of any age.
Nothing else should run on the machine, not on another of its GPUs either: programs there moved a step by a sixth.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from control_plane import served
from engine import room_for_models
from harness import machine, processes
from harness.model_shapes import SHAPES
from harness.scale import SCALES, Scale
from on_cpu import Line, in_turns
from stacks import HALF, MODEL, Run, commit_of, keep, side_by_side

MODELS = {"dense": ("qwen3-8b", 12), "experts": ("qwen3-30b-a3b", 6), "linear attention": ("qwen3.5-9b", 8)}
"""The shape of each model, and how many of its layers it has."""
STEPS = 4
"""Of a measurement: a single one of these small models takes 0.3 s, of which a machine's other work moves a tenth."""
SAVES = 20
"""In a round, which are short."""
SECONDS = 300
"""Most that the weights of one may take to write."""


def scale_of(name: str, tiny: bool) -> Scale:
    """As for a model of 4 billion parameters, with the vocabulary of the shape `name`."""
    scale = SCALES["tiny" if tiny else "4b"]
    text = scale.text if tiny else dataclasses.replace(scale.text, vocab=SHAPES[name].settings["vocab_size"])
    scale = dataclasses.replace(scale, text=text, kv_cache_bytes=min(scale.kv_cache_bytes, 4 * 2**30))
    return scale if tiny else dataclasses.replace(scale, output_tokens=512, micro_batch_tokens=4096)


def measure(options: argparse.Namespace, folder: Path, logs: Path) -> Iterator[Line]:
    checkouts = {"before": options.before.resolve(), "now": processes.BENCHMARKS.parent}
    for what in options.only:
        shape, layers = MODELS[what]
        scale, model = scale_of(shape, options.tiny), folder / "model"
        with (logs / f"model-{what}.log").open("w") as log:
            size = "tiny" if options.tiny else "full"
            wrote = processes.run(["measurements.cut_model", size, shape, str(layers), str(model)], SECONDS, log)
        if wrote.fault:
            raise RuntimeError(f"the model was not written: {wrote.fault}")
        serve = ["--model", f"{MODEL}={model}", "--kv-cache", str(scale.kv_cache_bytes / 2**30)]
        serve += ["--micro-batch-tokens", str(scale.micro_batch_tokens), *HALF]
        serve += ["--max-context-length", str(2 * scale.longest)]
        with contextlib.ExitStack() as stack:
            makers: dict[str, Any] = {
                name: served(
                    folder / f"data-{name}-{what}",
                    *serve,
                    log=logs / f"serve-{name}-{what}.log",
                    environment=processes.environment(checkout),
                )
                for name, checkout in checkouts.items()
            }
            runner = stack.enter_context(asyncio.Runner())
            steps = 1 if options.tiny else STEPS
            runs = {name: Run(runner, url, scale, steps) for name, url in side_by_side(makers, stack).items()}
            yield from (Line(f"training, {what}", *found) for found in training(runs, options.rounds))
            if what == "dense":
                sampled = scale.requests * scale.output_tokens
                saves = {name: run.hand_over for name, run in runs.items()}
                times = SAVES * options.rounds
                yield from (Line("saves to a first token in 1000 s", *found) for found in in_turns(saves, times, 1000))
                samples = {name: run.sample for name, run in runs.items()}
                yield from (Line("sampling, the SDK", *found) for found in in_turns(samples, options.rounds, sampled))
        shutil.rmtree(model)


def training(runs: dict[str, Run], rounds: int) -> Iterator[tuple[str, list[float]]]:
    tokens = next(iter(runs.values())).trained_tokens
    return in_turns({name: run.train for name, run in runs.items()}, rounds, tokens)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="the other checkout")
    parser.add_argument("--rounds", type=int, default=5, help="of each checkout")
    parser.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS), metavar="MODEL")
    parser.add_argument("--tiny", action="store_true", help="tiny models, on a CPU")
    parser.add_argument("--out", type=Path, help="folder for dated files of the result")
    options = parser.parse_args()
    if not (options.before / "packages").is_dir():
        parser.error(f"{options.before}: not a checkout of this project")
    if not options.tiny and not machine.gpu():
        parser.error("no NVIDIA GPU here; --tiny runs the same code on a CPU")
    gpu, versions, now = machine.describe()
    head = [gpu, versions, f"now: {now}", f"before: commit {commit_of(options.before)}", ""]
    os.environ.update(processes.environment())
    with tempfile.TemporaryDirectory(dir=None if options.tiny else room_for_models()) as folder:
        logs = (options.out or Path(folder)) / "compare-logs"
        logs.mkdir(parents=True, exist_ok=True)
        keep("compare", measure(options, Path(folder), logs), head, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
