"""Checkpoint folders: `ROOT/<run>/<kind>/<name>@<time>/`, written whole or not at all.

The time in the name makes every write a new folder. An overwritten checkpoint therefore stays whole until its record
points to the new folder, and an engine that caches by path never serves old weights.

A file in a folder marks what a kill must not leave behind: `.unfinished` until the record is committed, `.removing`
before the record is deleted. Only marked folders without a record are ever deleted at a start. `checkpoint.json` says
what a folder is, in case its record is lost.
"""

import errno
import json
import logging
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from tinker_local.backend.adapters.adapter import AdapterState
from tinker_local.backend.adapters.adapter_files import AGE, CONFIG, OPTIMIZER, WEIGHTS, write_adapter
from tinker_local.backend.adapters.checksums import CHECKSUMS, DESCRIPTION, checksums_of, recorded_checksums
from tinker_local.backend.storage.data_folder import fsync_path, make_durable_folder
from tinker_local.backend.storage.names import check_checkpoint_name, parse_tinker_path, safe_segment
from tinker_local.backend.storage.records import CheckpointRecord
from tinker_local.types import LoraConfig

log = logging.getLogger(__name__)

UNFINISHED, REMOVING = ".unfinished", ".removing"
ASIDE = ".aside-"
_LEFTOVER = re.compile(r"\.(unfinished|removing)-[0-9a-f]{32}")
FINISHED = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*@\d{8}T\d{6}\.\d{6}")


class CheckpointFolders:
    """Writes and removes checkpoint folders in `root`, which it creates."""

    def __init__(self, root: Path) -> None:
        self.root = root
        make_durable_folder(root)

    def path(self, record: CheckpointRecord) -> Path:
        """The folder of `record`, computed from the record alone."""
        return self.root / folder_of(record.training_run_id, record.kind, record.name, record.created_at)

    def write(
        self,
        record: CheckpointRecord,
        state: AdapterState,
        belongs_to: Mapping[str, object] | None = None,
        encrypt: Callable[[Path, Path], None] | None = None,
    ) -> CheckpointRecord:
        """Write `state`; when this returns, its folder is complete, in place and on disk, and marked as unfinished.

        `belongs_to` is added to the description: what to record of its run and session if they are lost, too.
        `encrypt`: replaces each file by an encrypted one. Returns the record with its size, whether it has an optimizer
        state, and its `created_at`, which is some microseconds later if another write used the same time.
        """

        def fill(folder: Path) -> dict[str, Any]:
            # A trainer knows only the first name of its base model; the folder records the one that the run used.
            write_adapter(folder, replace(state, base_model=record.base_model))
            if encrypt is not None:
                for file in list(folder.iterdir()):
                    encrypt(file, file.with_name(f"{file.name}{AGE}"))
                    file.unlink()
            return checksums_of(folder.iterdir())

        return self._make(replace(record, has_optimizer=state.optimizer is not None, unusable=""), fill, belongs_to)

    def link(
        self, record: CheckpointRecord, source: CheckpointRecord, belongs_to: Mapping[str, object] | None = None
    ) -> CheckpointRecord:
        """Like `write`, with the content of `source`; the two share files on disk if the file system supports it.

        Sharing is safe because checkpoint files never change once they are written.
        """

        def fill(folder: Path) -> Mapping[str, Any]:
            for file in content_of(self.path(source)):
                _link(file, folder / file.name)
            return recorded_checksums(self.path(source))

        return self._make(record, fill, belongs_to)

    def _make(
        self,
        record: CheckpointRecord,
        fill: Callable[[Path], Mapping[str, Any]],
        belongs_to: Mapping[str, object] | None,
    ) -> CheckpointRecord:
        """`fill` writes the files and returns their checksums."""
        parent = self.path(record).parent
        make_durable_folder(parent)
        unfinished = parent / f".unfinished-{uuid.uuid4().hex}"
        unfinished.mkdir()
        try:
            checksums = fill(unfinished)
            record = replace(record, size_bytes=size_of(unfinished))
            described = _describe(record) | dict(belongs_to or {}) | ({CHECKSUMS: dict(checksums)} if checksums else {})
            (unfinished / DESCRIPTION).write_text(json.dumps(described, indent=2, default=datetime.isoformat))
            (unfinished / UNFINISHED).touch()
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

    def mark_removing(self, record: CheckpointRecord) -> None:
        """Let the next start delete the folder, if it exists, unless it has a record. After a power cut, which may undo
        the mark, it is found again or put aside."""
        folder = self.path(record)
        if folder.is_dir():
            (folder / REMOVING).touch()

    def unmark(self, record: CheckpointRecord) -> None:
        """Let the folder be found again if its record is lost."""
        folder = self.path(record)
        marks = [folder / mark for mark in (UNFINISHED, REMOVING) if (folder / mark).exists()]
        for mark in marks:
            mark.unlink()
        if marks:
            fsync_path(folder)

    def remove(self, record: CheckpointRecord) -> None:
        """Delete the folder of `record`, if it exists."""
        _remove_folder(self.path(record))

    def put_aside(self, record: CheckpointRecord) -> Path:
        """Rename the folder of `record`, so that no start takes it for a checkpoint; its new path."""
        folder = self.path(record)
        aside = folder.with_name(f"{ASIDE}{folder.name}")
        folder.rename(aside)
        fsync_path(folder.parent)
        return aside

    def remove_leftovers(self) -> None:
        """Delete folders that a killed process was still writing or already deleting, and empty ones above them."""
        for path in self._all():
            if _LEFTOVER.fullmatch(path.name):
                _remove_folder(path)
        for folder in [*self.root.glob("*/*"), *self.root.glob("*")]:
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()

    def unrecorded(self, records: Mapping[Path, CheckpointRecord]) -> tuple[list[CheckpointRecord], list[str]]:
        """Complete checkpoints that have a folder and none of the `records`, by their folders; and what is left alone:
        paths, and why it is not a checkpoint. Deletes marked folders."""
        found, strange = [], []
        for path in self._all():
            if path in records or path.name.startswith(ASIDE):
                continue
            if not FINISHED.fullmatch(path.name) or not path.is_dir():
                strange.append(f"{path} (not a name that this server gives)")
            elif any((path / mark).exists() for mark in (UNFINISHED, REMOVING)):
                log.info("removing %s, which was not finished, or being removed", path)
                _remove_folder(path)
            else:
                try:
                    found.append(self._described(path))
                except Exception as error:  # a file may hold anything, and the server starts all the same
                    strange.append(f"{path} ({type(error).__name__}: {error})")
        return found, strange

    def _described(self, folder: Path) -> CheckpointRecord:
        """The record that `folder` describes. It is private and does not expire: its record may have been changed."""
        links = [file.name for file in (folder, *folder.iterdir()) if file.is_symlink()]
        if links:
            raise ValueError(f"{' and '.join(sorted(links))} is a link, which may lead to any file of this machine")
        given = json.loads((folder / DESCRIPTION).read_text("utf-8"))
        json.dumps(given, ensure_ascii=False, allow_nan=False).encode("utf-8")  # as clients will get it
        run, kind, name = parse_tinker_path(given["tinker_path"], DESCRIPTION)
        record = CheckpointRecord(
            training_run_id=run,
            kind=kind,
            name=name,
            base_model=str(given["base_model"]),
            lora_config=LoraConfig.model_validate(given["lora_config"]),
            created_at=datetime.fromisoformat(given["created_at"]),
            size_bytes=int(given["size_bytes"]),
            has_optimizer=bool(given["has_optimizer"]),
            user_metadata=dict(given["user_metadata"]),
            save_number=_save_number(given.get("save_number")),
            base_precision=precision_in(given),
        )
        files = (WEIGHTS, CONFIG, *([OPTIMIZER] if record.has_optimizer else []))
        # A write that another one of the same microsecond preceded has a later time in its name.
        begin, _, time = folder.name.rpartition("@")
        when = datetime.strptime(time, "%Y%m%dT%H%M%S.%f").replace(tzinfo=UTC)
        record = replace(record, created_at=when)
        if begin != name or self.path(record) != folder:
            raise ValueError(f"{DESCRIPTION} describes {record.tinker_path}")
        missing = [file for file in files if not any((folder / f"{file}{end}").is_file() for end in ("", AGE))]
        if missing:
            raise ValueError(f"it has no {' and no '.join(missing)}")
        if size_of(folder) != record.size_bytes:
            raise ValueError(f"it has {size_of(folder)} bytes and was written with {record.size_bytes}")
        return record

    def belongs_to(self, record: CheckpointRecord, name: str) -> dict[str, Any]:
        """What the folder of `record` says of its run or session; empty for an older checkpoint."""
        given = json.loads((self.path(record) / DESCRIPTION).read_text("utf-8")).get(name)
        return dict(given) if isinstance(given, dict) else {}

    def _all(self) -> Iterator[Path]:
        return self.root.glob("*/*/*")


def folder_of(training_run_id: str, kind: str, name: str, created_at: datetime) -> Path:
    """A checkpoint's folder, relative to the one of all checkpoints."""
    time = created_at.astimezone(UTC).strftime("%Y%m%dT%H%M%S.%f")
    return Path(safe_segment(training_run_id), safe_segment(kind), f"{check_checkpoint_name(name)}@{time}")


def content_of(folder: Path) -> list[Path]:
    """The files of a checkpoint's adapter: neither marks nor description."""
    return [file for file in folder.iterdir() if file.name not in (DESCRIPTION, UNFINISHED, REMOVING)]


def size_of(folder: Path) -> int:
    """Bytes of `content_of`."""
    return sum(file.stat().st_size for file in content_of(folder))


def refuse_without_folders(root: Path, records: int) -> None:
    """RuntimeError if there are records and no folder for checkpoints at all: it may not be mounted yet."""
    if records and not root.exists():
        raise RuntimeError(
            f"the database knows {records} checkpoints, but {root} does not exist; "
            "put it back, or make it an empty folder to start without them"
        )


def _describe(record: CheckpointRecord) -> dict[str, object]:
    """What a folder is, for people, and for a server that has lost the record."""
    return {
        **asdict(record),
        "tinker_path": record.tinker_path,
        "lora_config": record.lora_config.model_dump(),
        "user_metadata": dict(record.user_metadata),
    }


def precision_in(described: Mapping[str, Any]) -> str | None:
    """In what the base model of a description was; None: dense, or an older server wrote it. ValueError if it is not a
    word: a file may hold anything."""
    given = described.get("base_precision")
    if given is not None and not (isinstance(given, str) and re.fullmatch(r"[a-z0-9_.+-]{1,60}", given)):
        raise ValueError(f"base_precision is {given!r}, expected a word such as int4-curved")
    return given


def _save_number(given: object) -> int:
    """0 if it is none: an older server gave none, and a file may hold anything."""
    return given if isinstance(given, int) and not isinstance(given, bool) and 0 < given < 2**62 else 0


def _link(file: Path, target: Path) -> None:
    """Hard-link `file` as `target`; copy it where the file system allows no (further) link."""
    try:
        target.hardlink_to(file)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EMLINK, errno.EXDEV, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        shutil.copyfile(file, target)


def _remove_folder(folder: Path) -> None:
    """Rename the folder, then delete it: a half-deleted folder under its own name would let a rename succeed."""
    removing = folder.with_name(f".removing-{uuid.uuid4().hex}")
    try:
        folder.rename(removing)
    except FileNotFoundError:
        return
    shutil.rmtree(removing)
