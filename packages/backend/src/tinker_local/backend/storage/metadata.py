"""`Metadata`: the records of sessions, training runs and sampling sessions, and the database that holds all records."""

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from typing import Any, TypeVar

import sqlalchemy as sa
from tinker_local.backend.storage import tables
from tinker_local.backend.storage.disk_space import DiskSpace
from tinker_local.backend.storage.records import (
    LOCAL_PROJECT,
    CheckpointRecord,
    CopyRecord,
    EndReason,
    SamplingSessionRecord,
    SessionRecord,
    TrainingRunRecord,
)
from tinker_local.backend.storage.steady_clock import SteadyClock
from tinker_local.types import LoraConfig, StorageFullError

TOUCH_SECONDS = 30.0
"""How far a run's `last_request_at` on disk may lag behind."""
PRUNED_AT_ONCE = 500
IDS_AT_ONCE = 500

T = TypeVar("T")
Record = SessionRecord | TrainingRunRecord | SamplingSessionRecord | CheckpointRecord | CopyRecord


@dataclass(frozen=True, slots=True)
class Owned:
    """What a listing shows: the sessions of `owner` in `project_id`, or of all where that is None."""

    owner: str | None = None
    project_id: str | None = None

    def sessions(self) -> sa.ColumnElement[bool]:
        """The condition on rows of `sessions`."""
        table = tables.sessions.c
        chosen = sa.true() if self.owner is None else table.owner == self.owner
        if self.project_id is None:
            return chosen
        return chosen & (sa.func.coalesce(table.project_id, LOCAL_PROJECT) == self.project_id)

    def runs(self) -> sa.ColumnElement[bool]:
        """The condition on rows of `training_runs`."""
        if self == EVERYTHING:
            return sa.true()
        return tables.training_runs.c.session_id.in_(sa.select(tables.sessions.c.session_id).where(self.sessions()))

    def checkpoints(self) -> sa.ColumnElement[bool]:
        """The condition on rows of `checkpoints`."""
        if self == EVERYTHING:
            return sa.true()
        runs = tables.training_runs.c.training_run_id
        return tables.checkpoints.c.training_run_id.in_(sa.select(runs).where(self.runs()))


EVERYTHING = Owned()


class Metadata:
    """Base of `Store`, which says what its methods promise."""

    def __init__(self, engine: sa.Engine, disk: DiskSpace, clock: SteadyClock) -> None:
        self._engine = engine
        self._disk = disk
        self._clock = clock
        self._closed = False
        self._writing = threading.RLock()
        self._touched: dict[str, datetime] = {}
        self._touches_written = time.monotonic()

    @contextmanager
    def _transaction(self) -> Iterator[sa.Connection]:
        """One writer at a time: SQLite has one write lock, and waiting for it in Python is fair and has no timeout."""
        if self._closed:
            raise RuntimeError("the store is closed")
        with self._disk.explained(), self._writing, self._engine.begin() as connection:
            touched = dict(self._touched)
            for run_id, when in touched.items():
                row = tables.training_runs.c.training_run_id == run_id
                connection.execute(sa.update(tables.training_runs).where(row).values(last_request_at=when))
            yield connection
            self._touches_written = time.monotonic()
            for run_id, when in touched.items():
                if self._touched[run_id] == when:
                    del self._touched[run_id]

    def _change_on_a_full_disk(self, change: Callable[[sa.Connection], T]) -> T:
        """`change` in a transaction; on a full disk, again with the space that is reserved for this."""
        while True:
            try:
                with self._transaction() as connection:
                    return change(connection)
            except StorageFullError:
                if not self._disk.give_reserve():
                    raise

    def _rows(self, query: sa.Select[Any]) -> list[dict[str, Any]]:
        with self._engine.connect() as connection:
            return [_without_number(row) for row in connection.execute(query).mappings()]

    def _page(
        self, order: sa.Column[int], limit: int, offset: int, counted: sa.ColumnElement[bool]
    ) -> tuple[list[dict[str, Any]], int]:
        table = order.table
        newest_first = sa.select(table).where(counted).order_by(order.desc())
        with self._engine.connect() as connection:
            total = connection.execute(sa.select(sa.func.count()).select_from(table).where(counted)).scalar_one()
            rows = connection.execute(newest_first.limit(limit).offset(offset)).mappings()
            return [_without_number(row) for row in rows], total

    # Sessions

    def add_session(self, record: SessionRecord) -> None:
        """Record a new session."""
        with self._transaction() as connection:
            insert(connection, tables.sessions, record)

    def end_session(self, session_id: str, reason: EndReason, detail: str | None, when: datetime) -> None:
        """Record the end of a session; the first end counts. Works on a full disk."""
        table = tables.sessions
        open_session = (table.c.session_id == session_id) & table.c.ended_at.is_(None)
        ended = sa.update(table).where(open_session).values(ended_at=when, end_reason=reason, end_detail=detail)
        self._change_on_a_full_disk(lambda connection: connection.execute(ended))

    def get_session(self, session_id: str) -> SessionRecord | None:
        """The session, or None."""
        rows = self._rows(sa.select(tables.sessions).where(tables.sessions.c.session_id == session_id))
        return _session(rows[0]) if rows else None

    def owners_of(self, session_ids: Collection[str]) -> dict[str, str]:
        """Who owns each of these sessions that exists."""
        table = tables.sessions.c
        query = sa.select(table.session_id, table.owner).where(table.session_id.in_(session_ids))
        with self._engine.connect() as connection:
            return {row.session_id: row.owner for row in connection.execute(query)}

    def list_sessions(self, limit: int, offset: int, owned: Owned = EVERYTHING) -> tuple[list[SessionRecord], int]:
        """Newest first, and the count of all."""
        rows, total = self._page(tables.sessions.c.number, limit, offset, owned.sessions())
        return [_session(row) for row in rows], total

    def sessions_before(
        self, before: tuple[datetime, str] | None, limit: int, owned: Owned = EVERYTHING
    ) -> list[SessionRecord]:
        """Newest first, equal times by descending id; starts after the session with that time and id."""
        table = tables.sessions
        query = (
            sa.select(table)
            .where(owned.sessions())
            .order_by(table.c.created_at.desc(), table.c.session_id.desc())
            .limit(limit)
        )
        if before is not None:
            when, session_id = before
            query = query.where(
                (table.c.created_at < when) | ((table.c.created_at == when) & (table.c.session_id < session_id))
            )
        return [_session(row) for row in self._rows(query)]

    def session_members(self, session_id: str) -> tuple[list[str], list[str]]:
        """The ids of a session's training runs and of its sampling sessions, oldest first."""
        runs, samplers = tables.training_runs, tables.sampling_sessions
        found = []
        with self._engine.connect() as connection:
            for table, column in ((runs, runs.c.training_run_id), (samplers, samplers.c.sampling_session_id)):
                query = sa.select(column).where(table.c.session_id == session_id).order_by(table.c.number)
                found.append(list(connection.execute(query).scalars()))
        return found[0], found[1]

    def prune_sessions(self, age: timedelta, live: Collection[str]) -> int:
        """Delete the records of sessions that ended so long ago, with their runs and sampling sessions.

        Keeps every session of which a checkpoint exists, and of those whose end is not recorded the `live` ones and
        those that sample from a named checkpoint, which outlives restarts. Returns how many were deleted: at most
        `PRUNED_AT_ONCE`, and none in the grace period of the clock.
        """
        if not self._clock.is_steady():
            return 0
        before = self._clock.now() - age
        sessions, runs, samplers = tables.sessions.c, tables.training_runs.c, tables.sampling_sessions.c
        saved = tables.checkpoints.c.training_run_id == runs.training_run_id
        kept = sa.exists().where((runs.session_id == sessions.session_id) & saved)
        recent = sa.exists().where((runs.session_id == sessions.session_id) & (runs.last_request_at >= before))
        samples = sa.exists().where((samplers.session_id == sessions.session_id) & ~samplers.nameless)
        lost = sessions.ended_at.is_(None) & (sessions.created_at < before) & ~recent & ~samples
        old = (sessions.ended_at < before) | lost
        query = sa.select(sessions.session_id).where(old & ~kept).order_by(sessions.number).limit(PRUNED_AT_ONCE)
        with self._transaction() as connection:
            pruned = [session for session in connection.execute(query).scalars() if session not in live]
            of_pruned = sa.select(runs.training_run_id).where(runs.session_id.in_(pruned))
            for run_id in connection.execute(of_pruned).scalars().all():
                of_run = tables.copies.c.tinker_path.startswith(f"tinker://{run_id}/", autoescape=True)
                connection.execute(sa.delete(tables.copies).where(of_run))
            for table in (tables.training_runs, tables.sampling_sessions, tables.sessions):
                connection.execute(sa.delete(table).where(table.c.session_id.in_(pruned)))
        return len(pruned)

    # Training runs

    def add_training_run(self, record: TrainingRunRecord) -> None:
        """Record a new training run."""
        with self._transaction() as connection:
            insert(connection, tables.training_runs, record)

    def touch_training_run(self, training_run_id: str, when: datetime) -> None:
        """Record the time of a request, in memory first, because this happens with every request."""
        with self._writing:
            self._touched[training_run_id] = when
            if time.monotonic() - self._touches_written > TOUCH_SECONDS:
                with self._transaction():
                    pass

    def get_training_run(self, training_run_id: str) -> TrainingRunRecord | None:
        """The training run, or None."""
        table = tables.training_runs
        rows = self._rows(sa.select(table).where(table.c.training_run_id == training_run_id))
        return self._training_run(rows[0]) if rows else None

    def existing_runs(self, training_run_ids: Collection[str]) -> set[str]:
        """Those of these runs that are recorded."""
        column, found, ids = tables.training_runs.c.training_run_id, set(), list(training_run_ids)
        for start in range(0, len(ids), IDS_AT_ONCE):
            query = sa.select(column).where(column.in_(ids[start : start + IDS_AT_ONCE]))
            found |= {row["training_run_id"] for row in self._rows(query)}
        return found

    def list_training_runs(
        self, limit: int, offset: int, owned: Owned = EVERYTHING
    ) -> tuple[list[TrainingRunRecord], int]:
        """Newest first, and the count of all."""
        rows, total = self._page(tables.training_runs.c.number, limit, offset, owned.runs())
        return [self._training_run(row) for row in rows], total

    def _training_run(self, row: dict[str, Any]) -> TrainingRunRecord:
        touched = self._touched.get(row["training_run_id"], row["last_request_at"])
        config = LoraConfig.model_validate(row["lora_config"])
        return TrainingRunRecord(**{**row, "last_request_at": touched, "lora_config": config})

    # Sampling sessions

    def add_sampling_session(self, record: SamplingSessionRecord) -> None:
        """Record a new sampling session."""
        with self._transaction() as connection:
            insert(connection, tables.sampling_sessions, record)

    def get_sampling_session(self, sampling_session_id: str) -> SamplingSessionRecord | None:
        """The sampling session, or None."""
        table = tables.sampling_sessions
        rows = self._rows(sa.select(table).where(table.c.sampling_session_id == sampling_session_id))
        return SamplingSessionRecord(**rows[0]) if rows else None


def insert(connection: sa.Connection, table: sa.Table, record: Record) -> None:
    """Add `record` as a row: its fields are the table's columns."""
    connection.execute(sa.insert(table).values(plain_fields(record)))


def plain_fields(record: Record) -> dict[str, Any]:
    """The fields of a record, as JSON but for times."""
    return {field.name: _plain(getattr(record, field.name)) for field in fields(record)}


def _plain(value: Any) -> Any:
    if isinstance(value, LoraConfig):
        return value.model_dump()
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, tuple) else value


def _without_number(row: Mapping[Any, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != "number"}


def _session(row: dict[str, Any]) -> SessionRecord:
    return SessionRecord(**{**row, "tags": tuple(row["tags"])})
