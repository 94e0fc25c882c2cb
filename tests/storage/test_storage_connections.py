"""Every thread that asks the store gets a connection at once, however many samples are in flight; a database that
another program holds is an error in one sentence."""

import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import pytest
import sqlalchemy as sa
from tinker_local.backend.storage import Store, database
from tinker_local.backend.storage.records import SessionRecord
from tinker_local.types import InternalError

THREADS = 100


def test_a_hundred_threads_read_at_the_same_time(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.add_session(SessionRecord("s", datetime(2026, 5, 1, tzinfo=UTC)))
    together = threading.Barrier(THREADS)
    # Each holds its connection until all have one.
    sa.event.listen(store._engine, "before_cursor_execute", lambda *_: together.wait(10))
    with ThreadPoolExecutor(THREADS) as pool:
        found = [future.result() for future in [pool.submit(store.get_session, "s") for _ in range(THREADS)]]
    assert [record.session_id for record in found if record is not None] == ["s"] * THREADS
    store.close()


def test_a_database_that_another_program_holds_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "BUSY_SECONDS", 0)
    store = Store(tmp_path)
    with closing(sqlite3.connect(tmp_path / "metadata.sqlite3")) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(InternalError, match=r"^another program has held the database "):
            store.add_session(SessionRecord("s", datetime(2026, 5, 1, tzinfo=UTC)))
        other.rollback()
    store.add_session(SessionRecord("s", datetime(2026, 5, 1, tzinfo=UTC)))
    store.close()
