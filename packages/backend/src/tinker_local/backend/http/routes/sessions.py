"""Sessions: create, heartbeat, finish."""

from typing import Any, Literal

from fastapi import APIRouter, Request, Response
from tinker_local.backend.http.access import Backend
from tinker_local.backend.http.bodies import parse
from tinker_local.types import CreateSessionRequest, Frozen

router = APIRouter(tags=["sessions"])


class HeartbeatBody(Frozen):
    session_id: str
    type: Literal["session_heartbeat"] = "session_heartbeat"


class FinishReason(Frozen):
    type: Literal["success", "errored", "interrupted"]


class FinishBody(Frozen):
    reason: FinishReason = FinishReason(type="success")
    detail: str | None = None


@router.post("/create_session")
async def create_session(request: Request, backend: Backend) -> dict[str, Any]:
    body = await parse(request, CreateSessionRequest)
    return {"session_id": await backend.create_session(body, heartbeats=True), "type": "create_session"}


@router.post("/session_heartbeat")
async def session_heartbeat(request: Request, backend: Backend) -> dict[str, Any]:
    await backend.session_heartbeat((await parse(request, HeartbeatBody)).session_id)
    return {"type": "session_heartbeat"}


@router.post("/sessions/{session_id}/finish", status_code=204)
async def finish(session_id: str, request: Request, backend: Backend) -> Response:
    body = await parse(request, FinishBody)
    await backend.finish_session(session_id, body.reason.type, body.detail)
    return Response(status_code=204)
