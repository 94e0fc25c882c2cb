"""The promises name tests that exist, and the mutations apply to the code."""

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.mutations import Mutation, faults, read_mutations

ROOT = Path(__file__).parents[2]
MOST_MUTATIONS = 150
"""Each has to be changed with the line that it breaks."""


@cache
def functions(file: Path) -> set[str]:
    """The test functions of a file, which is parsed and not imported."""
    body = ast.parse(file.read_text()).body
    return {node.name for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def rows() -> list[list[str]]:
    """The cells of each promise and each mistake: a number or a kind, words, tests."""
    lines = (ROOT / "docs" / "promises.md").read_text().splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line.startswith("| ")]
    return [row for row in cells if row[-1] not in ("tests", "---")]


def test_every_promise_is_there_with_a_test() -> None:
    assert [row[0] for row in rows() if row[0].isdigit()] == [str(number) for number in range(1, 21)]
    assert [row for row in rows() if len(row) != 3] == []


def test_every_named_test_exists() -> None:
    missing = []
    for *_, tests in rows():
        for name in re.findall("`([^`]+)`", tests):
            file, _, function = name.partition("::")
            path = ROOT / "tests" / file
            tests_there = [each for each in functions(path) if each.startswith("test_")] if path.is_file() else []
            if function not in tests_there if function else len(tests_there) < 2:
                missing.append(name)
        if "`" not in tests:
            missing.append(tests)
    assert missing == []


def test_a_test_of_every_promise_is_tested_by_a_mutation() -> None:
    tested = {test.removeprefix("tests/").partition("::")[0] for each in read_mutations() for test in each.tests}
    named = {row[0]: {name.partition("::")[0] for name in re.findall("`([^`]+)`", row[-1])} for row in rows()}
    assert [number for number, files in named.items() if number.isdigit() and not files & tested] == []


def test_every_mutation_applies_to_its_function_exactly_once() -> None:
    mutations = read_mutations()
    assert faults(mutations) == []
    assert len(mutations) <= MOST_MUTATIONS


def test_a_mutation_whose_function_or_text_is_gone_is_reported_with_its_test() -> None:
    known = read_mutations()[0]
    renamed = Mutation("renamed", "no_such_function", "x", "y", known.tests)
    common = Mutation("common", "__init__", "x", "y", known.tests)
    gone = Mutation("gone", known.function, "no such text", "y", known.tests)
    twice = Mutation("twice", known.function, "\n", "y", known.tests)
    nonsense = Mutation("nonsense", known.function, known.original, ")", known.tests)
    reasons = faults([renamed, common, gone, twice, nonsense])
    assert len(reasons) == 5
    assert f"renamed ({known.tests[0]}): 0 functions are called no_such_function" in reasons[0]
    assert re.search(r"common .*: \d\d+ functions are called __init__", reasons[1])
    assert f"gone ({known.tests[0]}): {known.function} has its original text 0 times" in reasons[2]
    assert f"twice ({known.tests[0]}): {known.function} has its original text " in reasons[3]
    assert "nonsense" in reasons[4]


def test_two_mutations_with_one_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    file = tmp_path / "tests" / "test_two.py"
    first = '@pytest.mark.mutation("one", "a.b", "x", "y", cases=("1", "2"))\ndef test_first(): ...\n'
    file.write_text(first)
    assert read_mutations(tmp_path) == [
        Mutation("one", "a.b", "x", "y", ("tests/test_two.py::test_first[1]", "tests/test_two.py::test_first[2]"))
    ]
    file.write_text(f'{first}@pytest.mark.mutation("one", "c.d", "x", "y")\ndef test_second(): ...\n')
    with pytest.raises(ValueError, match="another mutation with the name 'one'"):
        read_mutations(tmp_path)


@pytest.mark.more
def test_a_mutation_turns_its_test_red_by_the_command() -> None:
    """One that is quick. All of them take minutes: `make mutations`."""
    command = [sys.executable, str(ROOT / "tests" / "mutations.py"), "--only", "mean-loss", "--workers", "1"]
    outcome = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    assert "1 of 1 mutations turn their tests red" in outcome.stdout
