"""The HTTP app: it translates between the wire and `InProcessBackend`, and does nothing else."""

from collections.abc import Sequence

from fastapi import Depends, FastAPI
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send
from tinker_local.backend.backend import InProcessBackend
from tinker_local.backend.http import errors
from tinker_local.backend.http.access import known_weights_token
from tinker_local.backend.http.keys import Keys
from tinker_local.backend.http.loopback import RequireOwnMachine
from tinker_local.backend.http.routes import (
    checkpoints,
    client,
    external_weights,
    futures,
    metrics,
    refused,
    runs,
    sampling,
    session_traces,
    training,
)
from tinker_local.backend.http.routes import sessions as session_routes
from tinker_local.types import AuthenticationError

HEALTH = "/api/v1/healthz"


def create_app(backend: InProcessBackend, *, api_keys: Sequence[str] | None = None) -> FastAPI:
    """The app over `backend`, which somebody else starts and closes, on the same event loop.

    `api_keys`: the keys that are let in; None lets every key in, from programs of this machine (the server has to
    listen to no other).
    """
    app = FastAPI(title="tinker-local", version="0.1.0", redirect_slashes=False)
    app.state.backend = backend
    app.state.keys = keys = Keys(api_keys)
    app.state.metrics = metrics.registry_of(backend)
    errors.install(app)
    app.add_middleware(RequireReady, backend=backend)
    if api_keys is None:
        app.add_middleware(RequireOwnMachine)
    else:
        app.add_middleware(RequireKey, keys=keys)
    modules = (
        client,
        session_routes,
        session_traces,
        training,
        sampling,
        futures,
        runs,
        checkpoints,
        external_weights,
        refused,
    )
    for module in modules:
        app.include_router(module.router, prefix="/api/v1", dependencies=[Depends(known_weights_token)])
    app.include_router(metrics.router)
    return app


class RequireReady:
    """Everything but the health check is answered 503 until the models are loaded; the SDK tries again."""

    def __init__(self, app: ASGIApp, backend: InProcessBackend) -> None:
        self._app = app
        self._backend = backend

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._backend.ready and scope["path"] != HEALTH:
            await JSONResponse({"detail": "the server is loading its models"}, 503)(scope, receive, send)
            return
        await self._app(scope, receive, send)


class RequireKey:
    """A request without a known `X-API-Key` is answered 401 before its body is read."""

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not _open_to_all(scope["path"]) and not self._known(Headers(scope=scope)):
            error = AuthenticationError("X-API-Key: missing or unknown; set TINKER_API_KEY to a key of this server")
            await errors.answer(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _known(self, headers: Headers) -> bool:
        return self._keys.known(headers.get("x-api-key", ""))


def _open_to_all(path: str) -> bool:
    """Whether no key is asked for: health, and files whose URL is signed."""
    return path == HEALTH or path.startswith((external_weights.DOWNLOADS, session_traces.DOWNLOADS))
