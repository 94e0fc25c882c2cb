"""What several routes need: the backend, parameters, the answer to a submit."""

from typing import Annotated, Any, Literal, cast

from fastapi import Depends, Header, Query, Request
from tinker_local.backend.backend import InProcessBackend
from tinker_local.backend.control.ownership import check_project
from tinker_local.backend.http.keys import Keys
from tinker_local.backend.scheduling.operations import Operation


async def _backend(request: Request) -> InProcessBackend:
    return cast(InProcessBackend, request.app.state.backend)


Backend = Annotated[InProcessBackend, Depends(_backend)]

Offset = Annotated[int, Query(ge=0, le=2**63 - 1)]
"""Where a page begins; a database counts in 64 bits."""


async def one_owner(access_scope: Literal["owned", "accessible"] = "owned", project_id: str | None = None) -> None:
    """Refuses every scope and project that is none. There is one owner and one project, so the others mean all."""
    check_project(project_id, "project_id")


async def _keys(request: Request) -> Keys:
    return cast(Keys, request.app.state.keys)


ServerKeys = Annotated[Keys, Depends(_keys)]


async def known_weights_token(
    keys: ServerKeys, x_tinker_weights_access_token: Annotated[str | None, Header()] = None
) -> None:
    """Refuses, on any request, a token that is no key of this server."""
    keys.check_token(x_tinker_weights_access_token, "X-Tinker-Weights-Access-Token")


def promise(operation: Operation[Any]) -> dict[str, object]:
    """The answer to a submitted operation."""
    found: dict[str, object] = {"request_id": operation.request_id}
    if operation.kind == "sample":
        found["sample_sequence_ids"] = list(operation.sequence_ids)
    return found
