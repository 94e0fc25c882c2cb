"""`SqlRecords`: sessions, training runs and sampling sessions in the database, on SQLAlchemy."""

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from tinker_local.backend.storage import tables
from tinker_local.backend.storage.interface import EndReason, SamplingSessionRecord, SessionRecord, TrainingRunRecord
from tinker_local.types import LoraConfig

TOUCH_SECONDS = 30.0
"""How old the time of a run's last request may get on the disk."""


class SqlRecords:
    """The part of `storage.interface.Store` that is in the database alone; `engine` belongs to the caller."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine
        self._closed = False
        self._touched: dict[str, datetime] = {}
        self._touches_written = time.monotonic()
        self._writing = threading.RLock()

    def _write_touches(self) -> None:
        """Write the times of requests that are in memory only."""
        if self._touched:
            with self._transaction():
                pass

    @contextmanager
    def _transaction(self) -> Iterator[sa.Connection]:
        """One writer at a time: SQLite has one write lock, and waiting for it in Python is fair and never times out."""
        if self._closed:
            raise RuntimeError("the store is closed")
        with self._writing, self._engine.begin() as connection:
            touched = dict(self._touched)
            for run_id, when in touched.items():
                row = tables.training_runs.c.training_run_id == run_id
                connection.execute(sa.update(tables.training_runs).where(row).values(last_request_at=when))
            yield connection
            self._touches_written = time.monotonic()
            for run_id, when in touched.items():
                if self._touched[run_id] == when:
                    del self._touched[run_id]

    def _insert(self, table: sa.Table, values: Mapping[str, Any]) -> None:
        with self._transaction() as connection:
            connection.execute(sa.insert(table).values(values))

    def _rows(self, query: sa.Select[Any]) -> list[dict[str, Any]]:
        with self._engine.connect() as connection:
            return [without_number(row) for row in connection.execute(query).mappings()]

    def _page(
        self, table: sa.Table, limit: int, offset: int, condition: sa.ColumnElement[bool] | None = None
    ) -> tuple[list[dict[str, Any]], int]:
        counted = sa.true() if condition is None else condition
        newest_first = sa.select(table).where(counted).order_by(table.c.created_at.desc(), table.c.number.desc())
        with self._engine.connect() as connection:
            total = connection.execute(sa.select(sa.func.count()).select_from(table).where(counted)).scalar_one()
            rows = connection.execute(newest_first.limit(limit).offset(offset)).mappings()
            return [without_number(row) for row in rows], total

    # Sessions

    def add_session(self, record: SessionRecord) -> None:
        """Record a new session."""
        self._insert(tables.sessions, session_values(record))

    def end_session(self, session_id: str, reason: EndReason, detail: str | None, when: datetime) -> None:
        """Record the end of a session; the first end counts."""
        table = tables.sessions
        open_session = (table.c.session_id == session_id) & table.c.ended_at.is_(None)
        values = {"ended_at": when, "end_reason": reason, "end_detail": detail}
        with self._transaction() as connection:
            connection.execute(sa.update(table).where(open_session).values(values))

    def get_session(self, session_id: str) -> SessionRecord | None:
        """The session, or None."""
        rows = self._rows(sa.select(tables.sessions).where(tables.sessions.c.session_id == session_id))
        return _session(rows[0]) if rows else None

    def list_sessions(self, limit: int, offset: int) -> tuple[list[SessionRecord], int]:
        """Newest first, and the count of all."""
        rows, total = self._page(tables.sessions, limit, offset)
        return [_session(row) for row in rows], total

    def sessions_before(self, before: tuple[datetime, str] | None, limit: int) -> list[SessionRecord]:
        """Newest first, equal times by falling id; from behind the session of that time and id on."""
        table = tables.sessions
        query = sa.select(table).order_by(table.c.created_at.desc(), table.c.session_id.desc()).limit(limit)
        if before is not None:
            when, session_id = before
            query = query.where(
                (table.c.created_at < when) | ((table.c.created_at == when) & (table.c.session_id < session_id))
            )
        return [_session(row) for row in self._rows(query)]

    def session_members(self, session_id: str) -> tuple[list[str], list[str]]:
        """The ids of a session's training runs and of its sampling sessions, the oldest first."""
        runs, samplers = tables.training_runs, tables.sampling_sessions
        found = []
        with self._engine.connect() as connection:
            for table, column in ((runs, runs.c.training_run_id), (samplers, samplers.c.sampling_session_id)):
                query = sa.select(column).where(table.c.session_id == session_id).order_by(table.c.number)
                found.append(list(connection.execute(query).scalars()))
        return found[0], found[1]

    # Training runs

    def add_training_run(self, record: TrainingRunRecord) -> None:
        """Record a new training run."""
        self._insert(tables.training_runs, training_run_values(record))

    def touch_training_run(self, training_run_id: str, when: datetime) -> None:
        """Note the time of a request; in memory, as this happens with every request."""
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

    def list_training_runs(self, limit: int, offset: int) -> tuple[list[TrainingRunRecord], int]:
        """Newest first, and the count of all."""
        rows, total = self._page(tables.training_runs, limit, offset)
        return [self._training_run(row) for row in rows], total

    def _training_run(self, row: dict[str, Any]) -> TrainingRunRecord:
        touched = self._touched.get(row["training_run_id"], row["last_request_at"])
        config = LoraConfig.model_validate(row["lora_config"])
        return TrainingRunRecord(**{**row, "last_request_at": touched, "lora_config": config})

    # Sampling sessions

    def add_sampling_session(self, record: SamplingSessionRecord) -> None:
        """Record a new sampling session."""
        values = {name: getattr(record, name) for name in SamplingSessionRecord.__slots__}
        self._insert(tables.sampling_sessions, values)

    def get_sampling_session(self, sampling_session_id: str) -> SamplingSessionRecord | None:
        """The sampling session, or None."""
        table = tables.sampling_sessions
        rows = self._rows(sa.select(table).where(table.c.sampling_session_id == sampling_session_id))
        return SamplingSessionRecord(**rows[0]) if rows else None


def without_number(row: Mapping[Any, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != "number"}


def _session(row: dict[str, Any]) -> SessionRecord:
    return SessionRecord(**{**row, "tags": tuple(row["tags"])})


def session_values(record: SessionRecord) -> dict[str, Any]:
    values = {name: getattr(record, name) for name in SessionRecord.__slots__}
    return values | {"user_metadata": dict(record.user_metadata), "tags": list(record.tags)}


def training_run_values(record: TrainingRunRecord) -> dict[str, Any]:
    values = {name: getattr(record, name) for name in TrainingRunRecord.__slots__}
    return values | {"user_metadata": dict(record.user_metadata), "lora_config": record.lora_config.model_dump()}
