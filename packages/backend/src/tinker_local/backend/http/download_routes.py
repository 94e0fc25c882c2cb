"""Files to download: exports and session traces. Their URLs are signed and need no key."""

import os
import re
from collections.abc import AsyncIterator
from typing import Annotated, Any, BinaryIO
from urllib.parse import quote, urlencode

from fastapi import APIRouter, Query, Request
from fastapi.responses import FileResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send
from tinker_local.backend.control.exports import Exports, SignedFile
from tinker_local.backend.http.access import EXPORT_FILES, TRACE_FILES, Backend
from tinker_local.backend.threads import DISK
from tinker_local.types import InvalidRequestError

router = APIRouter(tags=["downloads"])

Token = Annotated[str, Query(max_length=1000)]

PART = 2**18
"""Bytes of a trace that are read and sent at once."""

_HOST = re.compile(r"[A-Za-z0-9._-]+(:\d{1,5})?|\[[0-9A-Fa-f:.]+\](:\d{1,5})?")
_PREFIX = re.compile(r"(/[A-Za-z0-9._~%-]+)*/?")


@router.get("/training_runs/{run_id}/checkpoints/{kind}/{name}/external_weights_urls")
async def external_weights_urls(
    run_id: str, kind: str, name: str, request: Request, backend: Backend
) -> dict[str, Any]:
    """One absolute URL per file, which a GET without credentials fetches until `expires`."""
    signed, expires = await backend.exports.sign(f"tinker://{run_id}/{kind}/{name}")
    root = public_root(request)
    return {"urls": {file.file: f"{root}{_path(file)}" for file in signed}, "expires": expires.isoformat()}


@router.api_route("/external_weights/{run_id}/{name}/{file}", methods=["GET", "HEAD"])
async def download_export(run_id: str, name: str, file: str, backend: Backend, version: int, token: Token) -> Response:
    """The file as a stream; ranges work, so that a download can be resumed."""
    return Download(backend.exports, SignedFile(run_id, name, file, version, token))


class Download(Response):
    """A file of an export, which stays on disk until it was sent, even if the export is deleted meanwhile."""

    def __init__(self, exports: Exports, wanted: SignedFile) -> None:
        super().__init__()
        self._exports = exports
        self._wanted = wanted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._exports.opened(self._wanted) as path:
            file = FileResponse(path, media_type="application/octet-stream", filename=self._wanted.file)
            await file(scope, receive, send)


def _path(file: SignedFile) -> str:
    parts = "/".join(quote(part, safe="") for part in (file.training_run_id, file.name, file.file))
    query = urlencode({"version": file.version, "token": file.token})
    return f"{EXPORT_FILES}{parts}?{query}"


def public_root(request: Request) -> str:
    """The URL by which the client reaches this server, without a trailing slash: from `Host`, or from what a proxy
    reports (`X-Forwarded-Proto`, `-Host`, `-Prefix`). A client that forges these only fools itself."""
    scheme = _forwarded(request, "proto") or request.url.scheme
    host = _forwarded(request, "host") or request.base_url.netloc
    prefix = _forwarded(request, "prefix") or request.scope.get("root_path", "")
    if scheme not in ("http", "https"):
        raise InvalidRequestError(f"X-Forwarded-Proto: {scheme!r} is neither http nor https")
    if not _HOST.fullmatch(host):
        raise InvalidRequestError(f"Host: {host!r} is not a host name or address with or without a port")
    if not _PREFIX.fullmatch(prefix):
        raise InvalidRequestError(f"X-Forwarded-Prefix: {prefix!r} is not a path")
    return f"{scheme}://{host}{prefix.rstrip('/')}"


def _forwarded(request: Request, what: str) -> str:
    """The first value of an `X-Forwarded-` header: that of the proxy next to the client."""
    return request.headers.get(f"x-forwarded-{what}", "").partition(",")[0].strip()


@router.get("/sessions/{session_id}/trace_export")
async def trace_export(session_id: str, request: Request, backend: Backend) -> dict[str, Any]:
    """How far the trace is; with `ready`, the absolute URL that a GET without credentials fetches."""
    root = public_root(request)
    export = await backend.traces.export(session_id)
    if export.token is None:
        return {"status": export.status, "url": None, "error": export.error}
    query = urlencode({"token": export.token})
    return {"status": export.status, "url": f"{root}{TRACE_FILES}{quote(session_id, safe='')}?{query}", "error": None}


@router.get("/session_traces/{session_id}")
async def download_trace(session_id: str, backend: Backend, token: Token) -> Response:
    """The file as a stream, as it was when this began."""
    file = await backend.traces.open(session_id, token)
    headers = {
        "Content-Length": str(os.fstat(file.fileno()).st_size),
        "Content-Disposition": f'attachment; filename="{session_id}.pftrace"',
    }
    return StreamingResponse(_parts(file), media_type="application/octet-stream", headers=headers)


async def _parts(file: BinaryIO) -> AsyncIterator[bytes]:
    with file:
        while part := await DISK.run(file.read, PART):
            yield part
