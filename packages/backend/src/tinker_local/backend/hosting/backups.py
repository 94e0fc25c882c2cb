"""Backups: copies of a data folder's database and checkpoints, made while a server uses the folder, and put back.

A backup has the layout of a data folder. Every checkpoint in it is compared with its checksums.
"""

import contextlib
import itertools
import shutil
import sqlite3
import stat
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from tinker_local.backend.adapters.checksums import DESCRIPTION, check_files
from tinker_local.backend.storage.checkpoint_folders import FINISHED, content_of, folder_of
from tinker_local.backend.storage.data_folder import FolderLock, fsync_path, make_durable_folder
from tinker_local.backend.storage.store import CHECKPOINTS, DATABASE
from tinker_local.backend.storage.tables import EPOCH
from tinker_local.types import InvalidRequestError

ROUNDS = 20
"""How often a backup looks again for checkpoints that were replaced while it copied others."""


@dataclass(slots=True)
class Copied:
    """What was copied. `damaged`: checkpoints that are not what was written, and why; they are copied as they are.
    `missing`: those that are recorded and have no folder."""

    checkpoints: int = 0
    size_bytes: int = 0
    damaged: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


def back_up(data_dir: Path, to: Path) -> Copied:
    """Copy the database and all checkpoints of `data_dir`, which a server may be using, to `to`.

    `to` is new, empty, or an earlier backup: of that, checkpoints that still exist are not copied again, and others
    are deleted at the end. What was acknowledged before this call is in the backup, and what is copied is on disk when
    it returns. ValueError if `data_dir` has no database or `to` is something else.
    """
    data_dir, to = data_dir.absolute(), to.absolute()
    if not (data_dir / DATABASE).is_file():
        raise ValueError(f"{data_dir} has no {DATABASE}; is it the data folder of a server?")
    if data_dir.resolve() == to.resolve():
        raise ValueError(f"{to} is the data folder itself")
    if to.exists() and any(to.iterdir()) and not (to / DATABASE).is_file() and not (to / CHECKPOINTS).is_dir():
        raise ValueError(f"{to} is neither empty nor an earlier backup")
    make_durable_folder(to, mode=0o700)
    with _locked(to):
        unfinished = to / f".unfinished-{DATABASE}"
        copied, vanished = Copied(), None
        for _ in range(ROUNDS):
            _snapshot(data_dir / DATABASE, unfinished)
            folders = _recorded_folders(unfinished)
            before, vanished = vanished, {f for f in folders if not _copy(data_dir, to, f, copied)}
            if vanished in (set(), before):  # what vanished was replaced, unless it is still recorded
                break
        copied.missing = sorted(str(folder) for folder in vanished or ())
        _put_in_place(unfinished, to / DATABASE)
        for folder in _finished_folders(to) - folders:
            shutil.rmtree(to / CHECKPOINTS / folder)
    return copied


def restore(backup: Path, data_dir: Path) -> Copied:
    """Copy a backup into `data_dir`, which has neither database nor checkpoints yet. ValueError if it has, or if
    `backup` is not one, or has links or special files; FolderInUseError if a server uses `data_dir`."""
    backup, data_dir = backup.absolute(), data_dir.absolute()
    if not (backup / DATABASE).is_file():
        raise ValueError(f"{backup} has no {DATABASE}; is it a backup?")
    _refuse_links(backup)
    make_durable_folder(data_dir, mode=0o700)
    with _locked(data_dir):
        if (data_dir / DATABASE).exists() or _finished_folders(data_dir):
            raise ValueError(
                f"{data_dir} holds a database or checkpoints; move them away, or restore into a new folder"
            )
        unfinished = data_dir / f".unfinished-{DATABASE}"
        _snapshot(backup / DATABASE, unfinished)
        copied = Copied()
        recorded = _recorded_folders(unfinished)
        copied.missing = sorted(str(f) for f in recorded if not _copy(backup, data_dir, f, copied))
        _put_in_place(unfinished, data_dir / DATABASE)  # last: without it, this can be repeated
    return copied


def _refuse_links(backup: Path) -> None:
    """ValueError if something of `backup` is neither a folder nor a plain file: a link may lead to any file that its
    maker could not read, and a device or a pipe never ends. Hard links, which tools that make snapshots use, have the
    content themselves, which is copied into new files."""
    found = [path for path in backup.iterdir() if path.name == CHECKPOINTS or path.name.startswith(DATABASE)]
    for path in itertools.chain(found, (backup / CHECKPOINTS).rglob("*")):  # which looks into no link
        mode = path.lstat().st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            kind = "a link, which may lead to any file of this machine" if stat.S_ISLNK(mode) else "not a plain file"
            raise ValueError(f"{path} is {kind}; a backup has folders and plain files alone, so nothing was restored")


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    lock = FolderLock(folder)
    try:
        yield
    finally:
        lock.release()


def _snapshot(database: Path, to: Path) -> None:
    """Copy a database as one file, in the state of one moment. RuntimeError if it is damaged."""
    to.unlink(missing_ok=True)
    try:
        with (
            contextlib.closing(sqlite3.connect(database)) as source,
            contextlib.closing(sqlite3.connect(to)) as target,
        ):
            source.backup(target)
            target.execute("PRAGMA journal_mode = DELETE")
            found = " ".join(str(target.execute("PRAGMA quick_check(1)").fetchone()[0]).split())
    except sqlite3.DatabaseError as error:
        found = str(error)
    if found != "ok":
        raise RuntimeError(f"the database {database} is damaged ({found})")


def _recorded_folders(database: Path) -> set[Path]:
    """The folders of all recorded checkpoints, relative to the one for checkpoints."""
    with contextlib.closing(sqlite3.connect(database)) as connection:
        rows = connection.execute("SELECT training_run_id, kind, name, created_at FROM checkpoints").fetchall()
    return {folder_of(run, kind, name, EPOCH + timedelta(microseconds=time)) for run, kind, name, time in rows}


def _finished_folders(data_dir: Path) -> set[Path]:
    root = data_dir / CHECKPOINTS
    return {path.relative_to(root) for path in root.glob("*/*/*") if FINISHED.fullmatch(path.name)}


def _copy(source: Path, to: Path, folder: Path, copied: Copied) -> bool:
    """Copy a checkpoint's folder, unless it is there; false if the source does not have it (any more)."""
    given, target = source / CHECKPOINTS / folder, to / CHECKPOINTS / folder
    if target.is_dir() or not given.is_dir():
        return target.is_dir()
    unfinished = target.with_name(f".unfinished-{uuid.uuid4().hex}")
    make_durable_folder(unfinished)
    try:
        for file in [*content_of(given), *given.glob(DESCRIPTION)]:
            shutil.copyfile(file, unfinished / file.name)
            fsync_path(unfinished / file.name)
        if not given.is_dir():  # it was being deleted, and what was listed may be a part of it
            raise FileNotFoundError(given)
        try:
            check_files(unfinished, [file.name for file in unfinished.iterdir()], str(folder))
        except InvalidRequestError as error:
            copied.damaged.append(str(error))
        fsync_path(unfinished)
        unfinished.rename(target)
    except FileNotFoundError:
        shutil.rmtree(unfinished)
        return False
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    fsync_path(target.parent)
    copied.checkpoints += 1
    copied.size_bytes += sum(file.stat().st_size for file in target.iterdir())
    return True


def _put_in_place(unfinished: Path, database: Path) -> None:
    fsync_path(unfinished)
    for end in ("-wal", "-shm"):  # of an earlier one
        database.with_name(f"{database.name}{end}").unlink(missing_ok=True)
    unfinished.replace(database)
    fsync_path(database.parent)
