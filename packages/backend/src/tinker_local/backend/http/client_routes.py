"""What a client asks before it has a session: flags, health, capabilities, telemetry.

Also the endpoints that this server lacks: each is refused by name, with what to do instead.
"""

import math
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from tinker_local.backend.http.access import Backend, caller_of
from tinker_local.backend.http.bodies import discard_body
from tinker_local.backend.http.error_responses import answer
from tinker_local.backend.scheduling.quotas import Amounts
from tinker_local.types import UnsupportedError

router = APIRouter(tags=["client"])

SAMPLE_USE_RETRIEVE_FUTURES = False
"""Whether the SDK waits for all samples of one client with one poll. It is not faster here: 512 samples of one token
take 2.4 s either way, 2 s of that the client's CPU and 1 s the server's, over as many connections, as each result is
fetched by itself anyway. And with it the SDK gives up for good when the server was restarted (else it samples again),
and never tells its user what it waits for."""


_CHECKPOINT = "/training_runs/{run_id}/checkpoints/{kind}/{name}"

REFUSED: dict[tuple[str, str], str] = {
    ("POST", "/auth/token"): "a local server has no log-in; set TINKER_API_KEY to a key of this server",
    ("GET", "/auth/apikey/me"): "a local server has no accounts; set TINKER_API_KEY to a key of this server",
    ("DELETE", "/auth/apikey/me"): "a local server has no accounts; the operator edits the file of --api-key-file",
    ("POST", "/unload_model"): "a model lives as long as its session; ServiceClient.close() ends both",
    ("POST", "/create_custom_loss"): "uploaded losses are not taken; pass a function to forward_backward_custom",
    ("PUT", "/sessions/{session_id}/project"): (
        "a session stays in the project that it was created in (TINKER_PROJECT_ID)"
    ),
    ("GET", f"{_CHECKPOINT}/archive"): (
        "SDKs before 0.38 download archives; that of 0.38 takes the files of save_weights_external, so update tinker"
    ),
    ("GET", "/audit"): "a local server writes its audit log to the file of --audit-log",
    ("GET", "/billing/usage/events"): "a local server has no billing",
    ("GET", "/billing/usage/checkpoints/current"): (
        "a local server has no billing; list_user_checkpoints gives the sizes"
    ),
}


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
    """Ask the SDK to cancel abandoned samples, which frees their slots."""
    await discard_body(request)
    return {"sample_cancel_enabled": True}


@router.get("/healthz")
async def healthz(backend: Backend) -> JSONResponse:
    """Readiness: 200 while training and sampling work for every base model; 503 before, and while one recovers. Other
    requests are taken all the same then, and those that need what is missing wait for it. `detail`: what is wrong."""
    if not backend.ready:
        return JSONResponse({"status": "loading"}, 503)
    detail = {"detail": "; ".join(problems)} if (problems := backend.problems()) else {}
    if backend.recovering():
        return JSONResponse({"status": "recovering", **detail}, 503)
    return JSONResponse({"status": "ok", **detail})


@router.get("/livez")
async def livez() -> dict[str, str]:
    """Liveness: 200 as long as the server answers at all, also while it loads or recovers. Not part of the Tinker
    API."""
    return {"status": "alive"}


@router.get("/get_server_capabilities")
async def get_server_capabilities(backend: Backend) -> dict[str, Any]:
    """The models served."""
    return {"supported_models": backend.capabilities()}


@router.get("/usage")
async def usage(request: Request, backend: Backend) -> dict[str, Any]:
    """What the caller uses of its quotas, or for an admin what each owner uses; null: unlimited. Not part of the
    Tinker API."""
    caller = caller_of(request)
    return {
        "owners": [
            {"owner": owner, "used": amounts_json(used), "limits": amounts_json(most)}
            for owner, (used, most) in (await backend.usage()).items()
            if caller.admin or owner == caller.owner
        ]
    }


def amounts_json(amounts: Amounts) -> dict[str, float | None]:
    """Amounts on the wire."""
    return {name: None if math.isinf(amount) else amount for name, amount in asdict(amounts).items()}


@router.post("/telemetry")
async def telemetry(request: Request) -> dict[str, str]:
    """Accept and discard: events can hold the API key in clear text."""
    await discard_body(request)
    return {"status": "accepted"}


def _refuse(method: str, path: str, reason: str) -> Callable[[Request], Awaitable[Response]]:
    async def refuse(request: Request) -> Response:
        await discard_body(request)
        return answer(UnsupportedError(f"{method} /api/v1{path} is not supported: {reason}"))

    return refuse


for (_method, _path), _reason in REFUSED.items():
    _name = f"refuse_{_method.lower()}_{_path.strip('/').replace('/', '_').replace('{', '').replace('}', '')}"
    router.add_api_route(_path, _refuse(_method, _path, _reason), methods=[_method], name=_name, status_code=400)
