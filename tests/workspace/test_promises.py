"""The table of promises cannot rot: its tests exist, what it breaks is there, and the document says what it says."""

import ast
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from mutation_table import (
    MISTAKES,
    MUTATIONS,
    PROMISES,
    VISION_RL_PROMISES,
    Mutation,
    named_tests,
    source_of,
    table_of_promises,
)

ROOT = Path(__file__).parents[2]


def functions(file: str) -> set[str]:
    """The test functions of a file, which is parsed and not imported."""
    body = ast.parse((ROOT / file).read_text()).body
    return {node.name for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_promise_is_there_with_a_test_and_a_mutation() -> None:
    assert [promise.number for promise in PROMISES] == [str(number) for number in range(1, 21)]
    assert all(promise.mutations for promise in PROMISES)
    assert all(named_tests(promise) for promise in VISION_RL_PROMISES)
    assert [mistake.words for mistake in MISTAKES if not named_tests(mistake) and not mistake.note] == []


def test_every_named_test_exists() -> None:
    named = {test for promise in (*PROMISES, *VISION_RL_PROMISES, *MISTAKES) for test in named_tests(promise)}
    missing = []
    for test in sorted(named):
        file, _, function = test.partition("::")
        if not (ROOT / file).is_file() or function.partition("[")[0] not in functions(file):
            missing.append(test)
    assert missing == []


def test_every_mutation_belongs_to_a_promise_and_has_its_own_name() -> None:
    names = [mutation.name for mutation in MUTATIONS]
    assert len(set(names)) == len(names)
    used = {name for promise in (*PROMISES, *VISION_RL_PROMISES, *MISTAKES) for name in promise.mutations}
    assert used == set(names)
    assert all(mutation.tests for mutation in MUTATIONS)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_what_a_mutation_breaks_is_in_its_file_exactly_once(mutation: Mutation) -> None:
    text = source_of(mutation.file, ROOT).read_text()
    assert text.count(mutation.original) == 1
    ast.parse(text.replace(mutation.original, mutation.replacement))


def test_the_document_is_the_table() -> None:
    written = (ROOT / "docs" / "promises.md").read_text()
    assert written == table_of_promises(), "run: python tests/mutations.py --write-docs"
