"""What several routes need: the backend, parameters, the answer to a submit."""

from typing import Annotated, Any, cast

from fastapi import Depends, Query, Request
from tinker_local.backend.inprocess import InProcessBackend
from tinker_local.backend.scheduling.operations import Operation


def _backend(request: Request) -> InProcessBackend:
    return cast(InProcessBackend, request.app.state.backend)


Backend = Annotated[InProcessBackend, Depends(_backend)]

Offset = Annotated[int, Query(ge=0, le=2**63 - 1)]
"""Where a page begins; a database counts in 64 bits."""


def promise(operation: Operation[Any]) -> dict[str, object]:
    """The answer to a submitted operation."""
    found: dict[str, object] = {"request_id": operation.request_id}
    if operation.kind == "sample":
        found["sample_sequence_ids"] = list(operation.sequence_ids)
    return found
