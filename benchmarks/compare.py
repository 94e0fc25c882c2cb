"""Compare two checkouts on one GPU, in alternating runs under the official SDK: has a change made anything slower?

    git worktree add ../before COMMIT
    python benchmarks/compare.py ../before --out benchmarks/results
    python benchmarks/compare.py ../before --tiny                         # the same code on a CPU

Two servers run at the same time, one of each checkout, and take turns: four steps of training, sent before the first
is waited for, on sequences of 64 to 2,048 tokens of a model with dense layers, of one with experts and of one with
linear attention; and with the dense one from a save of weights to the first token that is sampled with them, and
samples of 512 tokens with that adapter. Random weights in the shapes of Qwen3-8B, Qwen3-30B-A3B and Qwen3.5-9B with
fewer layers. The server that goes first changes each time. Only the API is used, so that a checkout may be of any age.

A line ends when the 95 % interval of its ratio is within 1 %, or after --seconds. What waits for the host's processors
moves by a tenth from one round to the next, so each server has half of the cores to itself, and nothing else should run
on the machine, not on another of its GPUs either.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from control_plane import served
from engine import room_for_models
from harness import machine, processes
from harness.model_shapes import SHAPES
from harness.scale import SCALES, Scale
from on_cpu import Line, in_turns, interval
from stacks import HALF, MODEL, Run, commit_of, keep, side_by_side

MODELS = {"dense": ("qwen3-8b", 12), "experts": ("qwen3-30b-a3b", 6), "linear attention": ("qwen3.5-9b", 8)}
"""The shape of each model, and how many of its layers it has."""
STEPS = 4
"""Of a measurement: a single one of these small models takes 0.3 s, of which a machine's other work moves a tenth."""
SAVES = 5
"""Of a measurement, after one that is not counted: the first after a turn of the other server takes twice as long."""
SECONDS = 300
"""Most that the weights of one may take to write."""
PRECISE = 0.01
"""Width of an interval that is narrow enough."""
LINES = ("training", "saves", "sampling")
"""How the names of lines begin."""
FEWEST, MOST = 8, 1000
"""Rounds of a line."""


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
        cores = halves(sorted(os.sched_getaffinity(0)))
        with contextlib.ExitStack() as stack:
            makers: dict[str, Any] = {
                name: served(
                    folder / f"data-{name}-{what}",
                    *serve,
                    log=logs / f"serve-{name}-{what}.log",
                    environment=processes.environment(checkout),
                    cores=own,
                )
                for (name, checkout), own in zip(checkouts.items(), cores, strict=True)
            }
            runner = stack.enter_context(asyncio.Runner())
            steps = 1 if options.tiny else STEPS
            runs = {name: Run(runner, url, scale, steps) for name, url in side_by_side(makers, stack).items()}
            parts: dict[str, tuple[Callable[[Run, int], float], int]] = {
                f"training, {what}": (Run.train, next(iter(runs.values())).trained_tokens)
            }
            if what == "dense":
                parts["saves to a first token in 1000 s"] = (several_saves, 1000 * SAVES)
                parts["sampling, the SDK"] = (Run.sample, scale.requests * scale.output_tokens)
            for part, (work, amount) in parts.items():
                if not part.startswith(tuple(options.lines)):
                    continue
                ways = {name: partial(work, run) for name, run in runs.items()}
                yield from (Line(part, *found) for found in in_turns(ways, MOST, amount, enough(options.seconds)))
        shutil.rmtree(model)


def several_saves(run: Run, turn: int) -> float:
    run.hand_over(turn)
    return run.hand_overs(turn, SAVES)


def halves(cores: list[int]) -> tuple[list[int], list[int]]:
    """Neighbours, which may be two threads of one core, stay together."""
    middle = len(cores) // 4 * 2
    return (cores[:middle], cores[middle : 2 * middle]) if middle else (cores, cores)


def enough(seconds: float) -> Callable[[list[list[float]]], bool]:
    """Whether a line of two ways has been measured well, or for `seconds`."""
    end = time.monotonic() + seconds

    def known(taken: list[list[float]]) -> bool:
        if len(taken[0]) < FEWEST:
            return False
        least, most = interval(taken[0], taken[1])
        return most - least <= PRECISE or time.monotonic() > end

    return known


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="the other checkout")
    parser.add_argument("--seconds", type=float, default=150, help="most of a line, of which there are five")
    parser.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS), metavar="MODEL")
    parser.add_argument("--lines", nargs="+", choices=LINES, default=list(LINES), metavar="LINE")
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
