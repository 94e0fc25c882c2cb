"""Tests with the mark `rotated`, and in CI those with `more`, take turns by the commit, and each has its turn."""

import os
import time
from collections.abc import Sequence
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import pytest

from tests import conftest


def left(nodes: Sequence[str], **marks: int) -> list[str]:
    """Which of these cases stay of the suite, whose test has `marks` with their argument; one more has no mark."""
    marked = {name: SimpleNamespace(args=(argument,)) for name, argument in marks.items()}
    items: list[Any] = [SimpleNamespace(nodeid=node, get_closest_marker=marked.get) for node in nodes]
    items.append(SimpleNamespace(nodeid="tests/other.py::test_other", get_closest_marker=lambda _: None))
    config: Any = SimpleNamespace(hook=SimpleNamespace(pytest_deselected=lambda items: None))
    conftest.pytest_collection_modifyitems(config, items)
    names = [item.nodeid for item in items]
    assert "tests/other.py::test_other" in names
    return [name for name in names if name != "tests/other.py::test_other"]


@pytest.mark.parametrize(("cases", "every"), [(6, 6), (10, 3), (2, 2), (1, 3)])
def test_every_case_has_its_turn_and_no_commit_has_many(
    monkeypatch: pytest.MonkeyPatch, cases: int, every: int
) -> None:
    nodes = [f"tests/a.py::test_a[{case}]" for case in range(cases)]
    seen = []
    for commit in range(every):
        monkeypatch.setenv(conftest.TURN, hex(commit + 0xABC0000))
        found = left(nodes, rotated=every)
        assert cases // every <= len(found) <= -(-cases // every)
        seen += found
    assert sorted(seen) == sorted(nodes)


def test_all_that_start_processes_have_their_turn_where_they_are_asked_to_take_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(conftest.TURN, "0")
    monkeypatch.delenv(conftest.MORE_IN_TURN, raising=False)
    nodes = [f"tests/a.py::test_{number}" for number in range(60)]
    assert left(nodes, more=0) == nodes
    monkeypatch.setenv(conftest.MORE_IN_TURN, "3")
    seen = []
    for commit in range(3):
        monkeypatch.setenv(conftest.TURN, hex(commit))
        found = left(nodes, more=0)
        assert 8 < len(found) < 32
        assert found == left(nodes, more=0, rotated=2)
        seen += found
    assert sorted(seen) == sorted(nodes)


@pytest.mark.parametrize(
    ("marks", "keyword", "source", "whole"),
    [
        ("not more and not ray", "", "TESTPATHS", True),
        ("more and not ray", "", "TESTPATHS", True),
        ("more and not ray", "one", "TESTPATHS", False),
        ("more", "", "ARGS", False),
        ("more and not ray", "", "ARGS", False),
        ("ray", "", "TESTPATHS", False),
    ],
)
def test_only_the_whole_suite_takes_turns(
    monkeypatch: pytest.MonkeyPatch, marks: str, keyword: str, source: str, whole: bool
) -> None:
    option = SimpleNamespace(markexpr=marks, keyword=keyword)
    config: Any = SimpleNamespace(option=option, args_source=pytest.Config.ArgsSource[source])
    monkeypatch.setenv(conftest.TURN, "?")
    monkeypatch.delenv("EVERY_TEST", raising=False)
    conftest.pytest_configure(config)
    assert os.environ[conftest.TURN] == (conftest.commit() if whole else "")
    monkeypatch.setenv("EVERY_TEST", "1")
    conftest.pytest_configure(config)
    assert os.environ[conftest.TURN] == ""


def test_without_a_turn_all_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(conftest.TURN, "")
    assert len(left([f"tests/a.py::test_a[{case}]" for case in range(6)], rotated=6)) == 6


def test_what_begins_too_late_is_skipped_and_is_another_part_at_each_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    item: Any = SimpleNamespace()
    monkeypatch.setattr(conftest, "BEGAN", time.monotonic() - 100)
    monkeypatch.setenv(conftest.TURN, "abc")
    monkeypatch.setenv(conftest.TESTS_SECONDS, "200")
    conftest.pytest_runtest_setup(item)
    monkeypatch.setenv(conftest.TESTS_SECONDS, "99")
    with pytest.raises(pytest.skip.Exception, match="the 99 s for these tests are over"):
        conftest.pytest_runtest_setup(item)
    nodes = [f"tests/{file}.py::test_{number}" for file in range(20) for number in range(3)]
    orders = []
    for commit in range(2):
        monkeypatch.setenv(conftest.TURN, hex(commit))
        orders.append(left(nodes))
        files = [node.partition("::")[0] for node in orders[-1]]
        assert [file for file, _ in groupby(files)] == list(dict.fromkeys(files)), "a file is in one piece"
        assert [node for node in orders[-1] if node.startswith("tests/7.py")] == nodes[21:24]
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1]) == sorted(nodes)
    monkeypatch.setenv(conftest.TURN, "")
    conftest.pytest_runtest_setup(item)  # a part of the suite has no limit
    monkeypatch.setenv(conftest.TURN, "abc")
    monkeypatch.delenv(conftest.TESTS_SECONDS)
    assert left(nodes) == nodes
