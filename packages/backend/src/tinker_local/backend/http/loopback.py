"""A server without keys is for the programs of its own machine, and not for web pages of elsewhere in a browser there.

A browser keeps a page from reading what another site answers, but lets it send plain requests there; and a page whose
host name was made to lead to 127.0.0.1 meanwhile (DNS rebinding) is of the same site for the browser. The first is told
by `Origin`, the second by `Host`, and no page can forge either. With keys neither matters: a page knows none.
"""

import ipaddress
import re

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send
from tinker_local.backend.http import errors
from tinker_local.types import PermissionDeniedError

_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\[\]:@/?#\s]+)(:\d{0,5})?")


def is_loopback(host: str) -> bool:
    """Whether a name or an address (IPv6 without brackets) is this machine's for itself."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


class RequireOwnMachine:
    """A request to another name than this machine's own for itself, or for a web page of another, is answered 403
    before its body is read. (Starlette's TrustedHostMiddleware takes names alone, and does not say what to do.)"""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (reason := _refusal(Headers(scope=scope))) is not None:
            error = PermissionDeniedError(f"{reason}; give the server --api-key-file, and its callers TINKER_API_KEY")
            await errors.answer(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _refusal(headers: Headers) -> str | None:
    host, origin = headers.get("host", ""), headers.get("origin")
    if not _names_loopback(host):
        return f"Host: {host!r}: without keys the server is asked as localhost, 127.0.0.1 or [::1] alone"
    if origin is not None and not _names_loopback(origin.partition("://")[2]):
        return f"Origin: {origin!r}: without keys the server takes no requests from web pages of other machines"
    return None


def _names_loopback(netloc: str) -> bool:
    """Whether `HOST` or `HOST:PORT` of a header is this machine."""
    match = _HOST.fullmatch(netloc)
    return match is not None and is_loopback(match[1].strip("[]"))
