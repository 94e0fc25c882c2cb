"""Session traces: their signed URLs, and the files behind these, which need no key."""

import asyncio
import os
from collections.abc import AsyncIterator
from typing import Annotated, Any, BinaryIO
from urllib.parse import quote, urlencode

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response, StreamingResponse
from tinker_local.backend.control.session_traces import SignedTrace
from tinker_local.backend.http.access import Backend
from tinker_local.backend.http.routes.external_weights import public_root

router = APIRouter(tags=["session traces"])

DOWNLOADS = "/api/v1/session_traces/"
"""Below this, the signature in the URL takes the place of the key."""

PART = 2**18
"""Bytes that are read and sent at once."""


@router.get("/sessions/{session_id}/trace_export")
async def trace_export(session_id: str, request: Request, backend: Backend) -> dict[str, Any]:
    """How far the trace is; with `ready`, the absolute URL that a GET without credentials fetches."""
    root = public_root(request)
    export = await backend.traces.export(session_id)
    if export.signed is None:
        return {"status": export.status, "url": None, "error": export.error}
    query = urlencode({"expires": export.signed.expires, "signature": export.signed.signature})
    return {"status": export.status, "url": f"{root}{DOWNLOADS}{quote(session_id, safe='')}?{query}", "error": None}


@router.get("/session_traces/{session_id}")
async def download(
    session_id: str, backend: Backend, expires: int, signature: Annotated[str, Query(max_length=200)]
) -> Response:
    """The file as a stream, as it was when this began."""
    file = await backend.traces.open(SignedTrace(session_id, expires, signature))
    headers = {
        "Content-Length": str(os.fstat(file.fileno()).st_size),
        "Content-Disposition": f'attachment; filename="{session_id}.pftrace"',
    }
    return StreamingResponse(_parts(file), media_type="application/octet-stream", headers=headers)


async def _parts(file: BinaryIO) -> AsyncIterator[bytes]:
    with file:
        while part := await asyncio.to_thread(file.read, PART):
            yield part
