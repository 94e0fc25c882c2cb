"""Compare the training rate of two checkouts on one GPU, in alternating runs: has a change made it slower?

    git worktree add ../before COMMIT
    python benchmarks/compare.py ../before --out benchmarks/results       # an 8B model; about 7 minutes
    python benchmarks/compare.py ../before --tiny                         # the same code on a CPU

Each run is a separate process, which loads the trainer and times the step of `text.ours` (README.md); the checkout that
runs first changes each time. Prints every run, and the ratio of the medians, this checkout's over the other's.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness import machine, processes, report
from harness.lines import Line

LIMIT = 180.0
"""Seconds of a run."""


def commit_of(checkout: Path) -> str:
    """The commit of `checkout`, or its folder's name without git."""
    found = subprocess.run(["git", "-C", checkout, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return found.stdout.strip() or checkout.name


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="the other checkout")
    parser.add_argument("--runs", type=int, default=5, help="runs of each checkout")
    parser.add_argument("--tiny", action="store_true", help="a tiny model; fails if anything does")
    parser.add_argument("--out", type=Path, help="folder for dated files of the result")
    parser.add_argument("--models", type=Path, help="folder where random models are kept and found again")
    options = parser.parse_args()
    if not (options.before / "packages").is_dir():
        parser.error(f"{options.before}: not a checkout of this project")
    if not options.tiny and not machine.gpu():
        parser.error("no NVIDIA GPU here; --tiny runs the same code on a CPU")
    scale = "tiny" if options.tiny else "full"
    checkouts = {"before": options.before.resolve(), "now": processes.BENCHMARKS.parent}
    lines: list[Line] = []
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="compare-") as folder, (Path(folder) / "log").open("w+") as log:
        models = options.models.resolve() if options.models else Path(folder) / "models"
        models.mkdir(parents=True, exist_ok=True)
        processes.run(["measurements.models", scale, str(models), "text"], 300, log)
        for number in range(options.runs):
            for name in ("before", "now") if number % 2 == 0 else ("now", "before"):
                found = processes.run(["measurements.rate", scale, str(models), name], LIMIT, log, checkouts[name])
                lines += found.lines
                if found.fault:
                    log.seek(0)
                    print(log.read()[-4000:])
                    lines.append(Line(name, error=found.fault[:300]))
                    processes.show(lines[-1])
    values = {name: [line.value for line in lines if line.name == name and line.value] for name in checkouts}
    if all(values.values()):
        ratio = statistics.median(values["now"]) / statistics.median(values["before"])
        note = ", ".join(f"{name} {commit_of(checkout)}" for name, checkout in checkouts.items())
        lines.append(Line("now / before", ratio, "", note=f"of the medians of {len(values['now'])} runs; {note}"))
    report.show("compare", lines, options.out, tiny=options.tiny, seconds=time.monotonic() - began)
    return 1 if options.tiny and any(line.error for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
