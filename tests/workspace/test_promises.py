"""The promises and the mutations fit the tests, the code and the document."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.mutations import Mutation, faults, read_mutations
from tests.promises import MISTAKES, PROMISES, VISION_RL_PROMISES, document, named_tests

ROOT = Path(__file__).parents[2]
MUTATIONS = read_mutations()
ALL = (*PROMISES, *VISION_RL_PROMISES, *MISTAKES)


@cache
def functions(file: str) -> set[str]:
    """The test functions of a file, which is parsed and not imported."""
    body = ast.parse((ROOT / file).read_text()).body
    return {node.name for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_promise_is_there_with_a_test_and_a_mutation() -> None:
    assert [promise.number for promise in PROMISES] == [str(number) for number in range(1, 21)]
    assert all(promise.mutations for promise in PROMISES)
    assert all(named_tests(promise, MUTATIONS) for promise in VISION_RL_PROMISES)
    assert [mistake.words for mistake in MISTAKES if not named_tests(mistake, MUTATIONS) and not mistake.note] == []


def test_every_named_test_exists() -> None:
    named = {test for promise in ALL for test in named_tests(promise, MUTATIONS)}
    missing = []
    for test in sorted(named):
        file, _, function = test.partition("::")
        if not (ROOT / file).is_file() or function.partition("[")[0] not in functions(file):
            missing.append(test)
    assert missing == []


def test_every_mutation_belongs_to_a_promise() -> None:
    used = {name for promise in ALL for name in promise.mutations.split()}
    assert used == {mutation.name for mutation in MUTATIONS}


def test_every_mutation_applies_to_the_source_exactly_once() -> None:
    assert faults(MUTATIONS) == []


def test_a_mutation_whose_text_or_file_is_gone_is_reported_with_its_test() -> None:
    known = MUTATIONS[0]
    renamed = Mutation("renamed", "no_such_file.py", "x", "y", known.tests)
    moved = Mutation("moved", known.file, "no such text", "y", known.tests)
    twice = Mutation("twice", known.file, "\n", "y", known.tests)
    nonsense = Mutation("nonsense", known.file, known.original, ")", known.tests)
    reasons = faults([renamed, moved, twice, nonsense])
    assert len(reasons) == 4
    assert f"renamed ({known.tests[0]}): 0 files are called no_such_file.py" in reasons[0]
    assert f"moved ({known.tests[0]}): {known.file} has its original text 0 times" in reasons[1]
    assert f"twice ({known.tests[0]}): {known.file} has its original text " in reasons[2]
    assert "nonsense" in reasons[3]


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        ('@pytest.mark.mutation("one", "b.py", "x", "y")', "another mutation with the name 'one'"),
        ('@pytest.mark.mutation("two")', "no test describes the mutation 'two'"),
    ],
)
def test_two_mutations_with_one_name_and_one_that_no_test_describes_are_refused(
    tmp_path: Path, second: str, reason: str
) -> None:
    (tmp_path / "tests").mkdir()
    file = tmp_path / "tests" / "test_two.py"
    first = '@pytest.mark.mutation("one", "a.py", "x", "y", cases=("1", "2"))\ndef test_first(): ...\n'
    file.write_text(first)
    assert read_mutations(tmp_path) == [
        Mutation("one", "a.py", "x", "y", ("tests/test_two.py::test_first[1]", "tests/test_two.py::test_first[2]"))
    ]
    file.write_text(f"{first}{second}\ndef test_second(): ...\n")
    with pytest.raises(ValueError, match=reason):
        read_mutations(tmp_path)


def test_the_document_is_the_table() -> None:
    written = (ROOT / "docs" / "promises.md").read_text()
    assert written == document(MUTATIONS), "run: python -m tests.promises"


@pytest.mark.more
def test_a_mutation_turns_its_test_red_by_the_command() -> None:
    """One that is quick. All of them take minutes: `make mutations`."""
    command = [sys.executable, str(ROOT / "tests" / "mutations.py"), "--only", "mean-loss", "--workers", "1"]
    outcome = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    assert "1 of 1 mutations turn their tests red" in outcome.stdout
