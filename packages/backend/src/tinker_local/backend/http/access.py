"""What a route needs of the app: its backend."""

from typing import Annotated, Any, cast

from fastapi import Depends, Request
from tinker_local.backend.inprocess import InProcessBackend
from tinker_local.backend.scheduling.operations import Operation


def _backend(request: Request) -> InProcessBackend:
    return cast(InProcessBackend, request.app.state.backend)


Backend = Annotated[InProcessBackend, Depends(_backend)]


def promise(operation: Operation[Any]) -> dict[str, object]:
    """The answer to a submitted operation."""
    found: dict[str, object] = {"request_id": operation.request_id}
    if operation.kind == "sample":
        found["sample_sequence_ids"] = list(operation.sequence_ids)
    return found
