"""`Store`: everything durable. Metadata is in a database (SQLAlchemy), adapters are in checkpoint folders.

A checkpoint exists if and only if it has a record. The record is committed after the checkpoint's folder is complete
and on disk, and deleted before the folder is. The next start removes whatever a kill leaves in between.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from safetensors import SafetensorError
from tinker_local.backend.storage import tables
from tinker_local.backend.storage.adapter_files import WEIGHTS, optimizer_type, read_adapter
from tinker_local.backend.storage.checkpoint_folders import CheckpointFolders, refuse_halves
from tinker_local.backend.storage.data_folder import FolderLock, make_durable_folder
from tinker_local.backend.storage.database import open_database
from tinker_local.backend.storage.names import check_checkpoint_name
from tinker_local.backend.storage.records import (
    CheckpointKind,
    CheckpointRecord,
    CopyRecord,
    EndReason,
    SamplingSessionRecord,
    SessionRecord,
    TrainingRunRecord,
)
from tinker_local.backend.training.trainer import AdapterState
from tinker_local.types import InvalidRequestError, LoraConfig, NotFoundError

log = logging.getLogger(__name__)

DATABASE = "metadata.sqlite3"
CHECKPOINTS = "checkpoints"
TOUCH_SECONDS = 30.0
"""How far a run's `last_request_at` on disk may lag behind."""


class Store:
    """The durable state in `data_dir`, which it locks (FolderInUseError if another process holds the lock).

    Every method blocks on the disk and may be called from any thread. Its changes are durable when it returns, except
    those of `touch_training_run`, which are written with the next change or after `TOUCH_SECONDS`. An expired
    checkpoint counts as gone: only `forget_expired` returns it.

    `url`: an SQLAlchemy URL for the metadata; None: SQLite in `data_dir`. Checkpoints are always folders in
    `data_dir`. `clock` decides when checkpoints expire.
    """

    def __init__(
        self, data_dir: Path, url: str | None = None, *, clock: Callable[[], datetime] = lambda: datetime.now(UTC)
    ) -> None:
        data_dir = data_dir.absolute()
        make_durable_folder(data_dir, mode=0o700)
        self._clock = clock
        self._closed = False
        self._writing = threading.RLock()
        self._touched: dict[str, datetime] = {}
        self._touches_written = time.monotonic()
        # Expired checkpoints whose name a new one took before `forget_expired` ran; their folders still exist.
        self._replaced_expired: list[CheckpointRecord] = []
        # Held while a checkpoint is read and while one is removed, so that no folder vanishes while it is read.
        self._folder_access = threading.Lock()
        with ExitStack() as opened:
            lock = FolderLock(data_dir)
            opened.callback(lock.release)
            engine, is_new = open_database(url or sa.URL.create("sqlite", database=str(data_dir / DATABASE)))
            opened.callback(engine.dispose)
            self._engine = engine
            refuse_halves(data_dir / CHECKPOINTS, is_new, self._checkpoints(sa.true()))
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
        """Write what is pending and release the folder; a second call does nothing."""
        if self._touched and not self._closed:
            with self._transaction():
                pass
        self._closed = True
        self._opened.close()

    @contextmanager
    def _transaction(self) -> Iterator[sa.Connection]:
        """One writer at a time: SQLite has one write lock, and waiting for it in Python is fair and has no timeout."""
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

    def _page(
        self, table: sa.Table, limit: int, offset: int, condition: sa.ColumnElement[bool] | None = None
    ) -> tuple[list[dict[str, Any]], int]:
        counted = sa.true() if condition is None else condition
        newest_first = sa.select(table).where(counted).order_by(table.c.created_at.desc(), table.c.number.desc())
        with self._engine.connect() as connection:
            total = connection.execute(sa.select(sa.func.count()).select_from(table).where(counted)).scalar_one()
            rows = connection.execute(newest_first.limit(limit).offset(offset)).mappings()
            return [_without_number(row) for row in rows], total

    # Sessions

    def add_session(self, record: SessionRecord) -> None:
        """Record a new session."""
        self._insert(tables.sessions, _session_values(record))

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
        """Newest first, equal times by descending id; starts after the session with that time and id."""
        table = tables.sessions
        query = sa.select(table).order_by(table.c.created_at.desc(), table.c.session_id.desc()).limit(limit)
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

    # Training runs

    def add_training_run(self, record: TrainingRunRecord) -> None:
        """Record a new training run."""
        self._insert(tables.training_runs, _training_run_values(record))

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

    # Checkpoints: writing

    def write_checkpoint(self, record: CheckpointRecord, state: AdapterState, *, overwrite: bool) -> CheckpointRecord:
        """Write and record a checkpoint; when this returns it survives `kill -9` and a power cut.

        Returns the record with its size. InvalidRequestError if the name exists and `overwrite` is false; with
        `overwrite`, the old checkpoint stays whole until the new one is in place.
        """
        check_checkpoint_name(record.name)
        if not overwrite:  # before megabytes are written; `_commit` checks again
            _refuse_existing(self.get_checkpoint(record.training_run_id, record.kind, record.name))
        written = self._folders.write(record, state)
        try:
            replaced = self._commit(written, overwrite)
        except InvalidRequestError:
            self._folders.remove(written)
            raise
        if replaced is not None:
            self.remove_folder(replaced)
        return written

    def _commit(self, record: CheckpointRecord, overwrite: bool) -> CheckpointRecord | None:
        """Commit `record`; return the checkpoint that it replaces, if its folder has to be removed now."""
        with self._transaction() as connection:
            replaced = self._current(record)
            expired = replaced is not None and self._is_over(replaced)
            if not overwrite and not expired:
                _refuse_existing(replaced)
            connection.execute(sa.delete(tables.checkpoints).where(_is(record)))
            connection.execute(sa.insert(tables.checkpoints).values(_values(record)))
            if replaced is not None and expired:
                self._replaced_expired.append(replaced)
        return None if expired else replaced

    def set_public(self, record: CheckpointRecord, public: bool) -> CheckpointRecord:
        """Publish or unpublish a checkpoint; InvalidRequestError if nothing would change."""
        with self._writing:
            current = self._require(record)
            if current.public == public:
                state = "public" if public else "private"
                raise InvalidRequestError(f"checkpoint {record.tinker_path} is {state} already")
            return self._change(current, public=public)

    def set_expiry(self, record: CheckpointRecord, expires_at: datetime | None) -> CheckpointRecord:
        """Change or remove (None) the expiry of a checkpoint."""
        with self._writing:
            return self._change(self._require(record), expires_at=expires_at)

    def _change(self, record: CheckpointRecord, **values: Any) -> CheckpointRecord:
        with self._transaction() as connection:
            connection.execute(sa.update(tables.checkpoints).where(_is(record)).values(values))
        return self._require(record)

    def copy_checkpoint(
        self,
        source: CheckpointRecord,
        run: TrainingRunRecord,
        *,
        session: SessionRecord | None,
        expires_at: datetime | None,
        copies: Sequence[CopyRecord],
    ) -> CheckpointRecord:
        """`source` as a checkpoint of the new `run` (of the new `session`, if given), sharing its files on disk.

        `copies` are recorded in the same transaction; `find_copy` finds them by their key.
        """
        with self._folder_access:  # the source cannot be removed meanwhile
            current = self._require(source)
            record = replace(
                current,
                training_run_id=run.training_run_id,
                created_at=run.created_at,
                expires_at=expires_at,
                public=False,
            )
            written = self._folders.link(record, current)
        try:
            with self._transaction() as connection:
                if session is not None:
                    connection.execute(sa.insert(tables.sessions).values(_session_values(session)))
                connection.execute(sa.insert(tables.training_runs).values(_training_run_values(run)))
                connection.execute(sa.insert(tables.checkpoints).values(_values(written)))
                for copy in copies:
                    values = {"key": copy.key, "request": dict(copy.request), "tinker_path": copy.tinker_path}
                    connection.execute(sa.insert(tables.copies).values(values))
        except BaseException:
            self._folders.remove(written)
            raise
        return written

    # Checkpoints: reading

    def get_checkpoint(self, training_run_id: str, kind: CheckpointKind, name: str) -> CheckpointRecord | None:
        """The checkpoint, or None."""
        found = self._checkpoints(_named(training_run_id, kind, name) & self._in_time())
        return found[0] if found else None

    def existing_checkpoint(self, run: str, kind: CheckpointKind, name: str, field: str) -> CheckpointRecord:
        """The checkpoint; NotFoundError naming `field` if there is none."""
        record = self.get_checkpoint(run, kind, name)
        if record is None:
            raise NotFoundError(f"{field}: there is no checkpoint tinker://{run}/{kind}/{name}")
        return record

    def list_checkpoints(self, training_run_id: str) -> list[CheckpointRecord]:
        """The checkpoints of one run, newest first."""
        return self._checkpoints((tables.checkpoints.c.training_run_id == training_run_id) & self._in_time())

    def list_all_checkpoints(self, limit: int, offset: int) -> tuple[list[CheckpointRecord], int]:
        """Newest first, and the count of all."""
        rows, total = self._page(tables.checkpoints, limit, offset, self._in_time())
        return [_checkpoint(row) for row in rows], total

    def session_storage(self, session_ids: Collection[str]) -> dict[str, tuple[int, int]]:
        """The number of checkpoints and their bytes, for each session that has any."""
        runs, checkpoints = tables.training_runs.c, tables.checkpoints.c
        query = (
            sa.select(runs.session_id, sa.func.count(), sa.func.sum(checkpoints.size_bytes))
            .join_from(tables.checkpoints, tables.training_runs, checkpoints.training_run_id == runs.training_run_id)
            .where(runs.session_id.in_(session_ids) & self._in_time())
            .group_by(runs.session_id)
        )
        with self._engine.connect() as connection:
            return {session: (count, int(size)) for session, count, size in connection.execute(query)}

    def find_copy(self, key: str) -> CopyRecord | None:
        """The copy that was recorded under `key`, or None."""
        rows = self._rows(sa.select(tables.copies).where(tables.copies.c.key == key))
        return CopyRecord(**rows[0]) if rows else None

    def checkpoint_folder(self, record: CheckpointRecord) -> Path:
        """The folder, in PEFT's layout; computed without touching the disk."""
        return self._folders.path(record)

    def read_checkpoint(self, record: CheckpointRecord, *, optimizer: bool) -> AdapterState:
        """The newest checkpoint of the record's name. If that was forgotten: the record's own folder, while it exists.

        NotFoundError if neither exists.
        """
        with self._folder_access:
            current = self._current(record) or record
            folder = self._folders.path(current)
            if not folder.exists():
                raise NotFoundError(f"checkpoint {record.tinker_path} does not exist any more")
            if optimizer and not current.has_optimizer:
                raise InvalidRequestError(
                    f"checkpoint {record.tinker_path} was saved without optimizer state; load its weights alone"
                )
            return read_adapter(folder, current.base_model, current.lora_config, optimizer=optimizer)

    def checkpoint_optimizer(self, record: CheckpointRecord) -> str:
        """The type of the optimizer whose state a checkpoint holds, from its file's header.

        InvalidRequestError if that cannot be read; the weights may still be whole.
        """
        with self._folder_access:
            try:
                return optimizer_type(self._folders.path(self._current(record) or record))
            except (OSError, SafetensorError) as error:
                raise InvalidRequestError(
                    f"checkpoint {record.tinker_path}: its optimizer state cannot be read ({error}); "
                    "load its weights alone"
                ) from error

    # Checkpoints: deleting

    def forget_checkpoint(self, record: CheckpointRecord) -> CheckpointRecord:
        """Delete the record alone and return it; NotFoundError if there is none.

        The checkpoint cannot be found any more, but its folder can still be read with its record.
        """
        with self._writing:
            current = self._require(record)
            self._forget(current)
        return current

    def forget_expired(self) -> list[CheckpointRecord]:
        """`forget_checkpoint` of all that have expired; their folders stay until `remove_folder`."""
        with self._writing:
            expired = self._checkpoints(tables.checkpoints.c.expires_at <= self._clock())
            for record in expired:
                self._forget(record)
            replaced, self._replaced_expired = self._replaced_expired, []
        return [*expired, *replaced]

    def delete_checkpoint(self, record: CheckpointRecord) -> None:
        """Delete a checkpoint that nothing uses, with its folder; NotFoundError if there is none."""
        self.remove_folder(self.forget_checkpoint(record))

    def remove_folder(self, record: CheckpointRecord) -> None:
        """Delete the folder of a forgotten checkpoint, if it exists."""
        with self._folder_access:
            self._folders.remove(record)

    def _require(self, record: CheckpointRecord) -> CheckpointRecord:
        current = self.get_checkpoint(record.training_run_id, record.kind, record.name)
        if current is None:
            raise NotFoundError(f"checkpoint {record.tinker_path} does not exist")
        return current

    def _current(self, record: CheckpointRecord) -> CheckpointRecord | None:
        """What is recorded under that name, expired or not."""
        found = self._checkpoints(_is(record))
        return found[0] if found else None

    def _in_time(self) -> sa.ColumnElement[bool]:
        expires_at = tables.checkpoints.c.expires_at
        return expires_at.is_(None) | (expires_at > self._clock())

    def _is_over(self, record: CheckpointRecord) -> bool:
        return record.expires_at is not None and record.expires_at <= self._clock()

    def _checkpoints(self, condition: sa.ColumnElement[bool]) -> list[CheckpointRecord]:
        table = tables.checkpoints
        query = sa.select(table).where(condition).order_by(table.c.created_at.desc(), table.c.number.desc())
        return [_checkpoint(row) for row in self._rows(query)]

    def _forget(self, record: CheckpointRecord) -> None:
        with self._transaction() as connection:
            connection.execute(sa.delete(tables.checkpoints).where(_is(record)))


def _without_number(row: Mapping[Any, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != "number"}


def _session(row: dict[str, Any]) -> SessionRecord:
    return SessionRecord(**{**row, "tags": tuple(row["tags"])})


def _session_values(record: SessionRecord) -> dict[str, Any]:
    values = {name: getattr(record, name) for name in SessionRecord.__slots__}
    return values | {"user_metadata": dict(record.user_metadata), "tags": list(record.tags)}


def _training_run_values(record: TrainingRunRecord) -> dict[str, Any]:
    values = {name: getattr(record, name) for name in TrainingRunRecord.__slots__}
    return values | {"user_metadata": dict(record.user_metadata), "lora_config": record.lora_config.model_dump()}


def _checkpoint(row: dict[str, Any]) -> CheckpointRecord:
    return CheckpointRecord(**{**row, "lora_config": LoraConfig.model_validate(row["lora_config"])})


def _values(record: CheckpointRecord) -> dict[str, Any]:
    values = {name: getattr(record, name) for name in CheckpointRecord.__slots__}
    return values | {"user_metadata": dict(record.user_metadata), "lora_config": record.lora_config.model_dump()}


def _named(training_run_id: str, kind: str, name: str) -> sa.ColumnElement[bool]:
    table = tables.checkpoints.c
    return sa.and_(table.training_run_id == training_run_id, table.kind == kind, table.name == name)


def _is(record: CheckpointRecord) -> sa.ColumnElement[bool]:
    return _named(record.training_run_id, record.kind, record.name)


def _refuse_existing(record: CheckpointRecord | None) -> None:
    if record is not None:
        # Of the SDK's calls only `save_state` overwrites.
        instead = (
            "save with overwrite=True"
            if record.kind == "weights"
            else f"delete it first: RestClient.delete_checkpoint_from_tinker_path({record.tinker_path!r})"
        )
        raise InvalidRequestError(
            f"name: checkpoint {record.name!r} exists already in {record.kind} of {record.training_run_id}; "
            f"choose another name, or {instead}"
        )
