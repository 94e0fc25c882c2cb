"""Who is let in without API keys: programs of this machine alone; and what routes are given of a request.

Without API keys, accept only local clients and reject cross-site browser requests. A browser does not let a page read
what another site answers, but it sends plain requests there, and a page whose host name was rebound to 127.0.0.1 (DNS
rebinding) counts as same-site. `Origin` gives the first away, `Host` the second, and a page can forge neither. With
keys neither matters, because a page knows none.
"""

import ipaddress
import re
from collections.abc import Collection, Mapping
from typing import Annotated, Literal, Protocol, TypeVar, cast

from fastapi import Depends, Query, Request
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send
from tinker_local.backend.control.callers import LOCAL, Caller
from tinker_local.backend.control.life_cycle import ControlPlane
from tinker_local.backend.http import error_responses
from tinker_local.backend.scheduling.quotas import Owners
from tinker_local.backend.storage.metadata import Owned
from tinker_local.backend.storage.names import parse_tinker_path
from tinker_local.backend.threads import ACTING, DATABASE, Who, acting_for
from tinker_local.types import (
    CopyWeightsRequest,
    Frozen,
    InvalidRequestError,
    LoadWeightsRequest,
    NotFoundError,
    PermissionDeniedError,
    SessionSearchRequest,
)

R = TypeVar("R", CopyWeightsRequest, LoadWeightsRequest)

HEALTH = frozenset({"/api/v1/healthz", "/api/v1/livez"})
"""Readiness and liveness: open to all, at any time."""

EXPORT_FILES, TRACE_FILES = "/api/v1/external_weights/", "/api/v1/session_traces/"
"""Below these, the signature in the URL takes the place of the key."""

CONSOLE, CONSOLE_FILES = "/", "/console/"
"""The console and its files, which hold nothing of anybody: open to all, at any time."""

_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\[\]:@/?#\s]+)(:\d{0,5})?")


class KnownKeys(Protocol):
    """Who has which API key. An access token for checkpoints of another owner is such a key, too."""

    def caller(self, given: str) -> Caller | None:
        """Whose key this is; None if it is not one of this server."""

    def owners(self) -> Owners:
        """Who has a key."""

    def knows(self, token: str | None) -> bool:
        """Whether an access token is a key of this server, or was not given."""

    def opened(self, request: R) -> R:
        """`request` without its token; PermissionDeniedError if that is not a key of this server."""


class WrongTokens(Protocol):
    """Counts wrong keys and access tokens."""

    async def wait(self, address: str) -> bool:
        """Count one of this address and wait; false if too many wait already."""


# Middleware: decides before the body is read --------------------------------------------------------------------------


class RequireReady:
    """Answer 503 until the models are loaded, but for the health checks and the console; the SDK tries again."""

    def __init__(self, app: ASGIApp, backend: ControlPlane) -> None:
        self._app = app
        self._backend = backend

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._backend.ready and not _holds_nothing(scope["path"]):
            await error_responses.plain("the server is loading its models", 503, scope["path"])(scope, receive, send)
            return
        await self._app(scope, receive, send)


ACCESS_TOKEN = "X-Tinker-Weights-Access-Token"
"""The header of an access token, which routes that need no key ignore."""


def address_in(scope: Scope) -> str:
    """The address of the client, after `ForwardedAddress`."""
    return str((scope.get("client") or ("",))[0])


def open_to_all(path: str) -> bool:
    """Whether a path needs no key: health, the console, and files whose URL is signed."""
    return _holds_nothing(path) or path.startswith((EXPORT_FILES, TRACE_FILES))


def _holds_nothing(path: str) -> bool:
    """Whether a path is one of the health checks or of the console's files."""
    return path in HEALTH or path == CONSOLE or path.startswith(CONSOLE_FILES)


class RequireOwnMachine:
    """Answer 403 to a request for another host than localhost, or from a web page of another host, but for those of
    `origins`.

    (Starlette's TrustedHostMiddleware checks names only, and does not say what to do.)
    """

    def __init__(self, app: ASGIApp, origins: Collection[str] = ()) -> None:
        self._app = app
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (reason := _refusal(Headers(scope=scope), self._origins)) is not None:
            error = PermissionDeniedError(f"{reason}; give the server --api-key-file, and its callers TINKER_API_KEY")
            await error_responses.answer(error, scope["path"])(scope, receive, send)
            return
        scope[CALLER] = LOCAL
        with acting_for(LOCAL.owner):
            await self._app(scope, receive, send)


def _refusal(headers: Headers, origins: Collection[str]) -> str | None:
    host, origin = headers.get("host", ""), headers.get("origin")
    if not _names_loopback(host):
        return (
            f"Host: {host!r}: without API keys the server only accepts requests addressed to localhost, 127.0.0.1 "
            "or [::1]"
        )
    if origin is not None and origin not in origins and not _names_loopback(origin.partition("://")[2]):
        return f"Origin: {origin!r}: without API keys the server rejects requests from web pages of other machines"
    return None


def _names_loopback(netloc: str) -> bool:
    """Whether `HOST` or `HOST:PORT` of a header is this machine."""
    match = _HOST.fullmatch(netloc)
    return match is not None and is_loopback(match[1].strip("[]"))


def is_loopback(host: str) -> bool:
    """Whether a name or an address (IPv6 without brackets) is a loopback one."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


# Whose it is ----------------------------------------------------------------------------------------------------------


CALLER = "tinker_local.caller"
"""Where the middleware puts the caller in a request's scope. A signed URL has none."""

NAMED_MODEL = "tinker_local.named_model"
"""In the scope of a request of OpenAI's or Anthropic's API: the model that it names, with its session once that is
known; absent if the caller has named it before."""

READ_AS_PUBLIC = "tinker_local.read_as_public"
"""In the scope of a request that names a checkpoint of another owner, who published it."""

BODY = "tinker_local.body"
"""Where a request's scope has its body, once that is parsed: the audit log reads it there."""

OWNED = {
    "session_id": "session",
    "model_id": "model",
    "run_id": "training run",
    "request_id": "request",
    "sampling_session_id": "sampling session",
    "sampler_id": "sampling session",
}
"""The fields of bodies and paths that name something of a session, by an id that begins with the session's."""


def caller_of(request: Request) -> Caller:
    """Who sent a request with a key."""
    return cast(Caller, request.scope[CALLER])


def sees_all(request: Request) -> bool:
    """Whether a caller may see what all owners do together: an admin, or the only owner."""
    return caller_of(request).admin or len(request.app.state.keys.owners().names) == 1


async def check_ids(request: Request, ids: Mapping[str, object]) -> None:
    """NotFoundError if one of `ids`, by their field of `OWNED`, is not of the caller: in the same words if it does not
    exist."""
    caller = caller_of(request)
    if caller.admin:
        return
    sessions = cast(ControlPlane, request.app.state.backend).sessions
    for field, id_ in ids.items():
        if isinstance(id_, str) and field in OWNED and await sessions.owner_of(id_) != caller.owner:
            raise NotFoundError(f"{field}: there is no {OWNED[field]} {id_!r}")


async def check_own_path(request: Request) -> None:
    """`check_ids` of what a route's path names, for every route."""
    if request.path_params and not open_to_all(request.scope["path"]):
        _act_for(request, request.path_params)
        await check_ids(request, request.path_params)


def _act_for(request: Request, ids: Mapping[str, object]) -> None:
    """Until the request ends, its work is of the session that it names."""
    for field in OWNED:
        if isinstance(id_ := ids.get(field), str):
            if session_id := id_.partition(":")[0]:
                ACTING.set(Who(caller_of(request).owner, session_id))
            return


async def check_own_body(request: Request, body: Frozen) -> None:
    """`check_ids` of what a body names, and `check_readable` of its checkpoints, for every body. A wrong access token
    in it counts as a wrong key."""
    request.scope[BODY] = body
    fields = vars(body)  # asking a model for a field that it lacks takes long
    _act_for(request, fields)
    if isinstance(model := fields.get("model"), str):
        request.scope[NAMED_MODEL] = {"model": model}
    token = fields.get("weights_access_token")
    if token is not None and not cast(KnownKeys, request.app.state.keys).knows(token):
        await cast(WrongTokens, request.app.state.wrong_keys).wait(address_in(request.scope))
    if caller_of(request).admin or isinstance(body, SessionSearchRequest):  # the ids of a search only filter
        return
    given = dict(body)
    for part in [given, *(dict(value) for value in given.values() if isinstance(value, Frozen))]:
        await check_ids(request, part)
    for field, value in given.items():
        if not (isinstance(value, str) and value.startswith("tinker://")):
            continue
        if await check_readable(request, field, value, given.get("weights_access_token")) == "public":
            request.scope[READ_AS_PUBLIC] = True


async def check_readable(request: Request, field: str, path: str, token: str | None) -> Literal["own", "public", None]:
    """Why the caller may read a checkpoint: it is the caller's or of the owner of a given token, or it is published.
    None for a path that the route will refuse; NotFoundError for any other checkpoint."""
    try:
        run, kind, name = parse_tinker_path(path, field)
    except InvalidRequestError:
        return None
    backend = cast(ControlPlane, request.app.state.backend)
    keys = cast(KnownKeys, request.app.state.keys)
    tokens = (token, request.headers.get(ACCESS_TOKEN))
    readers = [caller_of(request), *(keys.caller(token) for token in tokens if token is not None)]
    owner = await backend.sessions.owner_of(run)
    if owner is not None and any(reader and (reader.admin or reader.owner == owner) for reader in readers):
        return "own"
    record = await DATABASE.run(backend.store.get_checkpoint, run, kind, name)
    if record is None or not record.public:
        reader = caller_of(request).owner
        raise await DATABASE.run(backend.store.no_checkpoint, run, kind, name, field, reader)
    return "public"


# What routes depend on -----------------------------------------------------------------------------------------------


async def _backend(request: Request) -> ControlPlane:
    return cast(ControlPlane, request.app.state.backend)


Backend = Annotated[ControlPlane, Depends(_backend)]

MOST_LISTED = 1000
"""Items of one page of a listing."""

PageSize = Annotated[int, Query(ge=1, le=MOST_LISTED)]

Offset = Annotated[int, Query(ge=0, le=2**63 - 1)]
"""Where a page begins; the database counts in 64 bits."""


async def owned(
    request: Request, access_scope: Literal["owned", "accessible"] = "owned", project_id: str | None = None
) -> Owned:
    """What a listing shows: what the caller owns, or everything for an admin; of one project, if it names one."""
    caller = caller_of(request)
    return Owned(None if caller.admin else caller.owner, project_id)


ToList = Annotated[Owned, Depends(owned)]


async def _keys(request: Request) -> KnownKeys:
    return cast(KnownKeys, request.app.state.keys)


ServerKeys = Annotated[KnownKeys, Depends(_keys)]
