"""Identifiers: `{session}:train:{n}`, `{session}:sample:{n}`, `tinker://{run}/{kind}/{name}`, request ids."""

import re
from typing import get_args

from tinker_local.backend.storage.interface import CheckpointKind
from tinker_local.types import InvalidRequestError

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")


def model_id(session_id: str, model_seq_id: int) -> str:
    """The id of a model, which is also its training run's; the SDK computes it by itself."""
    return f"{session_id}:train:{model_seq_id}"


def sampling_session_id(session_id: str, seq_id: int) -> str:
    return f"{session_id}:sample:{seq_id}"


def request_id(owner: str, seq_id: int | str) -> str:
    """The request id of operation `seq_id` of a model or sampling session."""
    return f"{owner}:{seq_id}"


def owner_of(request: str) -> str:
    """The model or sampling session of a request id."""
    return request.rpartition(":")[0]


def check_name(name: str, field: str) -> str:
    """`name` if it can name a checkpoint; InvalidRequestError otherwise."""
    if not _NAME.fullmatch(name):
        raise InvalidRequestError(
            f"{field}: {name!r} cannot name a checkpoint: use 1 to 128 letters, digits, '.', '_' or '-', "
            "and do not begin with '.'"
        )
    return name


def parse_tinker_path(path: str, field: str) -> tuple[str, CheckpointKind, str]:
    """Training run, kind and name of `tinker://{run}/{kind}/{name}`; InvalidRequestError naming `field`."""
    run, kind, name = _split(path)
    if not run or kind not in get_args(CheckpointKind) or not _NAME.fullmatch(name):
        raise InvalidRequestError(
            f"{field}: {path!r} is not a checkpoint's path; expected "
            "tinker://{training run}/{weights or sampler_weights}/{name}"
        )
    return run, kind, name  # type: ignore[return-value]


def _split(path: str) -> tuple[str, str, str]:
    parts = path.removeprefix("tinker://").split("/")
    if not path.startswith("tinker://") or len(parts) != 3:
        return "", "", ""
    return parts[0], parts[1], parts[2]
