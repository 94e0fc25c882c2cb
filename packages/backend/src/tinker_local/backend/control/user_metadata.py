"""`user_metadata` of sessions, runs and checkpoints: texts by name, as the SDK reads them back."""

from collections.abc import Mapping
from typing import Any

from tinker_local.types import InvalidRequestError


def check_user_metadata(metadata: Mapping[str, Any] | None) -> None:
    """InvalidRequestError for a value that is no text: the SDK could not read a listing that holds it."""
    for name, value in (metadata or {}).items():
        if not isinstance(value, str):
            raise InvalidRequestError(f"user_metadata[{name!r}]: must be a text, not {type(value).__name__}")
