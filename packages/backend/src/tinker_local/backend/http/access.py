"""Who is let in: API keys, or programs of this machine alone; and what routes are given of a request.

Without API keys, accept only local clients and reject cross-site browser requests. A browser does not let a page read
what another site answers, but it sends plain requests there, and a page whose host name was rebound to 127.0.0.1 (DNS
rebinding) counts as same-site. `Origin` gives the first away, `Host` the second, and a page can forge neither. With
keys neither matters, because a page knows none.
"""

import hmac
import ipaddress
import re
from collections.abc import Sequence
from typing import Annotated, Literal, TypeVar, cast

from fastapi import Depends, Header, Query, Request
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send
from tinker_local.backend.control.life_cycle import ControlPlane
from tinker_local.backend.control.sessions import check_project
from tinker_local.backend.http import error_responses
from tinker_local.types import AuthenticationError, CopyWeightsRequest, LoadWeightsRequest, PermissionDeniedError

R = TypeVar("R", CopyWeightsRequest, LoadWeightsRequest)

HEALTH = frozenset({"/api/v1/healthz", "/api/v1/livez"})
"""Readiness and liveness: open to all, at any time."""

EXPORT_FILES, TRACE_FILES = "/api/v1/external_weights/", "/api/v1/session_traces/"
"""Below these, the signature in the URL takes the place of the key."""

_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\[\]:@/?#\s]+)(:\d{0,5})?")


class Keys:
    """The API keys of a server; None accepts any. Access tokens for checkpoints of another owner are such keys, too."""

    def __init__(self, keys: Sequence[str] | None) -> None:
        self._keys = None if keys is None else [key.encode() for key in keys]

    def known(self, given: str) -> bool:
        """Whether `given` is a key of this server."""
        if self._keys is None:
            return True
        # Compare with every key, so that the time taken reveals nothing.
        return sum(hmac.compare_digest(given.encode(), key) for key in self._keys) > 0

    def check_token(self, token: str | None, field: str) -> None:
        """PermissionDeniedError for an access token that is not a key of this server.

        The hosted service accepts an API key of the checkpoint's owner as such a token. A local server has one owner,
        so a valid token grants what its bearer has already.
        """
        if token is not None and not self.known(token):
            raise PermissionDeniedError(
                f"{field}: it is not a key of this server; give one, or leave it out: every key of this server reads "
                "every checkpoint"
            )

    def opened(self, request: R) -> R:
        """`request` without its token, once that is checked."""
        self.check_token(request.weights_access_token, "weights_access_token")
        return request.model_copy(update={"weights_access_token": None})


# Middleware: decides before the body is read --------------------------------------------------------------------------


class RequireReady:
    """Answer 503 to everything but the health checks until the models are loaded; the SDK tries again."""

    def __init__(self, app: ASGIApp, backend: ControlPlane) -> None:
        self._app = app
        self._backend = backend

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._backend.ready and scope["path"] not in HEALTH:
            await JSONResponse({"detail": "the server is loading its models"}, 503)(scope, receive, send)
            return
        await self._app(scope, receive, send)


class RequireKey:
    """Answer 401 to a request without a known `X-API-Key`."""

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not _open_to_all(scope["path"]) and not self._known(Headers(scope=scope)):
            error = AuthenticationError("X-API-Key: missing or unknown; set TINKER_API_KEY to a key of this server")
            await error_responses.answer(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _known(self, headers: Headers) -> bool:
        return self._keys.known(headers.get("x-api-key", ""))


def _open_to_all(path: str) -> bool:
    """Whether a path needs no key: health, and files whose URL is signed."""
    return path in HEALTH or path.startswith((EXPORT_FILES, TRACE_FILES))


class RequireOwnMachine:
    """Answer 403 to a request for another host than localhost, or from a web page of another host.

    (Starlette's TrustedHostMiddleware checks names only, and does not say what to do.)
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (reason := _refusal(Headers(scope=scope))) is not None:
            error = PermissionDeniedError(f"{reason}; give the server --api-key-file, and its callers TINKER_API_KEY")
            await error_responses.answer(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _refusal(headers: Headers) -> str | None:
    host, origin = headers.get("host", ""), headers.get("origin")
    if not _names_loopback(host):
        return (
            f"Host: {host!r}: without API keys the server only accepts requests addressed to localhost, 127.0.0.1 "
            "or [::1]"
        )
    if origin is not None and not _names_loopback(origin.partition("://")[2]):
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


# What routes depend on -----------------------------------------------------------------------------------------------


async def _backend(request: Request) -> ControlPlane:
    return cast(ControlPlane, request.app.state.backend)


Backend = Annotated[ControlPlane, Depends(_backend)]

Offset = Annotated[int, Query(ge=0, le=2**63 - 1)]
"""Where a page begins; the database counts in 64 bits."""


async def one_owner(access_scope: Literal["owned", "accessible"] = "owned", project_id: str | None = None) -> None:
    """Reject unknown scopes and projects. With a single owner and project, every valid value selects everything."""
    check_project(project_id, "project_id")


async def _keys(request: Request) -> Keys:
    return cast(Keys, request.app.state.keys)


ServerKeys = Annotated[Keys, Depends(_keys)]


async def known_weights_token(
    keys: ServerKeys, x_tinker_weights_access_token: Annotated[str | None, Header()] = None
) -> None:
    """Reject, on any request, a token that is not a key of this server."""
    keys.check_token(x_tinker_weights_access_token, "X-Tinker-Weights-Access-Token")
