"""How fast this project samples beside vLLM alone, on one GPU in one run, and where the time goes.

    python benchmarks/sampling_speed.py --out benchmarks/results       # an H200, about five minutes
    python benchmarks/sampling_speed.py --waves alone2,sdk2 --only lora_logprobs,one_lora
    python benchmarks/sampling_speed.py --waves alone2,sdk2 --trace sdk2   # kernels and stacks as well
    python benchmarks/sampling_speed.py --tiny --waves sdk1,engine2    # the same code on a CPU

A subject is a way to sample. Those of a wave (between two `;`) start together and then do each piece of work in turn,
so that a ratio within a wave is of one GPU in one state. `alone`: vLLM's `LLM`, without `torch.compile` and with CUDA
graphs, as this project's engine; `compiled`: with all of vLLM's defaults; `engine`: this project's sampler in its
process; `sdk`: the official SDK against a server. The digit is vLLM's model runner. A word after `+` is one of
`VARIANTS`. Random weights in the shape of Qwen3-8B, LoRA of rank 32 on all layers.
"""

import argparse
import dataclasses
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from harness import machine, processes, report
from harness.lines import Line
from harness.ratios import Ratio
from harness.scale import SCALES, Scale
from measurements import watching

WAVES = "alone2,sdk2;sdk1,engine2,compiled2"
VARIANTS: dict[str, dict[str, str]] = {
    "theirs": {"TINKER_LOCAL_BENCH_THEIR_LORA": "1"},
    "dual": {"VLLM_LORA_ENABLE_DUAL_STREAM": "1"},
    "roomy": {"TINKER_LOCAL_BENCH_MAX_RANK": "128"},
}
"""Variables of the environment by the variant's name: vLLM's LoRA kernels in our engine, vLLM's on two streams, and
slots with room for rank 128, a server's default, in this project's."""
START_SECONDS = 240.0


@dataclass(frozen=True, slots=True)
class Work:
    """What is sampled: `samples` of each of `prompts` random prompts. `side`: of a picture in each, in pixels, or 0."""

    prompts: int
    samples: int
    prompt_tokens: int
    output_tokens: int
    adapter: bool = False
    logprobs: bool = False
    side: int = 0
    seed: int = 0

    @property
    def amount(self) -> int:
        """Tokens, or pictures."""
        return self.prompts if self.side else self.prompts * self.samples * self.output_tokens


def works(scale: Scale) -> dict[str, Work]:
    """By name. This project always returns logprobs, so it does those without them as `…_logprobs`."""
    full = scale.name == "full"
    group = Work(32, 16, 256, 256) if full else Work(2, 3, 8, 8)
    one = dataclasses.replace(group, prompts=1, samples=1)
    different = dataclasses.replace(group, prompts=group.prompts * group.samples, samples=1)
    pictures = Work(256, 1, 64, 1, side=448) if full else Work(2, 1, 8, 1, side=32)
    with_adapter = {"adapter": True, "logprobs": True}
    return {  # what is cut off if time is short comes last
        "base": group,
        "lora_logprobs": dataclasses.replace(group, **with_adapter),
        "one_lora": dataclasses.replace(one, **with_adapter),
        "base_logprobs": dataclasses.replace(group, logprobs=True),
        "one_base": dataclasses.replace(one, logprobs=True),
        "different": dataclasses.replace(different, **with_adapter),
        "lora": dataclasses.replace(group, adapter=True),
        "pictures": pictures,
    }


OURS = ("base_logprobs", "lora_logprobs", "one_base", "one_lora", "different")
"""What subjects of this project do; `different` only with a large cache."""
CACHE_GIB, LARGE_CACHE_GIB = 21.0, 36.5
"""Of 139,264 tokens, that a group of 16 needs for 32 prompts, and of 262,144, that 512 different ones need."""


@dataclass(frozen=True, slots=True)
class Named:
    """A subject by its name, such as `engine2+dual`."""

    name: str

    @property
    def kind(self) -> str:
        return self.name.partition("+")[0][:-1]

    @property
    def ours(self) -> bool:
        """Whether it is of this project, which returns logprobs whether they are asked for or not."""
        return self.kind in ("engine", "sdk")

    @property
    def runner(self) -> str:
        return self.name.partition("+")[0][-1]

    @property
    def environment(self) -> dict[str, str]:
        chosen = self.name.split("+")[1:]
        found = {"VLLM_USE_V2_MODEL_RUNNER": str(int(self.runner) - 1)}
        for word in chosen:
            found |= VARIANTS[word]
        return found


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a tiny model on a CPU; fails if anything does")
    parser.add_argument("--waves", default=WAVES, help=f"subjects, by default {WAVES}")
    parser.add_argument("--only", default="", metavar="NAME,…", help=f"of {', '.join(works(SCALES['full']))}")
    parser.add_argument(
        "--trace", default="", metavar="SUBJECT,…", help="also watch lora_logprobs and one_lora of these"
    )
    parser.add_argument("--rounds", type=int, default=1, help="of each piece of work; the median counts")
    parser.add_argument("--budget-seconds", type=float, default=1e9, help="begin nothing after so many seconds")
    parser.add_argument("--out", type=Path, help="folder for dated files of the result")
    parser.add_argument("--models", type=Path, help="folder where the random model is kept and found again")
    parser.add_argument("--log", type=Path, help="file for other output (default: a temporary one)")
    options = parser.parse_args()
    options.waves = [[Named(name) for name in wave.split(",")] for wave in options.waves.split(";")]
    for subject in (each for wave in options.waves for each in wave):
        words = subject.name.split("+")[1:]
        if (
            subject.kind not in ("alone", "compiled", "engine", "sdk")
            or subject.runner not in "12"
            or set(words) - set(VARIANTS)
        ):
            parser.error(f"--waves {subject.name}: no such subject")
    if unknown := set(filter(None, options.only.split(","))) - set(works(SCALES["full"])):
        parser.error(f"--only: there is no {', '.join(unknown)}")
    if not options.tiny and not machine.gpu():
        parser.error("no NVIDIA GPU here; --tiny runs the same code on a CPU")
    return options


class Running:
    """The process of a subject."""

    def __init__(self, subject: Named, scale: Scale, model: Path, adapter: Path, gib: float, log: TextIO, hooks: Path):
        self.name, self.hooks = subject.name, hooks
        environment = watching.environment_of(hooks, processes.environment()) | subject.environment
        if subject.runner == "2" and scale.name == "tiny":
            environment["TRITON_INTERPRET"] = "1"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "measurements.sampling_subject", subject.kind, scale.name, str(model), str(adapter),
             str(gib)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment,
            cwd=processes.BENCHMARKS, start_new_session=True,
        )  # fmt: skip
        self.pid = self._process.pid

    def answer(self, patience: float) -> float:
        """The seconds that the subject says; RuntimeError if it ends or takes longer than `patience`."""
        assert self._process.stdout is not None
        late = threading.Timer(patience, self.end)
        late.start()
        try:
            for line in self._process.stdout:
                if line.startswith("ANSWER "):
                    return float(line.removeprefix("ANSWER "))
        finally:
            late.cancel()
        raise RuntimeError("its process has ended, or took too long; the log says why")

    def send(self, work: Work) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(dataclasses.asdict(work)) + "\n")
            self._process.stdin.flush()

    def end(self) -> None:
        for process in reversed(watching.processes_of(self.pid)):
            with suppress(ProcessLookupError):
                os.kill(process, 9)
        self._process.wait()


@contextmanager
def ended(running: Sequence[Running]) -> Iterator[None]:
    try:
        yield
    finally:
        for each in running:
            each.end()


class Run:
    """Lines of all waves."""

    def __init__(self, options: argparse.Namespace, scale: Scale, model: Path, adapter: Path, log: TextIO) -> None:
        self._options, self._scale, self._model, self._adapter, self._log = options, scale, model, adapter, log
        self._end = time.monotonic() + options.budget_seconds
        self._seed = 0
        self._cpu: dict[str, str] = {}
        self.lines: list[Line] = []

    def wave(self, subjects: Sequence[Named], folder: Path) -> None:
        large = len(subjects) < 3
        gib = (LARGE_CACHE_GIB if large else CACHE_GIB) if self._scale.name == "full" else 0.0625
        running = []
        for subject in sorted(subjects, key=lambda each: each.kind != "sdk"):  # its plan is of the free memory
            hooks = folder / subject.name
            hooks.mkdir(parents=True, exist_ok=True)
            running.append(Running(subject, self._scale, self._model, self._adapter, gib, self._log, hooks))
        with ended(running):
            up = [each for each in running if self._started(each)]
            chosen = [name for name in self._options.only.split(",") if name]
            for name, work in works(self._scale).items():
                if name == "different":
                    self._traced(up)
                if (chosen and name not in chosen) or (name == "pictures" and not chosen):
                    continue
                if name == "different" and not large:
                    continue
                able = [each for each in up if name in (*OURS, "pictures") or not Named(each.name).ours]
                found: dict[str, list[float]] = {each.name: [] for each in able}
                for _ in range(self._options.rounds):
                    for each in able:
                        if each in up and (seconds := self._measured(each, name, work)) is not None:
                            found[each.name].append(seconds)
                        elif each in up and time.monotonic() < self._end:
                            up.remove(each)
                for subject, times in found.items():
                    if times:
                        self._note(rate(f"{subject}.{name}", work, times, self._cpu[subject]))

    def _traced(self, up: Sequence[Running]) -> None:
        for each in up:
            for name in ("lora_logprobs", "one_lora") if each.name in self._options.trace.split(",") else ():
                self._watched(each, name, works(self._scale)[name])

    def _note(self, line: Line) -> None:
        self.lines.append(line)
        processes.show(line)

    def _started(self, each: Running) -> bool:
        try:
            seconds = each.answer(min(START_SECONDS, max(1.0, self._end - time.monotonic())))
            pictures = self._options.only == "pictures"
            for adapter in () if pictures else (False, True):
                warm = dataclasses.replace(works(self._scale)["lora_logprobs"], adapter=adapter, output_tokens=8)
                self._seconds(each, warm)
            if pictures:
                self._seconds(each, dataclasses.replace(works(self._scale)["pictures"], prompts=16))
        except RuntimeError as error:
            self._note(Line(f"{each.name}.start", error=str(error)))
            return False
        self._note(Line(f"{each.name}.start", seconds, "s"))
        return True

    def _seconds(self, each: Running, work: Work) -> float:
        self._seed += 1
        each.send(dataclasses.replace(work, seed=self._seed))
        return each.answer(min(120.0, max(5.0, self._end - time.monotonic() + 15.0)))

    def _measured(self, each: Running, name: str, work: Work) -> float | None:
        """Seconds of a round; None if it failed, or if the time is spent."""
        if time.monotonic() > self._end:
            self._note(Line(f"{each.name}.{name}", skipped="the budget of time is spent"))
            return None
        before = watching.cpu_seconds(each.pid)
        try:
            seconds = self._seconds(each, work)
        except RuntimeError as error:
            self._note(Line(f"{each.name}.{name}", error=str(error)))
            return None
        busy = watching.spent(before, watching.cpu_seconds(each.pid), 4)
        # A step of all sequences is one token of each. A thread that waits for the GPU is busy, too.
        self._cpu[each.name] = ", ".join(f"{1e3 * spent / work.output_tokens:.1f}" for _, _, spent in busy)
        print(f"  {each.name}.{name}: {seconds:.2f} s", flush=True)
        return seconds

    def _watched(self, each: Running, name: str, work: Work) -> None:
        """Kernels and stacks in the middle of `work`."""
        if time.monotonic() > self._end:
            return
        rates = [line.seconds for line in self.lines if line.name == f"{each.name}.{name}" and line.seconds]
        usual = rates[0] if rates else 1.0
        self._seed += 1
        begin = time.monotonic()
        each.send(dataclasses.replace(work, seed=self._seed))
        time.sleep(0.45 * usual)
        found = watching.watched(each.hooks, min(1.0, 0.25 * usual))
        try:
            seconds = each.answer(max(10.0, 90.0 - (time.monotonic() - begin)))
        except RuntimeError as error:
            self._note(Line(f"{each.name}.{name}.trace", error=str(error)))
            return
        title = f"== {each.name}, {name}: {seconds:.1f} s while watched"
        print(title, flush=True)
        for process in found:
            self._show_process(f"{each.name}.{name}", process)

    def _show_process(self, name: str, process: watching.Watched) -> None:
        found = process.found
        print(
            f"-- process {process.pid}: {found['command'][-90:]}; {found['cpu_seconds'] / found['seconds']:.2f} cores "
            f"{found.get('error', '')}"
        )
        if steps := process.steps:
            busy, span = (found[name] / 1e3 / steps for name in ("busy_us", "span_us"))
            print(f"   {steps} steps; busy {busy:.3f} of {span:.3f} ms")
            self._note(Line(f"{name}.kernels.idle", span - busy, "ms a step"))
            for kind, milliseconds in process.kinds().items():
                self._note(Line(f"{name}.kernels.{kind}", milliseconds / steps, "ms a step"))
            for kernel, count, milliseconds in process.kernels(16):
                print(f"   {milliseconds / steps:8.3f} ms {count / steps:7.1f} x {kernel[:110]}")
        for thread, place, share in process.stacks(14):
            print(f"   {100 * share:5.1f} % {thread[:18]:18} {place[:190]}")


def rate(name: str, work: Work, seconds: Sequence[float], cpu: str) -> Line:
    """The median of all rounds."""
    median = statistics.median(seconds)
    rates = [work.amount / each for each in seconds]
    note = f"{min(rates):,.0f} to {max(rates):,.0f} in {len(rates)} rounds; " if len(rates) > 1 else ""
    unit = "pictures/s" if work.side else "tokens/s"
    return Line(name, work.amount / median, unit, median, note=f"{note}CPU ms a step of the busiest threads: {cpu}")


def ratios(lines: Sequence[Line]) -> list[Ratio]:
    """Each subject beside `alone2`: with the same adapter and logprobs, and beside its base without either."""
    names = [line.name for line in lines]
    found = []
    for subject in dict.fromkeys(name.partition(".")[0] for name in names):
        if subject == "alone2":
            continue
        found += [
            Ratio(f"{subject} / alone2, {work}", f"{subject}.{work}", (f"alone2.{work}",), 0.97)
            for work in OURS
            if f"{subject}.{work}" in names and f"alone2.{work}" in names
        ]
        if f"{subject}.lora_logprobs" in names and "alone2.base" in names:
            found.append(
                Ratio(f"{subject}.lora_logprobs / alone2.base", f"{subject}.lora_logprobs", ("alone2.base",), 0.88)
            )
    return found


def main() -> int:
    options = arguments()
    scale = SCALES["tiny" if options.tiny else "full"]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the subjects
    log_file = options.log or Path(tempfile.gettempdir()) / "tinker-local-sampling-speed.log"
    kind, began = "vl" if options.only == "pictures" else "text", time.monotonic()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="speed-")))
        log = stack.enter_context(log_file.open("w"))
        models = options.models.resolve() if options.models else folder / "models"
        models.mkdir(parents=True, exist_ok=True)
        on_term = signal.getsignal(signal.SIGTERM)
        written = processes.run(["measurements.models", scale.name, str(models), kind], 300, log)
        if written.fault:
            print(f"the model was not written: {written.fault}")
            return 1
        signal.signal(signal.SIGTERM, on_term)
        print(f"-- random model: {written.seconds:.0f} s", flush=True)
        from baselines.vllm_alone import write_random_adapter

        adapter = write_random_adapter(folder / "adapter", scale.text, scale.rank)
        run = Run(options, scale, models / kind, adapter, log)
        for number, wave in enumerate(options.waves):
            run.wave(wave, folder / f"wave{number}")
    took = time.monotonic() - began
    shown = ratios(run.lines)
    report.show("sampling_speed", run.lines, options.out, tiny=options.tiny, seconds=took, ratios=shown)
    print(f"other output: {log_file}")
    return 1 if options.tiny and any(line.error for line in run.lines) else 0


if __name__ == "__main__":
    sys.exit(main())
