"""`checkpoint.json`'s checksums of a checkpoint's files: written with them, compared whenever they are loaded."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tinker_local.types import InvalidRequestError

DESCRIPTION = "checkpoint.json"
CHECKSUMS = "files"
"""The field of `DESCRIPTION`: of each file `{"size_bytes", "sha256"}`. Older checkpoints do not have it."""


def checksums_of(files: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """Size and SHA-256 of each file by its name. Reads the files in a thread's time: hashing does not hold the GIL."""
    return {file.name: {"size_bytes": file.stat().st_size, "sha256": _sha256(file)} for file in files}


def recorded_checksums(folder: Path) -> Mapping[str, Mapping[str, Any]]:
    """What `checkpoint.json` of `folder` says of its files; empty for an older checkpoint. ValueError if it cannot be
    read."""
    try:
        description = json.loads((folder / DESCRIPTION).read_text("utf-8"))
    except FileNotFoundError:
        return {}
    found = description.get(CHECKSUMS, {}) if isinstance(description, dict) else None
    if not isinstance(found, dict) or not all(isinstance(each, dict) for each in found.values()):
        raise ValueError("it is not a description of a checkpoint")
    return found


def check_files(folder: Path, names: Iterable[str], where: str) -> None:
    """InvalidRequestError if one of these files is not what was written; those without a checksum pass.

    Compares all sizes first, then reads the files once.
    """
    try:
        recorded = recorded_checksums(folder)
    except ValueError as error:
        raise InvalidRequestError(f"{where} is damaged: {DESCRIPTION} in {folder} cannot be read ({error})") from None
    known = {name: recorded[name] for name in names if name in recorded}
    for name, each in known.items():
        size = (folder / name).stat().st_size if (folder / name).is_file() else 0
        if size != each.get("size_bytes"):
            raise _damaged(folder, name, where, f"has {size} bytes and was written with {each.get('size_bytes')}")
    for name, each in known.items():
        if _sha256(folder / name) != each.get("sha256"):
            raise _damaged(folder, name, where, "does not have the SHA-256 that it was written with")


def _damaged(folder: Path, name: str, where: str, how: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{where} is damaged: {name} {how}; put {folder} back from a backup, or use another checkpoint"
    )


def _sha256(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
