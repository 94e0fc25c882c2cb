"""Sessions: create, heartbeat, finish, list and search."""

from typing import Any, Literal

from fastapi import APIRouter, Depends, Request, Response
from tinker_local.backend.control.callers import owner_urn
from tinker_local.backend.control.sessions import FoundSession, SessionStatus
from tinker_local.backend.http.access import Backend, Offset, PageSize, ToList, caller_of, owned
from tinker_local.backend.http.bodies import parse
from tinker_local.backend.storage.records import LOCAL_PROJECT
from tinker_local.types import CreateSessionRequest, FinishType, Frozen, SessionSearchRequest
from tinker_local.types.requests_and_results import Id

router = APIRouter(tags=["sessions"], dependencies=[Depends(owned)])


class HeartbeatBody(Frozen):
    session_id: Id
    type: Literal["session_heartbeat"] = "session_heartbeat"


class FinishReason(Frozen):
    type: FinishType


class FinishBody(Frozen):
    reason: FinishReason = FinishReason(type="success")
    detail: str | None = None


@router.post("/create_session")
async def create_session(request: Request, backend: Backend) -> dict[str, Any]:
    body = await parse(request, CreateSessionRequest)
    session_id = await backend.sessions.create(body, heartbeats=True, caller=caller_of(request))
    return {"session_id": session_id, "type": "create_session"}


@router.post("/session_heartbeat")
async def session_heartbeat(request: Request, backend: Backend) -> dict[str, Any]:
    await backend.sessions.heartbeat((await parse(request, HeartbeatBody)).session_id)
    return {"type": "session_heartbeat"}


@router.post("/sessions/{session_id}/finish", status_code=204)
async def finish(session_id: str, request: Request, backend: Backend) -> Response:
    body = await parse(request, FinishBody)
    await backend.sessions.finish(session_id, body.reason.type, body.detail)
    return Response(status_code=204)


@router.get("/sessions")
async def list_sessions(backend: Backend, owned: ToList, limit: PageSize = 20, offset: Offset = 0) -> dict[str, Any]:
    """Newest first."""
    return {"sessions": await backend.sessions.newest(limit, offset, owned)}


@router.get("/sessions/{session_id}")
async def get_session(session_id: str, backend: Backend) -> dict[str, Any]:
    record, run_ids, sampler_ids = await backend.sessions.get(session_id)
    return {
        "training_run_ids": run_ids,
        "sampler_ids": sampler_ids,
        "user_metadata": dict(record.user_metadata),
        "display_name": record.display_name,
    }


@router.post("/sessions/search")
async def search_sessions(request: Request, backend: Backend, owned: ToList) -> dict[str, Any]:
    """Newest first."""
    found, cursor = await backend.sessions.search(await parse(request, SessionSearchRequest), owned)
    return {
        "sessions": [summary_json(session) for session in found],
        "next_cursor": None if cursor is None else cursor.model_dump(mode="json"),
    }


def summary_json(found: FoundSession) -> dict[str, Any]:
    """A session on the wire."""
    return {
        "session_id": found.record.session_id,
        "created_at": found.record.created_at.isoformat(),
        "owner": owner_urn(found.record.owner),
        "project_id": found.record.project_id or LOCAL_PROJECT,
        "status": None if found.status is None else status_json(found.status),
        "checkpoints_count": found.checkpoints_count,
        "checkpoint_storage_bytes": found.checkpoint_storage_bytes,
        "display_name": found.record.display_name,
        "user_metadata": dict(found.record.user_metadata),
    }


def status_json(status: SessionStatus) -> dict[str, Any]:
    """What became of a session on the wire."""
    match status.type:
        case "active":
            return {"type": "active"}
        case "cancelled":
            return {"type": "cancelled", "detail": status.detail}
        case "client_finished":
            return {"type": "client_finished", "reason": {"type": status.reason}, "detail": status.detail}
