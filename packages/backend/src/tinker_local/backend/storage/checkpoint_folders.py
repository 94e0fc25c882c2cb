"""Checkpoint folders: `ROOT/<run>/<kind>/<name>@<time>/`, written whole or not at all.

The time in the name makes every write a new folder. An overwritten checkpoint therefore stays whole until its record
points to the new folder, and an engine that caches by path never serves old weights. Only the records in the database
decide which folders are checkpoints.
"""

import errno
import json
import logging
import re
import shutil
import uuid
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from tinker_local.backend.storage.adapter_files import WEIGHTS, write_adapter
from tinker_local.backend.storage.data_folder import fsync_path, make_durable_folder
from tinker_local.backend.storage.names import check_checkpoint_name, safe_segment
from tinker_local.backend.storage.records import CheckpointRecord
from tinker_local.backend.training.trainer import AdapterState

log = logging.getLogger(__name__)

METADATA = "checkpoint.json"
_UNFINISHED = re.compile(r"\.(unfinished|removing)-[0-9a-f]{32}")
_FINISHED = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*@\d{8}T\d{6}\.\d{6}")


class CheckpointFolders:
    """Writes and removes checkpoint folders in `root`, which it creates."""

    def __init__(self, root: Path) -> None:
        self.root = root
        make_durable_folder(root)

    def path(self, record: CheckpointRecord) -> Path:
        """The folder of `record`, computed from the record alone."""
        time = record.created_at.astimezone(UTC).strftime("%Y%m%dT%H%M%S.%f")
        name = check_checkpoint_name(record.name)
        return self.root / safe_segment(record.training_run_id) / safe_segment(record.kind) / f"{name}@{time}"

    def write(self, record: CheckpointRecord, state: AdapterState) -> CheckpointRecord:
        """Write `state`; when this returns, its folder is complete, in place and on disk.

        Returns the record with its size, whether it has an optimizer state, and its `created_at`, which is some
        microseconds later if another write used the same time.
        """

        def fill(folder: Path) -> None:
            # A trainer knows only the first name of its base model; the folder records the one that the run used.
            write_adapter(folder, replace(state, base_model=record.base_model))

        return self._make(replace(record, has_optimizer=state.optimizer is not None), fill)

    def link(self, record: CheckpointRecord, source: CheckpointRecord) -> CheckpointRecord:
        """Like `write`, with the content of `source`; the two share files on disk if the file system supports it.

        Sharing is safe because checkpoint files never change once they are written.
        """

        def fill(folder: Path) -> None:
            for file in self.path(source).iterdir():
                if file.name != METADATA:
                    _link(file, folder / file.name)

        return self._make(record, fill)

    def _make(self, record: CheckpointRecord, fill: Callable[[Path], None]) -> CheckpointRecord:
        parent = self.path(record).parent
        make_durable_folder(parent)
        unfinished = parent / f".unfinished-{uuid.uuid4().hex}"
        unfinished.mkdir()
        try:
            fill(unfinished)
            record = replace(record, size_bytes=_size(unfinished))
            (unfinished / METADATA).write_text(json.dumps(_describe(record), indent=2))
            for file in unfinished.iterdir():
                fsync_path(file)
            fsync_path(unfinished)
            record = self._put_in_place(unfinished, record)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
        fsync_path(parent)
        return record

    def _put_in_place(self, unfinished: Path, record: CheckpointRecord) -> CheckpointRecord:
        while True:
            try:
                # Renaming onto a non-empty folder fails, so two writers can never take the same name.
                unfinished.rename(self.path(record))
                return record
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                record = replace(record, created_at=record.created_at + timedelta(microseconds=1))

    def remove(self, record: CheckpointRecord) -> None:
        """Delete the folder of `record`, if it exists."""
        _remove_folder(self.path(record))

    def sweep(self, keep: Collection[Path]) -> None:
        """Delete what a killed process left behind: unfinished folders, and finished ones that are not in `keep`.

        Any other file or folder is left alone, with a warning.
        """
        for path in self.root.glob("*/*/*"):
            if path in keep:
                continue
            if _UNFINISHED.fullmatch(path.name) or _FINISHED.fullmatch(path.name):
                log.info("removing %s, which belongs to no checkpoint", path)
                _remove_folder(path)
            else:
                log.warning("%s is not a checkpoint folder of this server; it is left alone", path)
        for folder in [*self.root.glob("*/*"), *self.root.glob("*")]:
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()


def refuse_halves(root: Path, new_database: bool, records: Sequence[CheckpointRecord]) -> None:
    """RuntimeError if the database or the checkpoints are missing, because recovery would delete the other half."""
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


def _describe(record: CheckpointRecord) -> dict[str, object]:
    """A description for people; the server itself only reads the database."""
    times: dict[str, datetime | None] = {"created_at": record.created_at, "expires_at": record.expires_at}
    return {
        **asdict(record),
        "tinker_path": record.tinker_path,
        "lora_config": record.lora_config.model_dump(),
        "user_metadata": dict(record.user_metadata),
        **{name: time and time.isoformat() for name, time in times.items()},
    }


def _link(file: Path, target: Path) -> None:
    """Hard-link `file` as `target`; copy it where the file system allows no (further) link."""
    try:
        target.hardlink_to(file)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EMLINK, errno.EXDEV, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        shutil.copyfile(file, target)


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def _remove_folder(folder: Path) -> None:
    """Rename the folder, then delete it: a half-deleted folder under its own name would let a rename succeed."""
    removing = folder.with_name(f".removing-{uuid.uuid4().hex}")
    try:
        folder.rename(removing)
    except FileNotFoundError:
        return
    shutil.rmtree(removing)
