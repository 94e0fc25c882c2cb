"""Compare two stacks of libraries on one GPU, in alternating runs: is a newer vLLM or torch slower?

    python benchmarks/stacks.py 0.26=/venvs/old/bin/python 0.32=/venvs/new/bin/python --out benchmarks/results
    python benchmarks/stacks.py a=.venv/bin/python b=.venv/bin/python --tiny      # the same code on a CPU
    python benchmarks/stacks.py … --only training alone                           # parts of it

Each stack is a Python with this project's dependencies; the project comes from this checkout. Two servers run at the
same time, one of each stack, and take turns under the official SDK: a step of training on sequences of 64 to 2,048
tokens, a save of weights up to the first token that is sampled with them, and samples of 256 tokens with that adapter.
Then vLLM's own `LLM` of each stack samples the same, after the servers have ended. Random weights, in the shape of
Qwen3-4B, of which two servers fit on 80 GB.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from baselines.vllm_alone import write_random_adapter
from control_plane import served
from engine import room_for_models
from harness import machine, processes, workloads
from harness.scale import SCALES, Scale
from measurements.steps import text_datum
from measurements.ways import Sdk, results
from on_cpu import Line, in_turns, table

MODEL = "bench/text"
PARTS = ("training", "sampling", "alone")
HALF = () if machine.gpu_count() == 0 else ("--gpu-memory-utilization", "0.45")
"""For each of two servers: one that took the whole card would leave the other to recompute its activations."""


def prompts_of(scale: Scale, seed: int) -> list[list[int]]:
    ids: list[list[int]] = (
        np.random.default_rng(seed).integers(0, scale.text.vocab, (scale.requests, scale.prompt_tokens)).tolist()
    )
    return ids


class Run:
    """A training run of a server, under the official SDK. Each method returns seconds. `steps`: that `train` sends
    before it waits for the first."""

    def __init__(self, runner: asyncio.Runner, url: str, scale: Scale, steps: int = 1) -> None:
        self._runner, self._scale, self._way = runner, scale, Sdk(url, MODEL)
        self._steps = steps
        self._run = runner.run(self._way.create(scale.rank))
        data = [text_datum(tokens) for tokens in workloads.ragged_sequences(scale)]
        self.trained_tokens = steps * sum(datum.model_input.length for datum in data)
        self._data = self._way.prepared(data)

    def train(self, _: int) -> float:
        async def train() -> None:
            sent = [await self._way.send(self._run, self._data) for _ in range(self._steps)]
            for of_step in sent:
                await results(of_step)

        return self._seconds(train())

    def hand_over(self, turn: int) -> float:
        """From the save of weights to the first token that is sampled with them."""
        return self.hand_overs(turn, 1)

    def hand_overs(self, turn: int, count: int) -> float:
        """`count` of them, one after the other."""

        async def first_tokens() -> None:
            for prompt in prompts_of(self._scale, 10**6 + turn)[:count]:
                self._sampler = await self._way.sampler(self._run)
                await self._way.sample(self._sampler, prompt, 1)

        return self._seconds(first_tokens())

    def sample(self, turn: int, scale: Scale | None = None) -> float:
        """All requests of `scale` at once; by default of that of the run."""
        scale = scale or self._scale

        async def samples() -> None:
            prompts, tokens = prompts_of(scale, turn), scale.output_tokens
            drawn = await asyncio.gather(*(self._way.sample(self._sampler, prompt, tokens) for prompt in prompts))
            if set(drawn) != {tokens}:
                raise RuntimeError(f"{min(drawn)} tokens were sampled, not {tokens}")

        return self._seconds(samples())

    def _seconds(self, work: Coroutine[Any, Any, None]) -> float:
        start = time.perf_counter()
        self._runner.run(work)
        return time.perf_counter() - start


@contextlib.contextmanager
def alone(python: str, scale: str, model: Path, adapter: Path, log: Path) -> Iterator[Callable[[int], float]]:
    """vLLM's `LLM` in a process of `python`: seconds of one piece of work."""
    with log.open("w") as errors:
        process = subprocess.Popen(
            [python, "-m", "measurements.alone_in_turn", scale, str(model), str(adapter)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=processes.BENCHMARKS,
        )
    assert process.stdin is not None
    assert process.stdout is not None
    orders, answers = process.stdin, process.stdout

    def answer() -> str:
        for line in answers:
            if line.startswith("ANSWER "):
                return line.removeprefix("ANSWER ")
        raise RuntimeError(f"vLLM's process has ended, see {log}")

    def work(turn: int) -> float:
        with contextlib.suppress(BrokenPipeError):  # `answer` says which log tells why
            orders.write(f"{turn}\n")
            orders.flush()
        return float(answer())

    try:
        answer()
        yield work
    finally:
        with contextlib.suppress(BrokenPipeError):
            orders.close()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:  # it would hold the GPU's memory
            process.kill()


def side_by_side(makers: dict[str, Any], stack: contextlib.ExitStack) -> dict[str, Any]:
    """What the context managers `makers` yield, entered at the same time."""
    with ThreadPoolExecutor() as pool:
        return dict(zip(makers, pool.map(stack.enter_context, makers.values()), strict=True))


def measure(options: argparse.Namespace, folder: Path, logs: Path) -> Iterator[Line]:
    scale = SCALES["tiny" if options.tiny else "4b"]
    processes.write_text_model(scale.name, folder, logs)
    if {"training", "sampling"} & set(options.only):
        yield from of_servers(options, scale, folder, logs)
    if "alone" in options.only:
        yield from of_vllm(options, scale, folder, logs)


def of_servers(options: argparse.Namespace, scale: Scale, folder: Path, logs: Path) -> Iterator[Line]:
    serve = ["--model", f"{MODEL}={folder / 'text'}", "--kv-cache", str(scale.kv_cache_bytes / 2**30)]
    serve += ["--micro-batch-tokens", str(scale.micro_batch_tokens), "--verbose", *HALF]
    with contextlib.ExitStack() as stack:
        makers: dict[str, Any] = {
            way: served(folder / f"data-{way}", *serve, python=python, log=logs / f"serve-{way}.log")
            for way, python in options.stacks.items()
        }
        runner = stack.enter_context(asyncio.Runner())
        runs = {way: Run(runner, url, scale) for way, url in side_by_side(makers, stack).items()}
        trained = next(iter(runs.values())).trained_tokens
        for part, what, tokens, method in (
            ("training", "training", trained, "train"),
            ("sampling", "hand-overs in 1000 s", 1000, "hand_over"),
            ("sampling", "sampling, the SDK", scale.requests * scale.output_tokens, "sample"),
        ):
            if part in options.only:
                ways = {way: getattr(run, method) for way, run in runs.items()}
                yield from (Line(what, *found) for found in in_turns(ways, options.rounds, tokens))


def of_vllm(options: argparse.Namespace, scale: Scale, folder: Path, logs: Path) -> Iterator[Line]:
    adapter = write_random_adapter(folder / "adapter", scale.text, scale.rank)
    with contextlib.ExitStack() as stack:
        makers: dict[str, Any] = {
            way: alone(python, scale.name, folder / "text", adapter, logs / f"alone-{way}.log")
            for way, python in options.stacks.items()
        }
        ways, tokens = side_by_side(makers, stack), scale.requests * scale.output_tokens
        yield from (Line("sampling, vLLM alone", *found) for found in in_turns(ways, options.rounds, tokens))


def stack_of(text: str) -> tuple[str, str]:
    name, _, python = text.partition("=")
    if not python:
        raise argparse.ArgumentTypeError(f"{text}: not NAME=PYTHON")
    return name, str(Path(python).absolute())  # not resolved: a link is what tells an environment


def versions(python: str) -> str:
    """Of the libraries that `python` finds."""
    code = "from harness import machine; print(machine.describe()[1])"
    found = subprocess.run([python, "-c", code], capture_output=True, text=True)
    return found.stdout.strip() or found.stderr.strip()[-300:]


def commit_of(checkout: Path) -> str:
    """The commit of `checkout`, or its folder's name without git."""
    found = subprocess.run(["git", "-C", checkout, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return found.stdout.strip() or checkout.name


def keep(name: str, measured: Iterator[Line], head: list[str], out: Path | None) -> None:
    """Print lines as they come and a table in the end, and write dated files into `out`; what there is also after
    Ctrl-C, or after the SIGTERM of a time limit."""
    lines: list[Line] = []
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for line in measured:
            print(line, flush=True)
            lines.append(line)
    finally:
        text = "\n".join([*head, table(lines)])
        print(text)
        if out:
            path = out / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
            path.with_suffix(".txt").write_text(text + "\n")
            path.with_suffix(".jsonl").write_text(
                "".join(json.dumps(dataclasses.asdict(line)) + "\n" for line in lines)
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stacks", nargs=2, type=stack_of, metavar="NAME=PYTHON")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path, help="folder for dated files of the result")
    options = parser.parse_args()
    if len(dict(options.stacks)) < 2:
        parser.error("the two stacks need two names")
    options.stacks = dict(options.stacks)
    os.environ.update(processes.environment())  # all processes inherit it
    gpu, _, commit = machine.describe()
    head = [gpu, commit, *(f"{name}: {versions(python)}" for name, python in options.stacks.items()), ""]
    with tempfile.TemporaryDirectory(dir=None if options.tiny else room_for_models()) as folder:
        logs = (options.out or Path(folder)) / "stacks-logs"
        logs.mkdir(parents=True, exist_ok=True)
        keep("stacks", measure(options, Path(folder), logs), head, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
