"""A wall clock that jumps deletes nothing for a while; sessions that ended long ago are forgotten."""

import logging
from datetime import timedelta
from pathlib import Path

import pytest
from tinker_local.backend.storage import Store
from tinker_local.backend.storage.records import (
    CheckpointKind,
    CopyRecord,
    SamplingSessionRecord,
    SessionRecord,
    TrainingRunRecord,
)
from tinker_local.backend.storage.steady_clock import SteadyClock
from tinker_local.types import LoraConfig

from tests.storage.store_states import START, make_record, make_state

HOUR = 3600.0


class Times:
    """A wall clock and a monotonic one."""

    def __init__(self) -> None:
        self.wall = START
        self.running = 1000.0

    def pass_by(self, seconds: float) -> None:
        self.wall += timedelta(seconds=seconds)
        self.running += seconds

    def steady(self, grace: float = HOUR) -> SteadyClock:
        return SteadyClock(lambda: self.wall, grace, lambda: self.running)


def test_a_clock_is_steady_once_the_grace_period_after_the_start_is_over() -> None:
    times = Times()
    clock = times.steady()
    assert not clock.is_steady()
    times.pass_by(HOUR - 1)
    assert not clock.is_steady()
    times.pass_by(1)
    assert clock.is_steady()
    assert times.steady(grace=0.0).is_steady()


@pytest.mark.parametrize("jump", [HOUR * 24 * 365, -HOUR, 61.0])
def test_each_jump_begins_a_grace_period(jump: float, caplog: pytest.LogCaptureFixture) -> None:
    times = Times()
    clock = times.steady()
    times.pass_by(HOUR)
    assert clock.is_steady()
    times.wall += timedelta(seconds=jump)
    with caplog.at_level(logging.WARNING):
        assert not clock.is_steady()
    assert f"the clock jumped by {jump:.0f} s" in caplog.text
    times.pass_by(HOUR - 1)
    assert not clock.is_steady()
    times.pass_by(1)
    assert clock.is_steady()


def test_a_clock_that_is_set_right_slowly_is_steady() -> None:
    times = Times()
    clock = times.steady()
    for _ in range(1000):
        times.pass_by(5)
        times.wall += timedelta(seconds=1)
        clock.is_steady()
    assert clock.is_steady()


def test_a_jump_forward_deletes_no_checkpoint_within_the_grace_period(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = Times()
    store = Store(tmp_path, clock=lambda: times.wall, grace=HOUR)
    monkeypatch.setattr(store, "_clock", times.steady())
    written = store.write_checkpoint(
        make_record("a", expires_at=START + timedelta(days=1)), make_state(1), overwrite=False
    )
    times.pass_by(HOUR)
    assert store.forget_expired() == []
    times.wall += timedelta(days=400)
    assert store.forget_expired() == []
    assert store.list_checkpoints(written.training_run_id) == []  # hidden, and
    times.wall -= timedelta(days=400)  # the clock is put right again
    assert store.list_checkpoints(written.training_run_id) == [written]
    times.wall += timedelta(days=400)
    assert store.forget_expired() == []
    times.pass_by(HOUR)
    assert store.forget_expired() == [written]
    store.close()


def add_session(store: Store, name: str, ended_days_ago: float | None, *, begun_days_ago: float = 100.0) -> str:
    created = START - timedelta(days=begun_days_ago)
    store.add_session(SessionRecord(name, created))
    run = TrainingRunRecord(f"{name}:train:0", name, "org/base", LoraConfig(rank=4), created, created)
    store.add_training_run(run)
    store.add_sampling_session(SamplingSessionRecord(f"{name}:sample:0", name, "org/base", None, True, created))
    if ended_days_ago is not None:
        store.end_session(name, "success", None, START - timedelta(days=ended_days_ago))
    return run.training_run_id


def test_sessions_that_ended_long_ago_are_pruned_with_all_their_records(tmp_path: Path) -> None:
    store = Store(tmp_path, clock=lambda: START)
    old = add_session(store, "old", 31)
    add_session(store, "recent", 29)
    add_session(store, "lost", None)
    add_session(store, "live", None)
    add_session(store, "just-lost", None, begun_days_ago=5)
    saved = add_session(store, "saved", 31)
    store.write_checkpoint(make_record("a", run=saved), make_state(1), overwrite=False)
    add_session(store, "serving", None)
    named = SamplingSessionRecord(
        "serving:sample:1", "serving", "org/base", "tinker://r/sampler_weights/a", False, START
    )
    store.add_sampling_session(named)
    copied = store.copy_checkpoint(
        make_record("a", run=saved),
        TrainingRunRecord("copy:train:0", "copy", "org/base", LoraConfig(rank=4), START, START, {}, "tinker://x"),
        session=SessionRecord("copy", START),
        expires_at=None,
        copies=[CopyRecord("key", {}, "tinker://copy:train:0/weights/a")],
    )
    assert store.prune_sessions(timedelta(days=30), {"live"}) == 2
    left, _ = store.list_sessions(99, 0)
    kept = {"recent", "live", "just-lost", "saved", "serving", "copy"}
    assert {record.session_id for record in left} == kept
    assert {run.session_id for run in store.list_training_runs(99, 0)[0]} == kept
    assert store.get_training_run(old) is None
    assert store.get_sampling_session("old:sample:0") is None
    # Once its checkpoint is gone, a session that ended goes too, with the key of a copy.
    store.end_session("copy", "success", None, START - timedelta(days=31))
    store.delete_checkpoint(make_record("a", run=saved))
    assert store.prune_sessions(timedelta(days=30), {"live"}) == 1
    assert store.find_copy("key") is not None
    store.delete_checkpoint(copied)
    assert store.prune_sessions(timedelta(days=30), {"live"}) == 1
    assert store.find_copy("key") is None
    store.close()


def test_a_jump_of_the_clock_prunes_no_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = Times()
    store = Store(tmp_path)
    monkeypatch.setattr(store, "_clock", times.steady())
    add_session(store, "s", 1)
    times.pass_by(HOUR)
    times.wall += timedelta(days=4000)
    assert store.prune_sessions(timedelta(days=30), ()) == 0
    times.pass_by(HOUR)
    assert store.prune_sessions(timedelta(days=30), ()) == 1
    store.close()


@pytest.mark.parametrize("database", ["kept", "lost"])
def test_after_the_clock_was_set_back_the_later_save_is_the_last_checkpoint(tmp_path: Path, database: str) -> None:
    store = Store(tmp_path, clock=lambda: START)
    kinds: tuple[CheckpointKind, ...] = ("weights", "sampler_weights")
    for number, hours in enumerate((0, 2, 1, -24, -25)):
        for kind in kinds:
            record = make_record(f"c{number}", kind=kind, created_at=START + timedelta(hours=hours))
            store.write_checkpoint(record, make_state(number), overwrite=False)
    # Saved again under its name, at a time before that of any other.
    again = make_record("c1", created_at=START - timedelta(hours=48))
    store.write_checkpoint(again, make_state(9), overwrite=True)
    for _ in range(2):
        of_run = [record.checkpoint_id for record in store.list_checkpoints(again.training_run_id)]
        assert of_run[:2] == ["weights/c1", "sampler_weights/c4"]
        assert [each for each in of_run if each.startswith("weights")] == [f"weights/c{n}" for n in (1, 4, 3, 2, 0)]
        assert [record.checkpoint_id for record in store.list_all_checkpoints(99, 0)[0]] == of_run
        last = store.last_checkpoints([again.training_run_id])[again.training_run_id]
        assert {kind: record.name for kind, record in last.items()} == {"weights": "c1", "sampler_weights": "c4"}
        store.close()
        if database == "lost":
            for file in tmp_path.glob("metadata.sqlite3*"):
                file.unlink()
        store = Store(tmp_path, clock=lambda: START)
    # Numbers go on where they were.
    store.write_checkpoint(make_record("d", created_at=START - timedelta(hours=99)), make_state(1), overwrite=False)
    assert store.list_checkpoints(again.training_run_id)[0].name == "d"
    store.close()


def test_a_save_that_began_later_and_was_written_first_is_the_later_one(tmp_path: Path) -> None:
    store = Store(tmp_path)
    began = [store.next_save() for _ in range(3)]
    for number in (2, 0, 1):
        store.write_checkpoint(make_record(f"c{number}", save_number=began[number]), make_state(1), overwrite=False)
    assert [record.name for record in store.list_checkpoints(make_record("c0").training_run_id)] == ["c2", "c1", "c0"]
    store.close()
