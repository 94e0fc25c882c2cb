"""Recorded sessions: made, listed, read and deleted by their owner, and the base URL that programs use."""

import secrets
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import Field
from tinker_local.backend.control.recorded_sessions import (
    LIFETIME_HOURS,
    LONGEST_LIFETIME_HOURS,
    MAX_SESSION_BYTES,
    SESSION_BYTES,
    RecordedSession,
    exported,
)
from tinker_local.backend.hosting.anthropic_routes import count_tokens, messages
from tinker_local.backend.hosting.openai_routes import chat_completions, model, models
from tinker_local.backend.http.access import Backend, caller_of
from tinker_local.backend.http.bodies import parse
from tinker_local.backend.threads import DISK
from tinker_local.types import Frozen

router = APIRouter(tags=["recorded sessions"])


async def check_session(recorded: str, request: Request, backend: Backend) -> None:
    """NotFoundError if the caller has no session of this name."""
    await backend.recorded.get(caller_of(request).owner, recorded)


programs = APIRouter(tags=["recorded sessions"], dependencies=[Depends(check_session)])
"""Below `/session/NAME/v1`: what `/v1` has for conversations. Completions of raw text are not among them."""

programs.add_api_route("/chat/completions", chat_completions, methods=["POST"])
programs.add_api_route("/messages", messages, methods=["POST"])
programs.add_api_route("/messages/count_tokens", count_tokens, methods=["POST"])
programs.add_api_route("/models", models, methods=["GET"])
programs.add_api_route("/models/{name:path}", model, methods=["GET"])


class NewSession(Frozen):
    """`POST recorded_sessions`. `keep_thoughts`: prompts continue what was sampled even where the template would drop
    the thoughts of earlier turns."""

    name: str | None = None
    lifetime_hours: Annotated[float, Field(gt=0, le=LONGEST_LIFETIME_HOURS)] = LIFETIME_HOURS
    max_bytes: Annotated[int, Field(ge=1, le=MAX_SESSION_BYTES)] = SESSION_BYTES
    keep_thoughts: bool = False


class Rewards(Frozen):
    """`POST recorded_sessions/NAME/rewards`: a number for each turn, by its number as text."""

    rewards: dict[Annotated[str, Field(pattern=r"^\d{1,9}$")], Annotated[float, Field(allow_inf_nan=False)]]


@router.post("/recorded_sessions")
async def create(request: Request, backend: Backend) -> dict[str, Any]:
    body = await parse(request, NewSession)
    name = body.name if body.name is not None else f"recorded-{secrets.token_hex(8)}"
    session = await backend.recorded.create(
        caller_of(request).owner, name, body.lifetime_hours, body.max_bytes, body.keep_thoughts
    )
    return _summary(session)


@router.get("/recorded_sessions")
async def list_all(request: Request, backend: Backend) -> dict[str, Any]:
    return {"sessions": [_summary(session) for session in await backend.recorded.all_of(caller_of(request).owner)]}


@router.get("/recorded_sessions/{recorded}")
async def get(recorded: str, request: Request, backend: Backend) -> dict[str, Any]:
    return _summary(await backend.recorded.get(caller_of(request).owner, recorded))


@router.get("/recorded_sessions/{recorded}/turns")
async def turns(recorded: str, request: Request, backend: Backend) -> Response:
    """All turns, each a line of JSON."""
    session = await backend.recorded.get(caller_of(request).owner, recorded)

    async def lines() -> AsyncIterator[bytes]:
        for known in list(session.turns.values()):
            yield await DISK.run(exported, session, known)

    return StreamingResponse(lines(), media_type="application/x-ndjson")


@router.get("/recorded_sessions/{recorded}/pictures/{picture}")
async def picture(recorded: str, picture: str, request: Request, backend: Backend) -> Response:
    """The bytes of a picture, by their SHA-256."""
    session = await backend.recorded.get(caller_of(request).owner, recorded)
    return Response(await backend.recorded.picture(session, picture), media_type="application/octet-stream")


@router.post("/recorded_sessions/{recorded}/rewards", status_code=204)
async def rewards(recorded: str, request: Request, backend: Backend) -> Response:
    session = await backend.recorded.get(caller_of(request).owner, recorded)
    given = (await parse(request, Rewards)).rewards
    await backend.recorded.reward(session, {int(turn): value for turn, value in given.items()})
    return Response(status_code=204)


@router.delete("/recorded_sessions/{recorded}", status_code=204)
async def delete(recorded: str, request: Request, backend: Backend) -> Response:
    await backend.recorded.delete(caller_of(request).owner, recorded)
    return Response(status_code=204)


def _summary(session: RecordedSession) -> dict[str, Any]:
    settings = session.settings
    return {
        "name": settings.name,
        "openai_path": f"/session/{settings.name}/v1",
        "anthropic_path": f"/session/{settings.name}",
        "turns": len(session.turns),
        "bytes": session.bytes,
        "max_bytes": settings.max_bytes,
        "keep_thoughts": settings.keep_thoughts,
        "created": settings.created,
        "expires": settings.expires,
    }
