"""Endpoints of the protocol that this server does not have: refused by name, with what to do instead."""

from collections.abc import Awaitable, Callable

from fastapi import APIRouter, Request, Response
from tinker_local.backend.http.bodies import discard_body
from tinker_local.backend.http.errors import answer
from tinker_local.types import UnsupportedError

router = APIRouter(tags=["refused"])

_CHECKPOINT = "/training_runs/{run_id}/checkpoints/{kind}/{name}"

REFUSED: dict[tuple[str, str], str] = {
    ("POST", "/auth/token"): "a local server has no log-in; set TINKER_API_KEY to a key of this server",
    ("GET", "/auth/apikey/me"): "a local server has no accounts; set TINKER_API_KEY to a key of this server",
    ("DELETE", "/auth/apikey/me"): "a local server has no accounts; the operator edits the file of --api-key-file",
    ("POST", "/unload_model"): "a model lives as long as its session; ServiceClient.close() ends both",
    ("POST", "/create_custom_loss"): "uploaded losses are not taken; pass a function to forward_backward_custom",
    ("PUT", "/sessions/{session_id}/project"): (
        "a local server has one project, to which every session belongs; unset TINKER_PROJECT_ID"
    ),
    ("GET", f"{_CHECKPOINT}/archive"): (
        "SDKs before 0.38 download archives; that of 0.38 takes the files of save_weights_external, so update tinker"
    ),
    ("GET", "/audit"): "a local server has no audit log; see its own log",
    ("GET", "/billing/usage/events"): "a local server bills nobody",
    ("GET", "/billing/usage/checkpoints/current"): "a local server bills nobody; list_user_checkpoints gives the sizes",
}


def _refuse(method: str, path: str, reason: str) -> Callable[[Request], Awaitable[Response]]:
    async def refuse(request: Request) -> Response:
        await discard_body(request)
        return answer(UnsupportedError(f"{method} /api/v1{path} is not supported: {reason}"))

    return refuse


for (_method, _path), _reason in REFUSED.items():
    _name = f"refuse_{_method.lower()}_{_path.strip('/').replace('/', '_').replace('{', '').replace('}', '')}"
    router.add_api_route(_path, _refuse(_method, _path, _reason), methods=[_method], name=_name, status_code=400)
