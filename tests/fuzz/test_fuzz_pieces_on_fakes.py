"""A piece of each class of `python -m tests.fuzz`: nothing that is sent gets a 5xx, stalls, or stays in memory."""

import random
from pathlib import Path

import pytest
from tinker_local.backend.http import future_routes

from tests.fuzz import mutate
from tests.fuzz.corpus import corpus
from tests.fuzz.fuzz_run import Progress, load, run_piece, save
from tests.fuzz.targets import TARGETS


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.filterwarnings("ignore")
def test_a_piece_of_fuzzing_finds_nothing_on_fakes(name: str) -> None:
    progress, before = Progress(), future_routes.LONG_POLL_SECONDS
    run_piece(name, progress, 100)
    assert before == future_routes.LONG_POLL_SECONDS
    assert [fault for fault in progress.faults if ": took" not in fault] == []  # no time is bounded here


@pytest.mark.more
@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.filterwarnings("ignore")
def test_a_long_piece_of_fuzzing_finds_nothing_on_fakes(name: str) -> None:
    progress = Progress(cases=10**9)  # other cases than the short piece has
    run_piece(name, progress, 3000)
    assert progress.faults == []
    assert progress.flat(), progress.resident


def test_a_piece_goes_on_where_the_last_one_ended(tmp_path: Path) -> None:
    file = tmp_path / "state.json"
    save(file, {"json": Progress(cases=7, faults=["case 3: x"], resident=[[100, 101]])})
    assert load(file) == {"json": Progress(cases=7, faults=["case 3: x"], resident=[[100, 101]])}


def test_protobuf_fields_read_and_write_what_the_sdk_sends() -> None:
    bodies = [sent.body for sent in corpus() if sent.kind == "application/x-protobuf"]
    assert len(bodies) > 3
    for body in bodies:
        assert mutate.message_of(mutate.fields_of(body)) == body
        changed = {mutate.of_protobuf(random.Random(number), body) for number in range(50)}
        assert len(changed) > 20
