"""The HTTP app: translates between the wire and `InProcessBackend`."""

from collections.abc import Sequence

from fastapi import Depends, FastAPI
from fastapi.middleware.cors import CORSMiddleware
from tinker_local.backend.control.callers import KeyFile
from tinker_local.backend.control.life_cycle import ControlPlane
from tinker_local.backend.http import (
    anthropic_routes,
    checkpoint_routes,
    client_routes,
    console_routes,
    download_routes,
    error_responses,
    future_routes,
    import_routes,
    metrics_routes,
    openai_routes,
    progress_routes,
    sampling_routes,
    session_routes,
    tokenize_routes,
    tokenizer_routes,
    training_routes,
)
from tinker_local.backend.http.access import (
    Keys,
    RequireKey,
    RequireOwnMachine,
    RequireReady,
    WrongKeys,
    check_own_path,
)
from tinker_local.backend.http.delivery import Delivery
from tinker_local.backend.http.forwarded import ForwardedAddress, Network
from tinker_local.backend.http.request_logs import Logs, RequestLogs

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
    backend.quotas.owners = keys.owners
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
    for module in ROUTES:
        app.include_router(module.router, prefix="/api/v1", dependencies=[Depends(check_own_path)])
    for prefix in OPENAI:
        app.include_router(openai_routes.router, prefix=prefix)
    for prefix in ANTHROPIC:
        app.include_router(anthropic_routes.router, prefix=prefix)
    app.include_router(tokenize_routes.router)
    app.include_router(metrics_routes.router)
    app.include_router(console_routes.router)
    return app
