"""What a start does where records and checkpoint folders disagree: it deletes neither, and says so."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import datetime
from typing import Any, TypeVar

from tinker_local.backend.adapters.adapter_files import WEIGHTS
from tinker_local.backend.storage.checkpoint_folders import REMOVING, CheckpointFolders
from tinker_local.backend.storage.metadata import plain_fields
from tinker_local.backend.storage.records import CheckpointRecord, SessionRecord, TrainingRunRecord

Described = TypeVar("Described", SessionRecord, TrainingRunRecord)

NAMED = 20
"""How many names of each kind a warning has."""


@dataclass(frozen=True, slots=True)
class Disagreement:
    """What was found, and what is to be done about it.

    Attributes
    ----------
    adopted: complete folders without a record that get one, in place of an older one of that name.
    superseded: recorded checkpoints whose folder exists and that an adopted one of their name replaces.
    aside: complete folders without a record that are older than the checkpoint of their name.
    missing: recorded checkpoints without a folder.
    strange: what is in the place of a checkpoint folder, and why it is left alone.
    """

    adopted: Sequence[CheckpointRecord]
    superseded: Sequence[CheckpointRecord]
    aside: Sequence[CheckpointRecord]
    missing: Sequence[CheckpointRecord]
    strange: Sequence[str]

    def warning(self, folders: CheckpointFolders) -> str | None:
        """One sentence with counts and names; None if there is nothing to tell."""
        aside = [str(folders.path(record)) for record in (*self.superseded, *self.aside)]
        parts = [
            _part(
                [record.tinker_path for record in self.adopted],
                "without a record: adopted, private and without expiry",
            ),
            _part(
                [record.tinker_path for record in self.missing],
                "recorded without a folder: kept and marked as missing until the folder is put back",
            ),
            _part(aside, "older than another one of the same name: put aside"),
            _part(self.strange, "not a checkpoint of this server: left alone"),
        ]
        told = "; ".join(part for part in parts if part)
        return f"the database and {folders.root} disagree, nothing was deleted: {told}" if told else None


def _part(names: Sequence[str], what: str) -> str:
    more = f", and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"{len(names)} {what} ({', '.join(names[:NAMED])}{more})" if names else ""


def description_of(run: TrainingRunRecord, session: SessionRecord | None) -> dict[str, object]:
    """What `checkpoint.json` says of the run and session of a checkpoint, to record them again if they are lost."""
    found: dict[str, object] = {"training_run": plain_fields(run)}
    return found if session is None else found | {"session": plain_fields(session)}


def as_described(record: Described, given: Mapping[str, Any]) -> Described:
    """`record` with what a description says of it: names, labels and times, not how it ended."""
    kinds = {
        "user_metadata": dict,
        "tags": list,
        "display_name": str,
        "copied_from": str,
        "owner": str,
        "project_id": str,
        "base_precision": str,
    }
    known = {field.name for field in fields(record)} & given.keys()
    values = {name: given[name] for name, kind in kinds.items() if name in known and isinstance(given[name], kind)}
    if isinstance(values.get("tags"), list):
        values["tags"] = tuple(values["tags"])
    for name in ("created_at", "last_request_at"):
        if name in known and isinstance(given[name], str):
            values[name] = _time(given[name], getattr(record, name))
    return replace(record, **values)


def _time(text: str, otherwise: datetime) -> datetime:
    """The time that `text` is; `otherwise` if it is none with a time zone."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return otherwise
    return otherwise if found.tzinfo is None else found


def _is_newer(one: CheckpointRecord, other: CheckpointRecord) -> bool:
    """By their numbers, or if an older server wrote one of them, by their times."""
    if one.save_number and other.save_number:
        return one.save_number > other.save_number
    return one.created_at > other.created_at


def compare(folders: CheckpointFolders, records: Iterable[CheckpointRecord]) -> Disagreement:
    """Compare all records with all folders. Deletes what a kill left marked as unfinished or as being removed."""
    folders.remove_leftovers()
    by_folder = {folders.path(record): record for record in records}
    by_path = {record.tinker_path: record for record in by_folder.values()}
    there = {record.tinker_path for folder, record in by_folder.items() if (folder / WEIGHTS).is_file()}
    found, strange = folders.unrecorded(by_folder)
    newest: dict[str, CheckpointRecord] = {}
    aside = []
    for record in sorted(found, key=lambda each: each.created_at):
        known = by_path.get(record.tinker_path)
        if known is not None and _is_newer(known, record):
            aside.append(record)
            continue
        if (other := newest.get(record.tinker_path)) is not None:
            other, record = (record, other) if _is_newer(other, record) else (other, record)
            aside.append(other)
        newest[record.tinker_path] = record
    superseded = []
    for record in by_path.values():
        if record.tinker_path in there and record.tinker_path in newest:
            if (folders.path(record) / REMOVING).exists():
                folders.remove(record)
            else:
                superseded.append(record)
        elif record.tinker_path in there:
            folders.unmark(record)
    missing = [r for r in by_path.values() if r.tinker_path not in there and r.tinker_path not in newest]
    return Disagreement(list(newest.values()), superseded, aside, missing, strange)
