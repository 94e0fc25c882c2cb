"""Compare several replicas of the sampler with one: output tokens per second, and from a save to its first token.

    python benchmarks/replicas.py --out benchmarks/results       # two GPUs with 140 GiB each, eight minutes
    python benchmarks/replicas.py --replicas 4                   # four
    python benchmarks/replicas.py --replicas 1 --tp 2            # one on two GPUs, not compared
    python benchmarks/replicas.py --tiny                         # the same code on a CPU, some minutes

Random weights in the shape of Qwen3-8B. Rates are those of the `Sampler` protocol, with requests as in `engine.py`: one
replica and all of them are measured in turns, with as many requests for each replica. A first token is measured in
process, with one replica and with all, in two processes. The trainer is on the first GPU.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from engine import room_for_models
from harness import machine, processes, report
from harness.lines import Line
from harness.ratios import Ratio

PARTS = ("rate", "first_token")
LIMIT = 420.0
"""Seconds of a process."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="tiny models; fails if anything does")
    parser.add_argument("--replicas", type=int, default=2, metavar="N", help="how many (2)")
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="GPUs of each replica (1)")
    parser.add_argument("--only", choices=PARTS, help="this part alone")
    parser.add_argument("--out", type=Path, help="folder for dated files of the result")
    parser.add_argument("--models", type=Path, help="folder where random models are kept and found again")
    parser.add_argument("--log", type=Path, help="file for other output of the measurements (default: a temporary one)")
    options = parser.parse_args()
    if options.replicas * options.tp < 2:
        parser.error(f"--replicas {options.replicas} --tp {options.tp}: at least 2 GPUs")
    gpus = machine.gpu_count()
    if not options.tiny and gpus < options.replicas * options.tp:
        needed = options.replicas * options.tp
        parser.error(f"these replicas need {needed} GPUs, and there are {gpus}; --tiny runs the same code on a CPU")
    return options


def ratios(replicas: int) -> list[Ratio]:
    """What `replicas` promise."""
    return [
        Ratio(
            f"{replicas} replicas / one, tokens/s", f"replicas.rate_{replicas}", ("replicas.rate_1",), 0.95 * replicas
        ),
        Ratio(
            f"save to first token, {replicas} replicas / one",
            f"replicas.first_token_{replicas}",
            ("replicas.first_token_1",),
            1.3,
            "at most",
        ),
    ]


def main() -> int:
    options = arguments()
    scale, parts = "tiny" if options.tiny else "full", [options.only] if options.only else list(PARTS)
    lines: list[Line] = []
    with tempfile.TemporaryDirectory(dir=None if options.tiny else room_for_models(), prefix="bench-") as folder:
        models = options.models.resolve() if options.models else Path(folder)
        models.mkdir(parents=True, exist_ok=True)
        with (options.log or Path(tempfile.gettempdir()) / "tinker-local-bench.log").open("w") as log:
            runs = [(options.replicas, parts)]
            if "first_token" in parts and options.replicas > 1:
                runs.append((1, ["first_token"]))
            outcome = processes.run(["measurements.models", scale, str(models), "text"], LIMIT, log)
            for replicas, wanted in runs if not outcome.fault else []:
                command = [
                    "measurements.several_replicas",
                    scale,
                    str(models / "text"),
                    str(replicas),
                    str(options.tp),
                    *wanted,
                ]
                outcome = processes.run(command, LIMIT, log)
                lines += outcome.lines
                if outcome.fault:
                    break
            if outcome.fault:
                lines.append(Line("replicas", error=outcome.fault[:300]))
                processes.show(lines[-1])
    compared = ratios(options.replicas) if options.tp == 1 else ()
    report.show("replicas", lines, options.out, tiny=options.tiny, ratios=compared)
    print(f"other output of the measurements: {log.name}")
    return 1 if any(line.error for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
