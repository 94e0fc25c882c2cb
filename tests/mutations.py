"""Breaks one line of code per promise and shows that the promise's test turns red.

    python tests/mutations.py [--only NAME ...] [--list] [--write-docs]

What is broken, and which tests must see it, stands in `mutation_table.py`. The packages and tests are copied to a
temporary folder; nothing here is changed. First all the tests must pass on the copy as it is; then each mutation is
made alone, its tests run, and at least one case of each must fail in its body (not in a fixture, not by a time-out).

Not part of the test suite: it takes minutes. Exit status 0: all red; 1: something stayed green; 2: the table is wrong.
"""

import argparse
import importlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from mutation_table import MUTATIONS, Mutation, source_of, table_of_promises

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "promises.md"
COPIED = ("packages", "tests", "pyproject.toml")

HEAVY = (
    "fastapi",
    "peft",
    "sqlalchemy",
    "tinker",
    "torch",
    "transformers.models.auto.image_processing_auto",
    "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.qwen3_vl.modeling_qwen3_vl",
    "uvicorn",
)
"""Imported once, before the first fork: they take ten seconds, and hold nothing of ours. Not vLLM, which wants its
environment prepared by the code that is tested."""

TEST_SECONDS = 120
"""For one test with its fixtures."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one run: each case that ran, by node id, and the phases in which it failed (none: it passed);
    of those that failed, the reason."""

    failed_in: dict[str, list[str]]
    reasons: dict[str, str]
    seconds: float
    output: str

    def cases(self, test: str) -> dict[str, list[str]]:
        """The cases of one function, or the one case that `test` names."""
        return {case: when for case, when in self.failed_in.items() if case == test or case.startswith(f"{test}[")}

    def is_red(self, test: str) -> bool:
        return any(when == ["call"] for when in self.cases(test).values())

    def is_green(self, test: str) -> bool:
        cases = self.cases(test).values()
        return bool(cases) and not any(cases)


class Copy:
    """Packages and tests in a folder of their own, to be broken."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / name, folder / name)

    def run(self, tests: Sequence[str]) -> Outcome:
        """Run tests on the copy as it is now. RuntimeError if something else than the copy was imported."""
        report, printed = self.folder / "outcome.json", self.folder / "printed"
        report.unlink(missing_ok=True)
        started = time.monotonic()
        # Forked, so that what is imported already need not be imported again for every mutation.
        process = multiprocessing.get_context("fork").Process(target=self._run_pytest, args=(tests, printed))
        process.start()
        process.join(60 + TEST_SECONDS * len(tests))
        if process.is_alive():
            os.killpg(process.pid or 0, signal.SIGKILL)
            process.join()
        seconds = time.monotonic() - started
        output = printed.read_text(errors="replace")
        if not report.exists():
            return Outcome({}, {}, seconds, output)
        told = json.loads(report.read_text())
        if told["foreign"]:
            raise RuntimeError(f"not the copy was imported, but {told['foreign']}")
        return Outcome(told["failed_in"], told["reasons"], seconds, output)

    def _run_pytest(self, tests: Sequence[str], printed: Path) -> None:
        """In the forked process: everything from here on, also what tests start, sees the copy first."""
        os.setsid()
        with printed.open("w") as file:
            for stream in (1, 2):
                os.dup2(file.fileno(), stream)
        os.chdir(self.folder)
        paths = [*(str(path) for path in self.folder.glob("packages/*/src")), str(self.folder / "tests")]
        sys.path[:0] = paths
        # A file that is broken and mended within a second must not be taken from a cache.
        sys.dont_write_bytecode = True
        os.environ |= {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": os.pathsep.join(paths)}
        os.environ["MUTATED_COPY"] = str(self.folder)
        options = ["-q", "-p", "mutation_watch", "-p", "no:cacheprovider", "--tb=short", f"--timeout={TEST_SECONDS}"]
        pytest.main([*options, f"--basetemp={self.folder / 'tmp'}", *tests])
        sys.stdout.flush()
        os._exit(0)

    def run_broken(self, mutation: Mutation) -> Outcome:
        file = source_of(mutation.file, self.folder)
        text = file.read_text()
        file.write_text(text.replace(mutation.original, mutation.replacement))
        try:
            return self.run(mutation.tests)
        finally:
            file.write_text(text)


def wrong_originals(mutations: Sequence[Mutation]) -> list[str]:
    """Mutations whose original text is not in its file exactly once."""
    found = {m.name: source_of(m.file, ROOT).read_text().count(m.original) for m in mutations}
    return [f"{name}: its original text is in the file {count} times" for name, count in found.items() if count != 1]


def not_green(copy: Copy, mutations: Sequence[Mutation]) -> list[str]:
    """Tests that do not pass, or do not exist, before anything is broken."""
    tests = list(dict.fromkeys(test for mutation in mutations for test in mutation.tests))
    outcome = copy.run(tests)
    bad = [test for test in tests if not outcome.is_green(test)]
    print(f"unbroken: {len(tests) - len(bad)} of {len(tests)} tests pass, {outcome.seconds:.0f} s", flush=True)
    if bad:
        print(outcome.output[-4000:])
    return bad


def run(mutations: Sequence[Mutation]) -> int:
    wrong = wrong_originals(mutations)
    if wrong:
        print("\n".join(wrong))
        return 2
    started = time.monotonic()
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    for name in HEAVY:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        copy = Copy(Path(folder).resolve())
        if bad := not_green(copy, mutations):
            print("these tests do not pass, or do not exist:", *bad, sep="\n  ")
            return 2
        width = max(len(mutation.name) for mutation in mutations)
        green = []
        for mutation in mutations:
            outcome = copy.run_broken(mutation)
            missed = [test for test in mutation.tests if not outcome.is_red(test)]
            why = "" if missed else " ".join(next(iter(outcome.reasons.values())).split())[:60]
            verdict = "GREEN" if missed else "red"
            print(f"{mutation.name:<{width}}  {verdict:<5} {outcome.seconds:6.1f} s  {why}", flush=True)
            if missed:
                green.append(mutation.name)
                print(*(f"    {test}: {outcome.cases(test) or 'did not run'}" for test in missed), sep="\n")
                print("    " + outcome.output[-1500:].replace("\n", "\n    "), flush=True)
    minutes = (time.monotonic() - started) / 60
    print(f"{len(mutations) - len(green)} of {len(mutations)} mutations turn their tests red, {minutes:.1f} min")
    return 1 if green else 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Break one line per promise, and see its test turn red.")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these mutations alone")
    parser.add_argument("--list", action="store_true", help="name the mutations, run nothing")
    parser.add_argument("--write-docs", action="store_true", help=f"write {DOCUMENT.relative_to(ROOT)}, run nothing")
    arguments = parser.parse_args()
    by_name = {mutation.name: mutation for mutation in MUTATIONS}
    if unknown := [name for name in arguments.only or () if name not in by_name]:
        parser.error(f"unknown: {', '.join(unknown)}")
    chosen = [by_name[name] for name in arguments.only or by_name]
    if arguments.list:
        for mutation in chosen:
            print(f"{mutation.name}: {mutation.file}")
        return 0
    if arguments.write_docs:
        DOCUMENT.parent.mkdir(exist_ok=True)
        DOCUMENT.write_text(table_of_promises())
        return 0
    return run(chosen)


if __name__ == "__main__":
    sys.exit(main())
