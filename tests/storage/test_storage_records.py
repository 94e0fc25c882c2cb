"""Sessions, training runs and sampling sessions of `Store`."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
import sqlalchemy as sa
from tinker_local.backend.storage import Store, tables
from tinker_local.backend.storage.records import SamplingSessionRecord, SessionRecord, TrainingRunRecord
from tinker_local.types import LoraConfig

from tests.storage.store_states import START


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store(tmp_path)
    yield opened
    opened.close()


def run_record(run: str, minutes: int = 0) -> TrainingRunRecord:
    created = START + timedelta(minutes=minutes, microseconds=1)
    config = LoraConfig(rank=8, seed=-3, train_unembed=False)
    return TrainingRunRecord(run, "s", "org/base", config, created, created, {"note": "x"})


def test_sessions_come_back_equal_and_end_once(store: Store) -> None:
    plain = SessionRecord("s1", START)
    full = SessionRecord("s2", START, {"a": {"b": 1}}, ("t1", "t2"), "name")
    for record in (plain, full):
        store.add_session(record)
        assert store.get_session(record.session_id) == record
    store.end_session("s2", "errored", "ValueError: bad: luck", START + timedelta(seconds=1))
    store.end_session("s2", "heartbeats_lost", None, START + timedelta(seconds=2))
    ended = replace(
        full, ended_at=START + timedelta(seconds=1), end_reason="errored", end_detail="ValueError: bad: luck"
    )
    assert store.get_session("s2") == ended
    assert (ended.why_ended, plain.why_ended) == ("errored: ValueError: bad: luck", None)
    assert store.get_session("s1") == plain
    assert store.get_session("s3") is None


def test_training_runs_come_back_equal_newest_first(store: Store) -> None:
    records = [run_record(f"r{number}", minutes) for number, minutes in ((1, 5), (2, 9), (3, 1))]  # the clock jumps
    records[0] = replace(records[0], base_precision="int4")
    for record in records:
        store.add_training_run(record)
    assert store.get_training_run("r1") == records[0]
    assert store.get_training_run("r9") is None
    page, total = store.list_training_runs(2, 0)
    assert ([record.training_run_id for record in page], total) == (["r3", "r2"], 3)
    assert [record.training_run_id for record in store.list_training_runs(2, 2)[0]] == ["r1"]


def test_touching_a_run_is_seen_at_once_writes_nothing_and_survives_a_restart(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.add_training_run(run_record("r"))
    statements: list[str] = []
    sa.event.listen(
        store._engine, "before_cursor_execute", lambda c, cursor, statement, *rest: statements.append(statement)
    )
    when = START + timedelta(hours=1)
    for second in range(100):
        store.touch_training_run("r", when + timedelta(seconds=second))
    assert statements == []
    when += timedelta(seconds=99)
    run = store.get_training_run("r")
    assert run is not None
    assert run.last_request_at == when
    assert store.list_training_runs(1, 0)[0][0].last_request_at == when
    store.close()
    store = Store(tmp_path)
    run = store.get_training_run("r")
    assert run is not None
    assert run.last_request_at == when
    # The next change of anything carries it to the disk.
    store.touch_training_run("r", when + timedelta(seconds=1))
    store.add_session(SessionRecord("s", START))
    with store._engine.connect() as connection:
        on_disk = connection.execute(sa.select(tables.training_runs.c.last_request_at)).scalar()
    assert on_disk == when + timedelta(seconds=1)
    store.close()


def test_a_touched_run_reaches_the_disk_in_time(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.add_training_run(run_record("r"))
    monkeypatch.setattr("tinker_local.backend.storage.metadata.TOUCH_SECONDS", 0.0)
    store.touch_training_run("r", START + timedelta(hours=1))
    with store._engine.connect() as connection:
        on_disk = connection.execute(sa.select(tables.training_runs.c.last_request_at)).scalar()
    assert on_disk == START + timedelta(hours=1)


def test_sampling_sessions_come_back_equal(store: Store) -> None:
    for record in [
        SamplingSessionRecord("a", "s", "org/base", None, False, START),
        SamplingSessionRecord("b", "s", "org/base", "tinker://r/sampler_weights/x", False, START),
        SamplingSessionRecord("c", "s", "org/base", None, True, START),
    ]:
        store.add_sampling_session(record)
        assert store.get_sampling_session(record.sampling_session_id) == record
    assert store.get_sampling_session("d") is None


def test_times_keep_the_moment_in_any_zone(store: Store) -> None:
    moment = datetime(2026, 5, 1, 12, 0, 0, 123457, tzinfo=timezone(timedelta(hours=5, minutes=30)))
    store.add_session(SessionRecord("s", moment))
    session = store.get_session("s")
    assert session is not None
    assert session.created_at == moment
    with pytest.raises(sa.exc.StatementError, match="no time zone"):
        store.add_session(SessionRecord("t", datetime(2026, 5, 1)))


def test_hundreds_of_threads_at_once(store: Store) -> None:
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            store.add_session(SessionRecord(f"s{number}", START))
            assert store.get_session(f"s{number}") is not None
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(200)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_nothing_of_a_request_body_is_kept(store: Store) -> None:
    """The database holds metadata only: no column can hold tensors or bytes."""
    kinds = {type(column.type) for table in tables.metadata.tables.values() for column in table.columns}
    assert not kinds & {sa.LargeBinary, sa.Text, sa.PickleType}
