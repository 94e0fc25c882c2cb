"""The HTTP app over a `ControlPlane`."""

import functools
from collections.abc import Sequence
from types import ModuleType

from fastapi import APIRouter, Depends, FastAPI
from fastapi.middleware.cors import CORSMiddleware
from starlette.routing import BaseRoute
from tinker_local.backend.control.life_cycle import ControlPlane
from tinker_local.backend.hosting import (
    anthropic_routes,
    console_routes,
    metrics_routes,
    openai_routes,
    recorded_session_routes,
    tokenize_routes,
)
from tinker_local.backend.hosting.forwarded import ForwardedAddress, Network
from tinker_local.backend.hosting.key_file import KeyFile
from tinker_local.backend.hosting.keys import Keys, RequireKey, WrongKeys
from tinker_local.backend.hosting.request_logs import Logs, RequestLogs
from tinker_local.backend.http import (
    checkpoint_routes,
    client_routes,
    download_routes,
    error_responses,
    future_routes,
    import_routes,
    progress_routes,
    sampling_routes,
    session_routes,
    tokenizer_routes,
    training_routes,
)
from tinker_local.backend.http.access import RequireOwnMachine, RequireReady, check_own_path
from tinker_local.backend.http.delivery import Delivery

ROUTES = (
    client_routes,
    session_routes,
    training_routes,
    sampling_routes,
    future_routes,
    checkpoint_routes,
    download_routes,
    import_routes,
    progress_routes,
    recorded_session_routes,
    tokenizer_routes,
)


OPENAI = ("/oai/api/v1", "/v1")
"""Where OpenAI's API is: as on the hosted service, and where its clients expect it."""

ANTHROPIC = ("/anthropic/api/v1", "/v1")
"""The same for Anthropic's."""


def create_app(
    backend: ControlPlane,
    *,
    api_keys: Sequence[str] | KeyFile | None = None,
    logs: Logs | None = None,
    proxies: Sequence[Network] = (),
) -> FastAPI:
    """The app over `backend`, which the caller starts and closes, on the same event loop.

    `api_keys`: the keys that are accepted, of one owner, or the file that names their owners; None accepts any, from
    programs of this machine (so bind to loopback). `logs`: which of all requests there are. `proxies`: addresses whose
    `X-Forwarded-For` is believed.
    """
    # No pages for /docs and /redoc: FastAPI's load scripts of another host, and know no bodies of these routes.
    app = FastAPI(title="tinker-local", version="0.1.0", redirect_slashes=False, docs_url=None, redoc_url=None)
    app.state.backend = backend
    app.state.keys = keys = Keys(api_keys)
    app.state.wrong_keys = wrong = WrongKeys()
    if isinstance(api_keys, KeyFile):
        backend.quotas.owners = api_keys.owners
    backend.key_problem = lambda: keys.problem
    error_responses.install(app)
    app.add_middleware(Delivery)
    app.add_middleware(RequireReady, backend=backend)
    if api_keys is None:
        app.add_middleware(RequireOwnMachine, origins=backend.options.cors_origins)
    else:
        app.add_middleware(RequireKey, keys=keys, wrong=wrong)
    if logs is not None and (logs.access or logs.audit):
        backend.on_own_change = logs.changed_by_server
        app.add_middleware(RequestLogs, backend=backend, logs=logs)
    if backend.options.cors_origins:  # before keys: browsers ask without one, and pages are to read a 401
        app.add_middleware(
            CORSMiddleware,
            allow_origins=backend.options.cors_origins,
            allow_methods=["GET", "POST", "PUT", "DELETE"],
            allow_headers=["*"],
            allow_private_network=True,  # Chromium's pages of the internet ask for it
            expose_headers=["Retry-After", "Retry-After-Ms", "X-Request-Id"],
        )
    app.add_middleware(ForwardedAddress, proxies=proxies)
    app.router.routes += all_routes(ROUTES)
    return app


@functools.cache
def all_routes(below_api: Sequence[ModuleType]) -> Sequence[BaseRoute]:
    """The routes of every app, made once: FastAPI takes 0.2 s to look at what their functions take. `below_api`: the
    modules of those below /api/v1."""
    router = APIRouter()
    for module in below_api:
        router.include_router(module.router, prefix="/api/v1", dependencies=[Depends(check_own_path)])
    for prefix in OPENAI:
        router.include_router(openai_routes.router, prefix=prefix)
    for prefix in ANTHROPIC:
        router.include_router(anthropic_routes.router, prefix=prefix)
    router.include_router(recorded_session_routes.programs, prefix="/session/{recorded}/v1")
    for module in (tokenize_routes, metrics_routes, console_routes):
        router.include_router(module.router)
    return router.routes
