"""`SqlStore`: the store on SQLAlchemy and checkpoint folders.

A checkpoint exists if, and only if, it has a record; the record is committed after its folder is complete and on the
disk, and deleted before its folder is. What a kill leaves in between is removed when the next server starts.
"""

import logging
import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from tinker_local.backend.storage import tables
from tinker_local.backend.storage.adapter_files import WEIGHTS, read_adapter
from tinker_local.backend.storage.checkpoints import CheckpointFolders, refuse_halves
from tinker_local.backend.storage.database import open_database
from tinker_local.backend.storage.durable import make_durable_folder
from tinker_local.backend.storage.interface import (
    CheckpointKind,
    CheckpointRecord,
    CopyRecord,
    SessionRecord,
    TrainingRunRecord,
)
from tinker_local.backend.storage.lock import FolderLock
from tinker_local.backend.storage.names import check_checkpoint_name
from tinker_local.backend.storage.records import SqlRecords, session_values, training_run_values
from tinker_local.backend.training.interface import AdapterState
from tinker_local.types import InvalidRequestError, LoraConfig, NotFoundError

log = logging.getLogger(__name__)

DATABASE = "metadata.sqlite3"
CHECKPOINTS = "checkpoints"


class SqlStore(SqlRecords):
    """Keeps `storage.interface.Store` in `data_dir`, which it locks (FolderInUseError if another process has it).

    `url`: any SQLAlchemy URL for the metadata; by default SQLite in `data_dir`. Checkpoints are always folders of
    `data_dir`. `clock`: the time by which checkpoints expire. Methods may be called from several threads; each is
    durable when it returns, but for `touch_training_run`, which is written with the next change or after
    `TOUCH_SECONDS`.
    """

    def __init__(
        self, data_dir: Path, url: str | None = None, *, clock: Callable[[], datetime] = lambda: datetime.now(UTC)
    ) -> None:
        data_dir = data_dir.absolute()
        make_durable_folder(data_dir, mode=0o700)
        self._clock = clock
        # Expired, with a folder still, and their name taken by a new one before `forget_expired` came by.
        self._replaced_expired: list[CheckpointRecord] = []
        # Held while a checkpoint is read and while one is removed, so that nobody reads a folder that vanishes.
        self._folder_access = threading.Lock()
        with ExitStack() as opened:
            lock = FolderLock(data_dir)
            opened.callback(lock.release)
            engine, is_new = open_database(url or sa.URL.create("sqlite", database=str(data_dir / DATABASE)))
            opened.callback(engine.dispose)
            super().__init__(engine)
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
        """Write what is pending and let the folder go; calling it again does nothing."""
        if not self._closed:
            self._write_touches()
        self._closed = True
        self._opened.close()

    # Writing

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
            self.remove_folder(replaced)
        return written

    def _commit(self, record: CheckpointRecord, overwrite: bool) -> CheckpointRecord | None:
        """Record `record` in place of the checkpoint of that name, which is returned if its folder is nobody's."""
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
        """Publish or unpublish; InvalidRequestError if it is so already."""
        with self._writing:
            current = self._require(record)
            if current.public == public:
                state = "public" if public else "private"
                raise InvalidRequestError(f"checkpoint {record.tinker_path} is {state} already")
            return self._change(current, public=public)

    def set_expiry(self, record: CheckpointRecord, expires_at: datetime | None) -> CheckpointRecord:
        """Give a checkpoint another end, or none."""
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
        """`source` as a checkpoint of the new `run`, sharing its files on the disk."""
        with self._folder_access:  # nobody removes the source meanwhile
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
                    connection.execute(sa.insert(tables.sessions).values(session_values(session)))
                connection.execute(sa.insert(tables.training_runs).values(training_run_values(run)))
                connection.execute(sa.insert(tables.checkpoints).values(_values(written)))
                for copy in copies:
                    values = {"key": copy.key, "request": dict(copy.request), "tinker_path": copy.tinker_path}
                    connection.execute(sa.insert(tables.copies).values(values))
        except BaseException:
            self._folders.remove(written)
            raise
        return written

    # Reading

    def get_checkpoint(self, training_run_id: str, kind: CheckpointKind, name: str) -> CheckpointRecord | None:
        """The checkpoint, or None."""
        found = self._checkpoints(_named(training_run_id, kind, name) & self._in_time())
        return found[0] if found else None

    def list_checkpoints(self, training_run_id: str) -> list[CheckpointRecord]:
        """The checkpoints of one run, newest first."""
        return self._checkpoints((tables.checkpoints.c.training_run_id == training_run_id) & self._in_time())

    def list_all_checkpoints(self, limit: int, offset: int) -> tuple[list[CheckpointRecord], int]:
        """Newest first, and the count of all."""
        rows, total = self._page(tables.checkpoints, limit, offset, self._in_time())
        return [_checkpoint(row) for row in rows], total

    def session_storage(self, session_ids: Collection[str]) -> dict[str, tuple[int, int]]:
        """How many checkpoints each of these sessions has, and their bytes; sessions without one are left out."""
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
        """The copy that was made under `key`, or None."""
        rows = self._rows(sa.select(tables.copies).where(tables.copies.c.key == key))
        return CopyRecord(**rows[0]) if rows else None

    def checkpoint_folder(self, record: CheckpointRecord) -> Path:
        """The folder in PEFT's layout; computed, no disk is touched."""
        return self._folders.path(record)

    def read_checkpoint(self, record: CheckpointRecord, *, optimizer: bool) -> AdapterState:
        """What was saved last under the record's name, or, if that was forgotten, the record's own folder while it
        is there; NotFoundError if all is gone."""
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

    # Deleting

    def forget_checkpoint(self, record: CheckpointRecord) -> CheckpointRecord:
        """Delete the record of the checkpoint of that name, which is returned; NotFoundError if there is none."""
        with self._writing:
            current = self._require(record)
            self._forget(current)
        return current

    def forget_expired(self) -> list[CheckpointRecord]:
        """`forget_checkpoint` of those whose time is over; their folders stay until `remove_folder`."""
        with self._writing:
            expired = self._checkpoints(tables.checkpoints.c.expires_at <= self._clock())
            for record in expired:
                self._forget(record)
            replaced, self._replaced_expired = self._replaced_expired, []
        return [*expired, *replaced]

    def delete_checkpoint(self, record: CheckpointRecord) -> None:
        """Delete the checkpoint of the record's name, with its folder; NotFoundError if there is none."""
        self.remove_folder(self.forget_checkpoint(record))

    def remove_folder(self, record: CheckpointRecord) -> None:
        """Delete the folder of a checkpoint that is forgotten; one that is gone is fine."""
        with self._folder_access:
            self._folders.remove(record)

    def _require(self, record: CheckpointRecord) -> CheckpointRecord:
        current = self.get_checkpoint(record.training_run_id, record.kind, record.name)
        if current is None:
            raise NotFoundError(f"checkpoint {record.tinker_path} does not exist")
        return current

    def _current(self, record: CheckpointRecord) -> CheckpointRecord | None:
        """What is recorded under that name, in time or over."""
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
