"""Checkpoint names and their paths on disk. Everything from a client is checked before it becomes part of a path."""

import re
from typing import get_args
from urllib.parse import quote

from tinker_local.backend.storage.records import CheckpointKind
from tinker_local.types import InvalidRequestError

MAX_NAME_LENGTH = 128
MAX_PATH_LENGTH = 512
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")
AUTOSAVE = "autosave"
"""The name under `weights` that only the server gives."""
KINDS: tuple[CheckpointKind, ...] = get_args(CheckpointKind)


def check_checkpoint_name(name: str, field: str = "name") -> str:
    """`name`, if it is valid; otherwise InvalidRequestError with `field` and the rule."""
    if not _NAME.fullmatch(name) or len(name) > MAX_NAME_LENGTH:
        shown = name if len(name) <= MAX_NAME_LENGTH else f"{name[:40]}… ({len(name)} characters)"
        raise InvalidRequestError(
            f"{field}: {shown!r} cannot name a checkpoint; use 1 to {MAX_NAME_LENGTH} letters (a to z), digits, "
            "'.', '_' or '-', not '.' at the start"
        )
    return name


def parse_tinker_path(path: str, field: str = "path") -> tuple[str, CheckpointKind, str]:
    """Training run id, kind and name of `tinker://RUN/KIND/NAME`; InvalidRequestError with `field` for other paths."""
    if len(path) > MAX_PATH_LENGTH:
        raise InvalidRequestError(
            f"{field}: a path of {len(path)} characters, {path[:40]!r}…, is longer than {MAX_PATH_LENGTH}"
        )
    parts = path.removeprefix("tinker://").split("/")
    if not path.startswith("tinker://") or len(parts) != 3 or not parts[0]:
        raise InvalidRequestError(f"{field}: {path!r} is not of the form tinker://RUN/KIND/NAME")
    run, kind, name = parts
    if kind not in KINDS:
        raise InvalidRequestError(f"{field}: unknown kind {kind!r} in {path!r}; known are {', '.join(KINDS)}")
    return run, kind, check_checkpoint_name(name, field)


def safe_segment(text: str) -> str:
    """`text` as one path segment: characters except letters, digits, '_', '-', '~' and inner '.' become %XX.

    Different texts give different segments. ValueError for an empty text.
    """
    if not text:
        raise ValueError("an empty text names no folder")
    segment = quote(text, safe="")
    return f"%2E{segment[1:]}" if segment.startswith(".") else segment
