"""Break one line of code at a time, and see the test that is marked with it fail.

    python tests/mutations.py [--only NAME ...] [--list] [--check] [--workers N]

A mutation is a mark of the test that catches it:

    @pytest.mark.mutation("eps-ignored", "AdamW.updated", "+ settings.eps", "")

Its arguments: a name; a function by its name, with as much before it as only one function has; a text that is in the
function exactly once; and what replaces it. `cases=("one", "two")` says which cases of a parametrized test must fail,
otherwise one of them must. Marks are for promises whose test one would not believe otherwise: of numbers, of order, of
what is durable, and of what one client sees of another. `make mutants` breaks everything in two folders by rule.

The packages and tests, and what tests read beside them, are copied to temporary folders, one per worker; nothing here
is changed. First all the tests must pass on a copy as it is. Then each mutation is made alone, and its tests run and
must fail in their bodies, not in a fixture and not by a timeout.

Not part of the test suite, because it takes minutes. Exit status 0: every mutation was caught; 1: a test stayed green;
2: a mutation does not apply, or a test does not pass on the unbroken copy, and its mutations were left out.
"""

import argparse
import ast
import functools
import importlib
import importlib.util
import json
import multiprocessing
import os
import py_compile
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import hypothesis
import pytest

ROOT = Path(__file__).parents[1]
COPIED = (
    *("packages", "tests", "benchmarks", "docs", "examples", "scripts"),
    *("CONTRIBUTING.md", "LICENSE", "Makefile", "README.md", "pyproject.toml"),
)
PACKAGES = ("tinker_local.types", "tinker_local.client", "tinker_local.backend")

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
"""Imported once, before the first fork, because they take ten seconds. They import nothing of ours. vLLM is not among
them: it reads an environment that the tested code prepares."""

SLOW = ("tests/e2e/", "tests/examples/", "tests/families/", "tests/sampling/", "tests/storage/test_storage_kill.py")
"""Tests that start what takes long. They run first, so that no worker is left with them in the end."""

TEST_SECONDS = 120
"""For one test with its fixtures."""


@dataclass(frozen=True, slots=True)
class Mutation:
    """`function`: the end of its dotted name. `tests`: node ids of a test, one case of which must fail, or of its cases
    that must."""

    name: str
    function: str
    original: str
    replacement: str
    tests: tuple[str, ...]


def read_mutations(root: Path = ROOT) -> list[Mutation]:
    """The mutations at the tests under `root`, in the order of their files. ValueError if two have the same name."""
    found: dict[str, Mutation] = {}
    for test, mark in _marks(root):
        name, function, original, replacement = (ast.literal_eval(argument) for argument in mark.args)
        if name in found:
            raise ValueError(f"{test}: there is another mutation with the name {name!r}")
        cases = [case for keyword in mark.keywords for case in ast.literal_eval(keyword.value)]
        tests = tuple(f"{test}[{case}]" for case in cases) or (test,)
        found[name] = Mutation(name, function, original, replacement, tests)
    return list(found.values())


def _marks(root: Path) -> Iterator[tuple[str, ast.Call]]:
    """Node ids of test functions with each of their `pytest.mark.mutation(...)`. Files are parsed, not imported."""
    for file in sorted((root / "tests").rglob("test_*.py")):
        text = file.read_text()
        if "pytest.mark.mutation(" not in text:
            continue
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                for mark in node.decorator_list:
                    if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.mutation":
                        yield f"{file.relative_to(root)}::{node.name}", mark


@dataclass(frozen=True, slots=True)
class Function:
    """`first`, `last`: its lines in `file`, from 1, with its decorators."""

    name: str
    file: Path
    first: int
    last: int


@functools.cache
def _functions(root: Path) -> list[Function]:
    """All of the packages; `name` is dotted, from the module on."""
    found: list[Function] = []

    def search(node: ast.AST, file: Path, name: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                of_child = f"{name}.{child.name}"
                if not isinstance(child, ast.ClassDef):
                    first = min(each.lineno for each in (child, *child.decorator_list))
                    found.append(Function(of_child, file, first, child.end_lineno or first))
                search(child, file, of_child)
            else:
                search(child, file, name)

    for file in root.glob("packages/*/src/**/*.py"):
        search(ast.parse(file.read_text()), file, file.stem)
    return found


def broken(mutation: Mutation, root: Path = ROOT) -> tuple[Path, str]:
    """A file, and its text with the mutation in it. ValueError unless exactly one function has that name and holds the
    original text exactly once."""
    found = [each for each in _functions(root) if f".{each.name}".endswith(f".{mutation.function}")]
    who = f"{mutation.name} ({mutation.tests[0]})"
    if len(found) != 1:
        raise ValueError(f"{who}: {len(found)} functions are called {mutation.function}")
    [function] = found
    lines = function.file.read_text().splitlines(keepends=True)
    body = "".join(lines[function.first - 1 : function.last])
    if (count := body.count(mutation.original)) != 1:
        raise ValueError(f"{who}: {mutation.function} has its original text {count} times: {mutation.original!r}")
    body = body.replace(mutation.original, mutation.replacement)
    return function.file, "".join([*lines[: function.first - 1], body, *lines[function.last :]])


def faults(mutations: Sequence[Mutation]) -> list[str]:
    """Why mutations do not apply to this checkout, or do not leave Python behind."""
    found = []
    for mutation in mutations:
        try:
            ast.parse(broken(mutation)[1])
        except (ValueError, SyntaxError) as error:
            found.append(str(error) if type(error) is ValueError else f"{mutation.name}: {error}")
    return found


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one run: each case that ran, by node id, and the phases in which it failed (none: it passed); of those that
    failed, the reason."""

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


class Watch:
    """A pytest plugin that writes what failed, in which phase and why, and whether the copy was imported. One red case
    of a test in `tests` is enough: the others are skipped, since many of them would wait in vain."""

    def __init__(self, tests: Sequence[str], copy: Path, report: Path) -> None:
        self._tests = tests
        self._copy = copy
        self._report = report
        self._failed_in: dict[str, list[str]] = {}
        self._reasons: dict[str, str] = {}

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        test = item.nodeid.partition("[")[0]
        if test in self._tests and any(
            case.startswith(f"{test}[") and phases == ["call"] for case, phases in self._failed_in.items()
        ):
            pytest.skip("another case of this test is red")

    def pytest_runtest_logreport(self, report: Any) -> None:
        phases = self._failed_in.setdefault(report.nodeid, [])
        if report.failed:
            # pytest-timeout fails a test in its body, too; a test that hangs shows nothing.
            timed_out = "Timeout (>" in str(report.longrepr)
            phases.append("timeout" if timed_out else report.when)
            crash = getattr(report.longrepr, "reprcrash", None)
            self._reasons.setdefault(report.nodeid, str(crash.message if crash else report.longrepr))

    def pytest_sessionfinish(self) -> None:
        imported = {name: getattr(module, "__file__", None) for name, module in sys.modules.items()}
        files = {name: file for name, file in imported.items() if name.startswith("tinker_local.") and file}
        for name in PACKAGES:
            spec = importlib.util.find_spec(name)
            files.setdefault(name, None if spec is None else spec.origin)
        foreign = {name: file for name, file in files.items() if not file or not Path(file).is_relative_to(self._copy)}
        self._report.write_text(
            json.dumps({"failed_in": self._failed_in, "reasons": self._reasons, "foreign": foreign})
        )


class Copy:
    """A copy of packages and tests, to be broken."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / name, folder / name)
        # Checked by content: a file that is broken and mended within a second must not be taken from a stale cache.
        for file in folder.glob("packages/*/src/**/*.py"):
            py_compile.compile(str(file), invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH)

    def run(self, tests: Sequence[str]) -> Outcome:
        """Run tests on the copy as it is now. RuntimeError if anything but the copy was imported."""
        report, printed = self.folder / "outcome.json", self.folder / "printed"
        report.unlink(missing_ok=True)
        started = time.monotonic()
        # Forked, so that what is imported already need not be imported again for every mutation.
        process = multiprocessing.get_context("fork").Process(target=self._run_pytest, args=(tests, report, printed))
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

    def _run_pytest(self, tests: Sequence[str], report: Path, printed: Path) -> None:
        """In the forked process: everything from here on, also what tests start, sees the copy first."""
        os.setsid()
        with printed.open("w") as file:
            for stream in (1, 2):
                os.dup2(file.fileno(), stream)
        os.chdir(self.folder)
        paths = [str(self.folder), *(str(path) for path in self.folder.glob("packages/*/src"))]
        sys.path[:] = [*paths, *(path for path in sys.path if path not in (str(ROOT), str(ROOT / "tests")))]
        sys.dont_write_bytecode = True
        os.environ |= {"EXAMPLES": "4", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": os.pathsep.join(paths)}
        # A failure is enough: looking for a smaller one takes minutes.
        hypothesis.settings.register_profile("first-failure", phases=set(hypothesis.Phase) - {hypothesis.Phase.shrink})
        hypothesis.settings.load_profile("first-failure")
        options = ["-q", "-p", "no:cacheprovider", "--tb=short", f"--timeout={TEST_SECONDS}"]
        pytest.main(
            [*options, f"--basetemp={self.folder / 'tmp'}", *tests], plugins=[Watch(tests, self.folder, report)]
        )
        sys.stdout.flush()
        os._exit(0)

    def run_broken(self, mutation: Mutation) -> Outcome:
        """Run the tests of one mutation on the copy with the mutation in it."""
        source, wrong = broken(mutation, self.folder)
        text = source.read_text()
        source.write_text(wrong)
        try:
            return self.run(mutation.tests)
        finally:
            source.write_text(text)


def files_of(tests: Sequence[str], workers: int) -> list[list[str]]:
    """The tests in one list per worker. Tests that share what is slow to start, those of one folder or file, stay
    together."""
    groups: dict[str, list[str]] = {}
    for test in dict.fromkeys(tests):
        file = test.partition("::")[0]
        groups.setdefault(next((slow for slow in SLOW if file.startswith(slow)), file), []).append(test)
    parts: list[list[str]] = [[] for _ in range(workers)]
    for group in sorted(groups.values(), key=lambda group: (not group[0].startswith(SLOW), -len(group))):
        min(parts, key=lambda part: sum(10 if test.startswith(SLOW) else 1 for test in part)).extend(group)
    return parts


def work(folder: Path, orders: Any, results: Any) -> None:
    """One worker: run each order, a mutation or a list of tests, on a copy in `folder`, until the order is None."""
    copy = Copy(folder)
    while (order := orders.get()) is not None:
        results.put((order, copy.run_broken(order) if isinstance(order, Mutation) else copy.run(order)))


def run(mutations: Sequence[Mutation], workers: int) -> int:
    """Run the tests unbroken, then every mutation; the exit status."""
    started = time.monotonic()
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    for name in HEAVY:
        importlib.import_module(name)
    context = multiprocessing.get_context("fork")
    orders, results = context.Queue(), context.Queue()
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        started_workers: list[BaseProcess] = []
        for number in range(workers):
            place = Path(folder).resolve() / str(number)
            place.mkdir()
            started_workers.append(context.Process(target=work, args=(place, orders, results)))
            started_workers[-1].start()
        try:
            return _run(mutations, workers, orders, results, started)
        finally:
            for _ in started_workers:
                orders.put(None)
            for process in started_workers:
                process.join()


def _run(mutations: Sequence[Mutation], workers: int, orders: Any, results: Any, started: float) -> int:
    parts = [part for part in files_of([test for m in mutations for test in m.tests], workers) if part]
    for part in parts:
        orders.put(part)
    bad = []
    for _ in parts:
        part, outcome = results.get()
        missed = [test for test in part if not outcome.is_green(test)]
        print(f"unbroken: {len(part) - len(missed)} of {len(part)} tests pass, {outcome.seconds:.0f} s", flush=True)
        if missed:
            bad += missed
            print(outcome.output[-4000:])
    if bad:
        print("these tests do not pass, or do not exist; their mutations are left out:", *bad, sep="\n  ", flush=True)
        mutations = [mutation for mutation in mutations if not set(bad) & set(mutation.tests)]
    for mutation in sorted(mutations, key=lambda mutation: not any(test.startswith(SLOW) for test in mutation.tests)):
        orders.put(mutation)
    width = max((len(mutation.name) for mutation in mutations), default=0)
    green = []
    for _ in mutations:
        mutation, outcome = results.get()
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
    if green:
        print("still green:", *green)
    return 2 if bad else 1 if green else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these mutations alone")
    parser.add_argument("--list", action="store_true", help="name the mutations, run nothing")
    parser.add_argument("--check", action="store_true", help="see that every mutation applies, run nothing; a second")
    parser.add_argument("--workers", type=int, default=min(4, os.cpu_count() or 1), help="default: %(default)s")
    arguments = parser.parse_args()
    try:
        mutations = read_mutations()
    except ValueError as error:
        print(error)
        return 2
    by_name = {mutation.name: mutation for mutation in mutations}
    if unknown := [name for name in arguments.only or () if name not in by_name]:
        parser.error(f"unknown: {', '.join(unknown)}")
    chosen = [by_name[name] for name in arguments.only or by_name]
    if arguments.list:
        for mutation in chosen:
            print(f"{mutation.name}: {mutation.function}, {mutation.tests[0]}")
        return 0
    if wrong := faults(chosen):
        print(*wrong, sep="\n")
        return 2
    return 0 if arguments.check else run(chosen, arguments.workers)


if __name__ == "__main__":
    sys.exit(main())
