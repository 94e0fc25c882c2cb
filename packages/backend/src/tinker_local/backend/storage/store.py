"""`Store`: everything durable. Metadata is in a database (SQLAlchemy), adapters are in checkpoint folders.

A checkpoint exists if and only if it has a record. The record is committed after the checkpoint's folder is complete
and on disk, and deleted before the folder is. The next start removes whatever a kill leaves in between.
"""

import itertools
import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from safetensors import SafetensorError
from tinker_local.backend.adapters.adapter import AdapterState
from tinker_local.backend.adapters.adapter_files import (
    AGE,
    CONFIG,
    OPTIMIZER,
    WEIGHTS,
    adapter_bytes,
    fault_of,
    optimizer_type,
    read_adapter,
)
from tinker_local.backend.adapters.checksums import check_files
from tinker_local.backend.storage import tables
from tinker_local.backend.storage.checkpoint_folders import CheckpointFolders, refuse_without_folders
from tinker_local.backend.storage.data_folder import FolderLock, make_durable_folder
from tinker_local.backend.storage.database import open_database
from tinker_local.backend.storage.disk_space import RESERVE_BYTES, DiskSpace
from tinker_local.backend.storage.metadata import EVERYTHING, Metadata, Owned, insert
from tinker_local.backend.storage.names import AUTOSAVE, check_checkpoint_name
from tinker_local.backend.storage.records import (
    LOCAL_OWNER,
    CheckpointKind,
    CheckpointRecord,
    CopyRecord,
    SamplingSessionRecord,
    SessionRecord,
    TrainingRunRecord,
)
from tinker_local.backend.storage.recovery import as_described, compare, description_of
from tinker_local.backend.storage.steady_clock import SteadyClock
from tinker_local.backend.storage.storage_quota import RECORD_BYTES, StorageQuota
from tinker_local.types import InvalidRequestError, LoraConfig, NotFoundError, StorageFullError

log = logging.getLogger(__name__)

DATABASE = "metadata.sqlite3"
CHECKPOINTS = "checkpoints"

NAMED_IN_ERRORS = 3
"""Checkpoints that an error names."""

_USABLE = sa.func.coalesce(tables.checkpoints.c.unusable, "") == ""
"""Of checkpoints that can be loaded, or have not been examined."""

EXAMINE_SECONDS = 5.0
"""For which a start examines checkpoints of an older server; the others follow while it serves."""


class Store(Metadata):
    """The durable state in `data_dir`, which it locks (FolderInUseError if another process holds the lock).

    Every method blocks on the disk and may be called from any thread. Its changes are durable when it returns, except
    those of `touch_training_run`, which are written with the next change or after `TOUCH_SECONDS`. An expired
    checkpoint counts as gone: only `forget_expired` returns it. On a full disk, methods that write raise
    StorageFullError, and those that delete or end something use a reserve.

    `url`: an SQLAlchemy URL for the metadata; None: SQLite in `data_dir`. Checkpoints are always folders in
    `data_dir`. `clock` decides when checkpoints expire; `forget_expired` does nothing for `grace` seconds after it
    jumped, or the store was opened. `reserve_bytes` are kept free for a full disk. `most_bytes` gives the most of an
    owner's checkpoints.
    """

    def __init__(
        self,
        data_dir: Path,
        url: str | None = None,
        *,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
        grace: float = 0.0,
        reserve_bytes: int = RESERVE_BYTES,
        most_bytes: Callable[[str], float] = lambda owner: math.inf,
    ) -> None:
        data_dir = data_dir.absolute()
        make_durable_folder(data_dir, mode=0o700)
        if os.name == "posix" and (mode := data_dir.stat().st_mode) & 0o077:
            log.warning(
                "other users of this machine can read or enter %s (mode %o), which holds everybody's checkpoints and "
                "prompts: chmod 700 it",
                data_dir,
                mode & 0o777,
            )
        disk = DiskSpace(data_dir, reserve_bytes)
        # Expired checkpoints whose name a new one took before `forget_expired` ran; their folders still exist.
        self._replaced_expired: list[CheckpointRecord] = []
        # Held while a checkpoint is read and while one is removed, so that no folder vanishes while it is read.
        self._folder_access = threading.Lock()
        with ExitStack() as opened:
            lock = FolderLock(data_dir)
            opened.callback(lock.release)
            opened.callback(disk.close)
            disk.close()  # left by a server that was killed: this start may need the space
            try:
                with disk.explained():
                    engine = open_database(url or sa.URL.create("sqlite", database=str(data_dir / DATABASE)))
                    opened.callback(engine.dispose)
                    super().__init__(engine, disk, SteadyClock(clock, grace))
                    self.quota = StorageQuota(engine, self._clock, most_bytes)
                    self._recover(data_dir / CHECKPOINTS)
                    self._examine_for(EXAMINE_SECONDS)
                    disk.fill_reserve()
            except sa.exc.OperationalError as error:
                raise RuntimeError(f"the database in {data_dir} cannot be used: {error.orig}") from error
            self._opened = opened.pop_all()

    def add_session(self, record: SessionRecord) -> None:
        """See `Metadata`; InvalidRequestError if its owner has as many records as it may."""
        size = RECORD_BYTES + _written(record.user_metadata) + _written(record.tags)
        with self._counted(record.owner, size, "create_session"):
            super().add_session(record)

    def add_training_run(self, record: TrainingRunRecord) -> None:
        """See `Metadata`; InvalidRequestError as for a session."""
        size = RECORD_BYTES + _written(record.user_metadata)
        with self._counted(self.quota.owner_of(record.session_id), size, "create_model"):
            super().add_training_run(record)

    def add_named_sampling_session(self, record: SamplingSessionRecord) -> None:
        """See `add_sampling_session`; InvalidRequestError as for a session. Those of ephemeral saves do not count: each
        takes a training command, and a loop that makes them goes on when its owner has no storage left."""
        with self._counted(self.quota.owner_of(record.session_id), RECORD_BYTES, "sampling_session_seq_id"):
            self.add_sampling_session(record)

    def take_curve(self, run_id: str, size: int) -> bool:
        """Count bytes of the curve of a run; false if its owner may have no more."""
        owner = self.quota.owner_of(run_id)
        try:
            self.quota.take(owner or LOCAL_OWNER, size, "run_id")
        except InvalidRequestError:
            return False
        return True

    @contextmanager
    def _counted(self, owner: str | None, size: int, what: str) -> Iterator[None]:
        """Record `size` bytes of `owner`, if that is known, inside."""
        if owner is None:
            yield
            return
        self.quota.take(owner, size, what)
        try:
            yield
        except BaseException:
            self.quota.take(owner, -size, what)
            raise

    def _recover(self, root: Path) -> None:
        """Make records and folders agree after a kill, or after one of them was lost or put back."""
        records = self._checkpoints(sa.true())
        numbers = itertools.count(1 + max((record.save_number for record in records), default=0))
        refuse_without_folders(root, len(records))
        self._folders = CheckpointFolders(root)
        found = compare(self._folders, records)
        known = max((record.save_number for record in found.adopted), default=0)
        numbers = itertools.count(max(next(numbers), known + 1))
        missing = {record.tinker_path for record in found.missing}
        with self._transaction() as connection:
            for record in found.adopted:  # those of older servers have no number
                self._adopt(connection, record if record.save_number else replace(record, save_number=next(numbers)))
            for record in records:
                if record.missing != (record.tinker_path in missing):
                    change = sa.update(tables.checkpoints).where(_is(record))
                    connection.execute(change.values(missing=not record.missing))
        self._save_numbers = numbers
        warning = found.warning(self._folders)
        for record in (*found.superseded, *found.aside):
            self._folders.put_aside(record)
        if warning is not None:
            log.warning("%s", warning)

    def _adopt(self, connection: sa.Connection, record: CheckpointRecord) -> None:
        """Record a checkpoint that has a folder; and its run and session, as ended, if they were lost too."""
        run_id, when = record.training_run_id, record.created_at
        session_id = run_id.rsplit(":", 2)[0]  # as in `SESSION:train:NUMBER`
        sessions, runs = tables.sessions, tables.training_runs
        connection.execute(sa.delete(tables.checkpoints).where(_is(record)))
        insert(connection, tables.checkpoints, record)
        if connection.execute(sa.select(runs.c.number).where(runs.c.training_run_id == run_id)).first() is None:
            run = TrainingRunRecord(run_id, session_id, record.base_model, record.lora_config, when, when)
            insert(connection, runs, as_described(run, self._folders.belongs_to(record, "training_run")))
            known = sa.select(sessions.c.number).where(sessions.c.session_id == session_id)
            if connection.execute(known).first() is None:
                session = SessionRecord(session_id, when)
                insert(connection, sessions, as_described(session, self._folders.belongs_to(record, "session")))

    def _examine_for(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and self.examine_next():
            pass

    def examine_next(self) -> bool:
        """Examine the smallest checkpoint that was not yet, if there is one: whether its values are finite."""
        table = tables.checkpoints
        unknown = self._checkpoints(table.c.unusable.is_(None) & ~table.c.missing, table.c.size_bytes)
        if unknown:
            self._examine(unknown[0])
        return bool(unknown)

    def _examine(self, record: CheckpointRecord) -> str:
        """Why `record` cannot be loaded; empty if it can, or if that shows when it is loaded."""
        with self._folder_access:
            try:
                found = fault_of(self._folders.path(record))
            except (OSError, ValueError, LookupError, SafetensorError):
                found = ""
        if found:
            log.warning("checkpoint %s cannot be loaded: %s", record.tinker_path, found)
        change = sa.update(tables.checkpoints).where(
            _is(record) & (tables.checkpoints.c.created_at == record.created_at)
        )
        self._change_on_a_full_disk(lambda connection: connection.execute(change.values(unusable=found)))
        return found

    def refuse_unusable(self, record: CheckpointRecord, field: str) -> None:
        """InvalidRequestError naming `field` if the checkpoint cannot be loaded."""
        if fault := self._examine(record) if record.unusable is None else record.unusable:
            raise InvalidRequestError(f"{field}: {record.tinker_path} cannot be used: {fault}")

    def close(self) -> None:
        """Write what is pending and release the folder; a second call does nothing."""
        try:
            if self._touched and not self._closed:
                self._change_on_a_full_disk(lambda connection: None)
        except StorageFullError as error:
            log.warning("the times of the last requests were not recorded: %s", error)
        finally:
            self._closed = True
            self._opened.close()

    def look_at_disk(self) -> str | None:
        """What is wrong with the disk of the data folder: that it is full, or None."""
        self._disk.look()
        return self.disk_problem()

    def disk_problem(self) -> str | None:
        """What `look_at_disk` said, or a write since."""
        if not self._disk.full:
            return None
        return "the disk of the data folder is full: nothing can be saved, so delete checkpoints or free space there"

    def full_disk_explained(self) -> AbstractContextManager[None]:
        """Turn errors of a full disk into StorageFullError, for what others write into the folder."""
        return self._disk.explained()

    # Checkpoints: writing

    def next_save(self) -> int:
        """The number of a save that begins now, greater than those of all before; does not block."""
        return next(self._save_numbers)

    def write_checkpoint(
        self,
        record: CheckpointRecord,
        state: AdapterState,
        *,
        overwrite: bool,
        encrypt: Callable[[Path, Path], None] | None = None,
    ) -> CheckpointRecord:
        """Write and record a checkpoint; when this returns it survives `kill -9` and a power cut.

        Returns the record with its size. InvalidRequestError if its owner has too many bytes of checkpoints, or if the
        name exists and `overwrite` is false; with `overwrite`, the old checkpoint stays whole until the new one is in
        place. `encrypt`: replaces each file by an encrypted one.
        """
        check_checkpoint_name(record.name)
        record = replace(record, save_number=record.save_number or self.next_save())
        if not overwrite:  # before megabytes are written; `_commit` checks again
            _refuse_existing(self.get_checkpoint(record.training_run_id, record.kind, record.name))
        with self._disk.explained(), self._room_for(record, state):
            written = self._folders.write(record, state, self._belongs_to(record), encrypt)
            try:
                replaced = self._commit(written, overwrite)
            except (InvalidRequestError, StorageFullError, OSError):
                self._folders.remove(written)
                raise
            if replaced is not None:
                self.remove_folder(replaced)
            self._disk.fill_reserve()
        return written

    def _room_for(self, record: CheckpointRecord, state: AdapterState) -> AbstractContextManager[None]:
        run = self.get_training_run(record.training_run_id)
        session = None if run is None else self.get_session(run.session_id)
        owner = LOCAL_OWNER if session is None else session.owner
        autosave = record.kind == "weights" and record.name == AUTOSAVE
        return self.quota.room(record, adapter_bytes(state), owner, refuse=not autosave)

    def _belongs_to(self, record: CheckpointRecord) -> dict[str, object]:
        """What to record of the run and session of a checkpoint if they are lost with the database."""
        run = self.get_training_run(record.training_run_id)
        return {} if run is None else description_of(run, self.get_session(run.session_id))

    def _commit(self, record: CheckpointRecord, overwrite: bool) -> CheckpointRecord | None:
        """Commit `record`; return the checkpoint that it replaces, if its folder has to be removed now."""
        with self._writing:
            replaced = self._current(record)
            expired = replaced is not None and self._is_over(replaced)
            if not overwrite and not expired:
                _refuse_existing(replaced)
            if replaced is not None:
                self._folders.mark_removing(replaced)
            try:
                with self._transaction() as connection:
                    connection.execute(sa.delete(tables.checkpoints).where(_is(record)))
                    insert(connection, tables.checkpoints, record)
            except BaseException:
                if replaced is not None:
                    self._folders.unmark(replaced)
                raise
            self._folders.unmark(record)
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
        change = sa.update(tables.checkpoints).where(_is(record)).values(values)
        self._change_on_a_full_disk(lambda connection: connection.execute(change))
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
        into = session or self.get_session(run.session_id)
        copied = replace(source, training_run_id=run.training_run_id)
        with self.quota.room(copied, source.size_bytes, into.owner if into else LOCAL_OWNER):
            with self._folder_access:  # the source cannot be removed meanwhile
                current = self._require(source)
                record = replace(
                    current,
                    training_run_id=run.training_run_id,
                    created_at=run.created_at,
                    expires_at=expires_at,
                    public=False,
                    save_number=self.next_save(),
                )
                with self._disk.explained():
                    written = self._folders.link(record, current, description_of(run, into))
            with self._writing:
                try:
                    with self._transaction() as connection:
                        if session is not None:
                            insert(connection, tables.sessions, session)
                        insert(connection, tables.training_runs, run)
                        insert(connection, tables.checkpoints, written)
                        for copy in copies:
                            insert(connection, tables.copies, copy)
                except BaseException:
                    self._folders.remove(written)
                    raise
                self._folders.unmark(written)
            return written

    # Checkpoints: reading

    def get_checkpoint(self, training_run_id: str, kind: CheckpointKind, name: str) -> CheckpointRecord | None:
        """The checkpoint, or None."""
        found = self._checkpoints(_named(training_run_id, kind, name) & self._in_time())
        return found[0] if found else None

    def existing_checkpoint(
        self, run: str, kind: CheckpointKind, name: str, field: str, reader: str | None = None
    ) -> CheckpointRecord:
        """The checkpoint; NotFoundError naming `field` if there is none, with those of the owner `reader` if given."""
        record = self.get_checkpoint(run, kind, name)
        if record is None:
            raise self.no_checkpoint(run, kind, name, field, reader)
        return record

    def no_checkpoint(self, run: str, kind: CheckpointKind, name: str, field: str, reader: str | None) -> NotFoundError:
        """An error that says that the checkpoint does not exist, and lists the newest checkpoints of this kind that the
        owner `reader` has: those of the run, or of all runs if the run has none. A checkpoint of another owner gives
        the same error as one that does not exist."""
        rows: Sequence[Any] = ()
        total, table = 0, tables.checkpoints
        if reader is not None:
            own = self._in_time() & Owned(reader).checkpoints() & (table.c.kind == kind) & _USABLE
            for wanted in (own & (table.c.training_run_id == run), own):
                if not rows:
                    rows, total = self._page(table.c.save_number, NAMED_IN_ERRORS, 0, wanted)
        named = ", ".join(_checkpoint(row).tinker_path for row in rows)
        more = f" and {total - len(rows)} more" if total > len(rows) else ""
        known = f"; you have {named}{more}" if rows else ""
        return NotFoundError(f"{field}: there is no checkpoint tinker://{run}/{kind}/{name}{known}")

    def list_checkpoints(self, training_run_id: str) -> list[CheckpointRecord]:
        """The checkpoints of one run, newest first."""
        return self._checkpoints((tables.checkpoints.c.training_run_id == training_run_id) & self._in_time())

    def last_checkpoints(self, training_run_ids: Collection[str]) -> dict[str, dict[CheckpointKind, CheckpointRecord]]:
        """The last checkpoint of each kind that can be loaded, of each of these runs that has any."""
        table = tables.checkpoints
        last = sa.func.max(table.c.save_number).over(partition_by=(table.c.training_run_id, table.c.kind))
        wanted = table.c.training_run_id.in_(training_run_ids) & self._in_time() & _USABLE
        ranked = sa.select(table, last.label("last_of_its_kind")).where(wanted).subquery()
        query = sa.select(*(ranked.c[column.name] for column in table.c)).where(
            ranked.c.save_number == ranked.c.last_of_its_kind
        )
        found: dict[str, dict[CheckpointKind, CheckpointRecord]] = {}
        for row in self._rows(query.order_by(ranked.c.number)):
            record = _checkpoint(row)
            found.setdefault(record.training_run_id, {})[record.kind] = record
        return found

    def list_all_checkpoints(
        self, limit: int, offset: int, owned: Owned = EVERYTHING
    ) -> tuple[list[CheckpointRecord], int]:
        """Newest first, and the count of all."""
        rows, total = self._page(tables.checkpoints.c.save_number, limit, offset, self._in_time() & owned.checkpoints())
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

        NotFoundError if neither exists, InvalidRequestError if its files are not what was written, or not finite.
        """
        with self._folder_access:
            current, folder = self._folder_of(record)
            if optimizer and not current.has_optimizer:
                raise InvalidRequestError(
                    f"checkpoint {record.tinker_path} was saved without optimizer state; load its weights alone"
                )
            where = f"checkpoint {record.tinker_path}"
            check_files(folder, (WEIGHTS, CONFIG), where)
            if optimizer:
                try:
                    check_files(folder, (OPTIMIZER,), where)
                except InvalidRequestError as error:
                    raise InvalidRequestError(f"{error}, or load its weights alone") from None
            try:
                return read_adapter(folder, current.base_model, current.lora_config, optimizer=optimizer)
            except InvalidRequestError as error:
                raise InvalidRequestError(f"{where} cannot be loaded: {error}") from error
            except (OSError, ValueError, LookupError, SafetensorError) as error:  # without checksums, or unreadable
                raise InvalidRequestError(f"{where} cannot be read ({error}); it is in {folder}") from error

    def check_checkpoint(self, record: CheckpointRecord, field: str) -> None:
        """NotFoundError naming `field` if the folder is missing, InvalidRequestError if the weights are damaged or not
        finite."""
        with self._folder_access:
            current, folder = self._folder_of(record)
        self.refuse_unusable(current, field)
        files = (WEIGHTS, CONFIG, f"{WEIGHTS}{AGE}", f"{CONFIG}{AGE}")
        check_files(folder, files, f"{field}: {record.tinker_path}")

    def _folder_of(self, record: CheckpointRecord) -> tuple[CheckpointRecord, Path]:
        """The newest checkpoint of the record's name or else the record itself, and its folder, which exists."""
        current = self._current(record)
        folder = self._folders.path(current or record)
        if not folder.exists():
            gone = "does not exist any more" if current is None else f"is missing: put its folder {folder} back"
            raise NotFoundError(f"checkpoint {record.tinker_path} {gone}")
        return current or record, folder

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
            self._forget([current])
        return current

    def forget_expired(self) -> list[CheckpointRecord]:
        """`forget_checkpoint` of all that have expired; their folders stay until `remove_folder`."""
        if not self._clock.is_steady():
            return []
        with self._writing:
            expired = self._checkpoints(tables.checkpoints.c.expires_at <= self._clock.now())
            self._forget(expired)
            replaced, self._replaced_expired = self._replaced_expired, []
        return [*expired, *replaced]

    def delete_checkpoint(self, record: CheckpointRecord) -> None:
        """Delete a checkpoint that nothing uses, with its folder; NotFoundError if there is none."""
        self.remove_folder(self.forget_checkpoint(record))

    def remove_folder(self, record: CheckpointRecord) -> None:
        """Delete the folder of a forgotten checkpoint, if it exists."""
        with self._folder_access:
            self._folders.remove(record)
        self.quota.removed(record)
        self._disk.fill_reserve()

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
        return expires_at.is_(None) | (expires_at > self._clock.now())

    def _is_over(self, record: CheckpointRecord) -> bool:
        return record.expires_at is not None and record.expires_at <= self._clock.now()

    def _checkpoints(
        self, condition: sa.ColumnElement[bool], first: sa.ColumnElement[Any] | None = None
    ) -> list[CheckpointRecord]:
        """Those with the lowest `first` first, or else the newest."""
        table = tables.checkpoints
        query = sa.select(table).where(condition).order_by(table.c.save_number.desc() if first is None else first)
        return [_checkpoint(row) for row in self._rows(query)]

    def _forget(self, records: Sequence[CheckpointRecord]) -> None:
        """Delete these records; until then, marks on their folders have no effect."""
        if not records:
            return

        def forget(connection: sa.Connection) -> None:
            for record in records:
                self._folders.mark_removing(record)
                connection.execute(sa.delete(tables.checkpoints).where(_is(record)))

        self._change_on_a_full_disk(forget)
        for record in records:
            self.quota.deleted(record)


def _checkpoint(row: dict[str, Any]) -> CheckpointRecord:
    return CheckpointRecord(**{**row, "lora_config": LoraConfig.model_validate(row["lora_config"])})


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


def _written(value: Any) -> int:
    """Bytes of metadata or tags in the database."""
    return len(json.dumps(dict(value) if isinstance(value, Mapping) else list(value)))
