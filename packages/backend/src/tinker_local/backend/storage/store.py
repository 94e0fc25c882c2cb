"""`SqlStore`: the store on SQLAlchemy and checkpoint folders.

A checkpoint exists if, and only if, it has a record; the record is committed after its folder is complete and on the
disk, and deleted before its folder is. What a kill leaves in between is removed when the next server starts.
"""

import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from tinker_local.backend.storage import tables
from tinker_local.backend.storage.adapter_files import WEIGHTS, read_adapter
from tinker_local.backend.storage.checkpoints import CheckpointFolders
from tinker_local.backend.storage.database import open_database
from tinker_local.backend.storage.durable import make_durable_folder
from tinker_local.backend.storage.interface import (
    CheckpointKind,
    CheckpointRecord,
    SamplingSessionRecord,
    SessionRecord,
    TrainingRunRecord,
)
from tinker_local.backend.storage.lock import FolderLock
from tinker_local.backend.storage.names import check_checkpoint_name
from tinker_local.backend.training.interface import AdapterState
from tinker_local.types import InvalidRequestError, LoraConfig, NotFoundError

log = logging.getLogger(__name__)

DATABASE = "metadata.sqlite3"
CHECKPOINTS = "checkpoints"
TOUCH_SECONDS = 30.0
"""How old the time of a run's last request may get on the disk."""


class SqlStore:
    """Keeps `storage.interface.Store` in `data_dir`, which it locks (FolderInUseError if another process has it).

    `url`: any SQLAlchemy URL for the metadata; by default SQLite in `data_dir`. Checkpoints are always folders of
    `data_dir`. Methods may be called from several threads; each is durable when it returns, but for
    `touch_training_run`, which is written with the next change or after `TOUCH_SECONDS`.
    """

    def __init__(self, data_dir: Path, url: str | None = None) -> None:
        data_dir = data_dir.absolute()
        make_durable_folder(data_dir, mode=0o700)
        self._closed = False
        self._touched: dict[str, datetime] = {}
        self._touches_written = time.monotonic()
        self._writing = threading.RLock()
        # Held while a checkpoint is read and while one is removed, so that nobody reads a folder that vanishes.
        self._folder_access = threading.Lock()
        with ExitStack() as opened:
            lock = FolderLock(data_dir)
            opened.callback(lock.release)
            self._engine, is_new = open_database(url or sa.URL.create("sqlite", database=str(data_dir / DATABASE)))
            opened.callback(self._engine.dispose)
            _refuse_halves(data_dir / CHECKPOINTS, is_new, self._checkpoints(sa.true()))
            self._folders = CheckpointFolders(data_dir / CHECKPOINTS)
            self._recover()
            self._opened = opened.pop_all()

    def _recover(self) -> None:
        """Make records and folders agree after a kill."""
        present = set()
        for record in self._checkpoints(sa.true()):
            folder = self._folders.path(record)
            if (folder / WEIGHTS).is_file():
                present.add(folder)
            else:
                log.warning("checkpoint %s is dropped: its folder is gone", record.tinker_path)
                self._forget(record)
        self._folders.sweep(present)

    def close(self) -> None:
        """Write what is pending and let the folder go; calling it again does nothing."""
        if not self._closed and self._touched:
            with self._transaction():
                pass
        self._closed = True
        self._opened.close()

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
            return [_without_number(row) for row in connection.execute(query).mappings()]

    def _page(self, table: sa.Table, limit: int, offset: int) -> tuple[list[dict[str, Any]], int]:
        newest_first = sa.select(table).order_by(table.c.created_at.desc(), table.c.number.desc())
        with self._engine.connect() as connection:
            total = connection.execute(sa.select(sa.func.count()).select_from(table)).scalar_one()
            rows = connection.execute(newest_first.limit(limit).offset(offset)).mappings()
            return [_without_number(row) for row in rows], total

    # Sessions

    def add_session(self, record: SessionRecord) -> None:
        """Record a new session."""
        values = {name: getattr(record, name) for name in SessionRecord.__slots__}
        values |= {"user_metadata": dict(record.user_metadata), "tags": list(record.tags)}
        self._insert(tables.sessions, values)

    def end_session(self, session_id: str, reason: str, when: datetime) -> None:
        """Record the end of a session; the first end counts."""
        table = tables.sessions
        open_session = (table.c.session_id == session_id) & table.c.ended_at.is_(None)
        with self._transaction() as connection:
            connection.execute(sa.update(table).where(open_session).values(ended_at=when, end_reason=reason))

    def get_session(self, session_id: str) -> SessionRecord | None:
        """The session, or None."""
        rows = self._rows(sa.select(tables.sessions).where(tables.sessions.c.session_id == session_id))
        return SessionRecord(**{**rows[0], "tags": tuple(rows[0]["tags"])}) if rows else None

    # Training runs

    def add_training_run(self, record: TrainingRunRecord) -> None:
        """Record a new training run."""
        values = {name: getattr(record, name) for name in TrainingRunRecord.__slots__}
        values |= {"user_metadata": dict(record.user_metadata), "lora_config": record.lora_config.model_dump()}
        self._insert(tables.training_runs, values)

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

    # Checkpoints

    def write_checkpoint(self, record: CheckpointRecord, state: AdapterState, *, overwrite: bool) -> CheckpointRecord:
        """Write and record a checkpoint; when this returns it survives `kill -9` and a power cut."""
        check_checkpoint_name(record.name)
        if not overwrite:  # before megabytes are written; it counts again when the record is committed
            _refuse_existing(self.get_checkpoint(record.training_run_id, record.kind, record.name))
        written = self._folders.write(record, state)
        try:
            replaced = self._commit(written, overwrite)
        except InvalidRequestError:
            self._folders.remove(written)
            raise
        if replaced is not None:
            self._remove_folder(replaced)
        return written

    def _commit(self, record: CheckpointRecord, overwrite: bool) -> CheckpointRecord | None:
        """Record `record` in place of the checkpoint of that name, which is returned."""
        values = {name: getattr(record, name) for name in CheckpointRecord.__slots__}
        values |= {"user_metadata": dict(record.user_metadata), "lora_config": record.lora_config.model_dump()}
        with self._transaction() as connection:
            replaced = self.get_checkpoint(record.training_run_id, record.kind, record.name)
            if not overwrite:
                _refuse_existing(replaced)
            connection.execute(sa.delete(tables.checkpoints).where(_is(record)))
            connection.execute(sa.insert(tables.checkpoints).values(values))
        return replaced

    def get_checkpoint(self, training_run_id: str, kind: CheckpointKind, name: str) -> CheckpointRecord | None:
        """The checkpoint, or None."""
        found = self._checkpoints(_named(training_run_id, kind, name))
        return found[0] if found else None

    def list_checkpoints(self, training_run_id: str) -> list[CheckpointRecord]:
        """The checkpoints of one run, newest first."""
        return self._checkpoints(tables.checkpoints.c.training_run_id == training_run_id)

    def list_all_checkpoints(self, limit: int, offset: int) -> tuple[list[CheckpointRecord], int]:
        """Newest first, and the count of all."""
        rows, total = self._page(tables.checkpoints, limit, offset)
        return [_checkpoint(row) for row in rows], total

    def checkpoint_folder(self, record: CheckpointRecord) -> Path:
        """The folder in PEFT's layout; computed, no disk is touched."""
        return self._folders.path(record)

    def read_checkpoint(self, record: CheckpointRecord, *, optimizer: bool) -> AdapterState:
        """What was saved last under the record's name; NotFoundError if that is gone."""
        with self._folder_access:
            current = self.get_checkpoint(record.training_run_id, record.kind, record.name)
            if current is None:
                raise NotFoundError(f"checkpoint {record.tinker_path} does not exist any more")
            if optimizer and not current.has_optimizer:
                raise InvalidRequestError(
                    f"checkpoint {record.tinker_path} was saved without optimizer state; load its weights alone"
                )
            folder = self._folders.path(current)
            return read_adapter(folder, current.base_model, current.lora_config, optimizer=optimizer)

    def delete_checkpoint(self, record: CheckpointRecord) -> None:
        """Delete the checkpoint of the record's name; NotFoundError if there is none."""
        with self._writing:
            current = self.get_checkpoint(record.training_run_id, record.kind, record.name)
            if current is None:
                raise NotFoundError(f"checkpoint {record.tinker_path} does not exist")
            self._forget(current)
        self._remove_folder(current)

    def delete_expired(self, now: datetime) -> list[CheckpointRecord]:
        """Delete the checkpoints with `expires_at` at or before `now`, on disk too, and return them."""
        with self._writing:
            expired = self._checkpoints(tables.checkpoints.c.expires_at <= now)
            for record in expired:
                self._forget(record)
        for record in expired:
            self._remove_folder(record)
        return expired

    def _checkpoints(self, condition: sa.ColumnElement[bool]) -> list[CheckpointRecord]:
        table = tables.checkpoints
        query = sa.select(table).where(condition).order_by(table.c.created_at.desc(), table.c.number.desc())
        return [_checkpoint(row) for row in self._rows(query)]

    def _forget(self, record: CheckpointRecord) -> None:
        with self._transaction() as connection:
            connection.execute(sa.delete(tables.checkpoints).where(_is(record)))

    def _remove_folder(self, record: CheckpointRecord) -> None:
        with self._folder_access:
            self._folders.remove(record)


def _refuse_halves(root: Path, new_database: bool, records: Sequence[CheckpointRecord]) -> None:
    """RuntimeError if checkpoints have lost their database or a database its checkpoints: recovery would delete."""
    folders = [folder for folder in root.glob("*/*/*") if (folder / WEIGHTS).exists()]
    if new_database and folders:
        raise RuntimeError(
            f"{root} holds {len(folders)} checkpoints, but there was no database for them; "
            "put the database back, or move the checkpoints away"
        )
    if records and not root.exists():
        raise RuntimeError(
            f"the database knows {len(records)} checkpoints, but {root} does not exist; "
            "put it back, or make it an empty folder to forget them"
        )


def _without_number(row: Mapping[Any, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != "number"}


def _checkpoint(row: dict[str, Any]) -> CheckpointRecord:
    return CheckpointRecord(**{**row, "lora_config": LoraConfig.model_validate(row["lora_config"])})


def _named(training_run_id: str, kind: str, name: str) -> sa.ColumnElement[bool]:
    table = tables.checkpoints.c
    return sa.and_(table.training_run_id == training_run_id, table.kind == kind, table.name == name)


def _is(record: CheckpointRecord) -> sa.ColumnElement[bool]:
    return _named(record.training_run_id, record.kind, record.name)


def _refuse_existing(record: CheckpointRecord | None) -> None:
    if record is not None:
        raise InvalidRequestError(
            f"name: checkpoint {record.name!r} exists already in {record.kind} of {record.training_run_id}; "
            "choose another name, or save with overwrite"
        )
