"""Compare training and sampling with what a user would run instead, as ratios within one run.

    python benchmarks/engine.py --out benchmarks/results     # a GPU with 140 GiB, 25 minutes
    python benchmarks/engine.py --tiny                       # the same code on a CPU, about a minute
    python benchmarks/engine.py --only text,adapters         # a part; --list names the parts

Random weights in the shapes of Qwen3-8B and Qwen3-VL-8B. benchmarks/README.md says what each line means.
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TextIO

from harness import machine, plan, processes, ratios, report
from harness.lines import Line

MODEL_BYTES = 36 * 2**30
"""Disk space of both models at full scale, with some room."""
TRACES = "TINKER_LOCAL_BENCH_TRACES"
"""Tells `measurements/tracing.py` where to keep the trace."""
TINY_LIMIT = 600.0
"""Seconds; on two idle cores it takes a tenth of that."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="tiny models; fails if anything does")
    parser.add_argument("--only", default="", metavar="NAME,…", help="these measurements, or those before the dot")
    parser.add_argument("--list", action="store_true", help="print the measurements and stop")
    parser.add_argument("--out", type=Path, help="folder for dated files of the result")
    parser.add_argument("--models", type=Path, help="folder where random models are kept and found again")
    parser.add_argument("--budget-seconds", type=float, help="skip measurements that no longer fit in this time")
    parser.add_argument("--keep-trace", action="store_true", help="keep the chrome trace, gzipped, in --out")
    parser.add_argument("--log", type=Path, help="file for other output of the measurements (default: a temporary one)")
    options = parser.parse_args()
    try:
        options.chosen = plan.selected([name for name in options.only.split(",") if name])
    except ValueError as error:
        parser.error(str(error))
    if options.keep_trace and options.out is None:
        parser.error("--keep-trace: give --out, the folder where the trace goes")
    if not options.tiny and not options.list and not machine.gpu():
        parser.error("no NVIDIA GPU here; --tiny runs the same code on a CPU")
    return options


def room_for_models() -> str:
    """A folder for temporary models: shared memory if it is large enough, since every start reads them."""
    shared = Path("/dev/shm")
    fits = shared.is_dir() and shutil.disk_usage(shared).free > MODEL_BYTES
    return str(shared) if fits else tempfile.gettempdir()


class Run:
    """One run: writes the models, runs the processes in turn, gathers `lines`."""

    def __init__(self, options: argparse.Namespace, models: Path, log: TextIO) -> None:
        self._scale = "tiny" if options.tiny else "full"
        self._tiny: bool = options.tiny
        self._chosen: list[plan.Measurement] = options.chosen
        self._models = models
        self._log = log
        self._end = None if options.budget_seconds is None else time.monotonic() + options.budget_seconds
        self.lines: list[Line] = []

    def everything(self) -> None:
        """Run all chosen measurements; one that fails or no longer fits prints a line with the reason."""
        kinds = sorted({kind for measurement in self._chosen for kind in measurement.models})
        if kinds and not self._tiny:  # each process writes its own tiny models
            outcome = processes.run(["measurements.models", self._scale, str(self._models), *kinds], 300, self._log)
            print(f"-- random models {', '.join(kinds)}: {outcome.seconds:.0f} s {outcome.fault}", flush=True)
            if outcome.fault:
                self.lines.append(Line("models", error=outcome.fault))
        groups = plan.processes(self._chosen, tiny=self._tiny)
        if self._tiny:  # numbers of tiny models mean nothing, so measurements may disturb each other
            with ThreadPoolExecutor() as at_once:
                list(at_once.map(self._group, groups))
        else:
            for group in groups:
                self._group(group)

    def _group(self, group: Sequence[plan.Measurement]) -> None:
        fitting = [measurement for measurement in group if self._tiny or self._fits(measurement, group)]
        for measurement in group:
            if measurement not in fitting:
                self.lines.append(Line(measurement.name, skipped="its usual time exceeds the rest of the budget"))
                processes.show(self.lines[-1])
        if not fitting:
            return
        limit = TINY_LIMIT if self._tiny else float(sum(measurement.seconds for measurement in fitting))
        if self._end is not None:
            limit = max(1.0, min(limit, self._end - time.monotonic()))
        names = [measurement.name for measurement in fitting]
        models = self._models / names[0] if self._tiny else self._models
        outcome = processes.run(["measurements", self._scale, str(models), *names], limit, self._log)
        self.lines += outcome.lines
        if outcome.fault:
            self.lines.append(Line(" + ".join(names), error=outcome.fault[:300]))
            processes.show(self.lines[-1])
        print(f"-- {', '.join(names)}: {outcome.seconds:.0f} s", flush=True)

    def _fits(self, measurement: plan.Measurement, group: Sequence[plan.Measurement]) -> bool:
        """Whether `measurement` and those before it in its process usually finish in time."""
        if self._end is None:
            return True
        before = group[: group.index(measurement) + 1]
        return time.monotonic() + sum(item.usual for item in before) <= self._end


def main() -> int:
    options = arguments()
    if options.list:
        for measurement in options.chosen:
            print(f"{measurement.name:36} about {measurement.usual} s")
        return 0
    if options.keep_trace:
        os.environ[TRACES] = str(options.out.resolve())
    began = time.monotonic()
    with tempfile.TemporaryDirectory(dir=None if options.tiny else room_for_models(), prefix="bench-") as folder:
        models = options.models.resolve() if options.models else Path(folder)
        models.mkdir(parents=True, exist_ok=True)
        log = (options.log or Path(tempfile.gettempdir()) / "tinker-local-bench.log").open("w")
        with log:
            run = Run(options, models, log)
            run.everything()
        took = time.monotonic() - began
        report.show("engine", run.lines, options.out, tiny=options.tiny, seconds=took, ratios=ratios.RATIOS)
        print(f"other output of the measurements: {log.name}")
    if not options.tiny:
        return 0
    unknown = ratios.unknown(run.lines) if len(options.chosen) == len(plan.MEASUREMENTS) else []
    if unknown:
        print(f"ratios name lines that no measurement printed: {', '.join(dict.fromkeys(unknown))}")
    return 1 if unknown or any(line.error for line in run.lines) else 0


if __name__ == "__main__":
    sys.exit(main())
