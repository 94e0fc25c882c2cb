"""Start-up: what the client asks before it has a session, health, capabilities, telemetry."""

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from tinker_local.backend.http.access import Backend
from tinker_local.backend.http.bodies import discard_body

router = APIRouter(tags=["client"])

SAMPLE_USE_RETRIEVE_FUTURES = False
"""Whether the SDK waits for all samples of one client with one poll. It is no faster here: 512 samples of one token
take 2.4 s either way, 2 s of that the client's CPU and 1 s the server's, over as many connections, as each result is
fetched by itself anyway. And with it the SDK gives up for good when the server was restarted (else it samples again),
and never tells its user what it waits for."""


@router.post("/client/config")
async def client_config(request: Request) -> dict[str, Any]:
    """Flags for the SDK; what is not named keeps the SDK's default."""
    await discard_body(request)
    return {
        "pjwt_auth_enabled": False,
        "proto_compress_fwdbwd": False,
        "parallel_fwdbwd_chunks": True,
        "sample_join_sampling_session": True,
        "sample_use_retrieve_futures": SAMPLE_USE_RETRIEVE_FUTURES,
    }


@router.post("/client/dynamic_config")
async def client_dynamic_config(request: Request) -> dict[str, Any]:
    """Abandoned samples are to be cancelled: it frees their slots."""
    await discard_body(request)
    return {"sample_cancel_enabled": True}


@router.get("/healthz")
async def healthz(backend: Backend) -> JSONResponse:
    """200 when training and sampling work, 503 before."""
    if backend.ready:
        return JSONResponse({"status": "ok"})
    return JSONResponse({"status": "loading"}, 503)


@router.get("/get_server_capabilities")
async def get_server_capabilities(backend: Backend) -> dict[str, Any]:
    """The models served."""
    return {"supported_models": backend.capabilities()}


@router.post("/telemetry")
async def telemetry(request: Request) -> dict[str, str]:
    """Taken and thrown away: its events can hold the API key in clear text."""
    await discard_body(request)
    return {"status": "accepted"}
