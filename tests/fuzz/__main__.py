"""Fuzzing in pieces: python -m tests.fuzz --file STATE [--count 10000] [--piece 2000] [--coverage] [CLASS ...]

Goes on where STATE says that the last piece ended. `--coverage` reports branches of the parsers, if coverage.py is
installed, and takes several times as long.
"""

import argparse
import logging
import sys
import warnings
from pathlib import Path

PARSERS = ("*/tinker_local/types/*", "*/http/bodies.py", "*/rendering/decoding.py", "*/losses/loss.py")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("classes", nargs="*")
    parser.add_argument("--file", type=Path, required=True)
    parser.add_argument(
        "--count", type=int, default=10000, help="cases of each class, those of earlier pieces included"
    )
    parser.add_argument("--piece", type=int, default=2000)
    parser.add_argument("--coverage", action="store_true")
    arguments = parser.parse_args()
    measured = None
    if arguments.coverage:
        import coverage  # type: ignore[import-not-found]

        measured = coverage.Coverage(branch=True, include=PARSERS, data_file=None)
        measured.start()
    from tests.fuzz.fuzz_run import Progress, load, run_piece, save
    from tests.fuzz.targets import TARGETS

    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")  # of Pillow, about broken files
    state = load(arguments.file)
    for name in arguments.classes or TARGETS:
        progress = state.setdefault(name, Progress())
        while progress.cases < arguments.count:
            run_piece(name, progress, min(arguments.piece, arguments.count - progress.cases))
            save(arguments.file, state)
        rate = progress.cases / max(progress.seconds, 1e-9)
        print(
            f"{name}: {progress.cases} cases, {rate:.0f} a second, slowest {1000 * progress.slowest:.0f} ms, "
            f"{len(progress.faults)} faults, memory {'flat' if progress.flat() else f'grows: {progress.resident}'}",
            flush=True,
        )
        for fault in progress.faults[:20]:
            print(f"  {fault}")
    if measured is not None:
        measured.stop()
        measured.report(show_missing=True, skip_empty=True)
    return int(any(each.faults or not each.flat() for each in state.values()))


sys.exit(main())
