"""Answers that go on while a client listens: server-sent events, and the end of a request whose client has left."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import Response, StreamingResponse
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send
from tinker_local.backend.http.error_responses import api_of, body_of
from tinker_local.backend.scheduling.operations import as_api_error
from tinker_local.types import ApiError

log = logging.getLogger(__name__)
T = TypeVar("T")


def event(data: Any, name: str | None = None) -> bytes:
    """One event."""
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {json.dumps(data, separators=(',', ':'))}\n\n".encode("utf-8", "replace")


async def _left(receive: Receive) -> None:
    """Return when the client has closed the connection; the body was read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_left(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled if the client leaves; ClientDisconnect then."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_left(request.receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return await working
    finally:
        for one in (working, leaving):
            one.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


class EventStream(StreamingResponse):
    """Sends `events`, which are cancelled when the client leaves; `close` is called at the end in any case. An error of
    theirs is the last event, in the shape of the path's API."""

    def __init__(self, request: Request, events: AsyncIterator[bytes], close: Callable[[], None]) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(self._with_error(events), media_type="text/event-stream", headers=headers)
        self._request = request
        self._close = close

    async def _with_error(self, events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        api = api_of(self._request.url.path)
        try:
            async for each in events:
                yield each
        except Exception as error:
            if not isinstance(error, ApiError):
                log.exception("%s failed while it was answered", self._request.url.path)
            known = as_api_error(error)
            name = "error" if api == "anthropic" else None
            yield event(body_of(known, api), name)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_left(self._request, self.stream_response(send))
        except ClientDisconnect:
            pass
        finally:
            self._close()


class WholeAnswer(Response):
    """A JSON answer; `close` is called when it was sent, or the client has left."""

    def __init__(self, content: bytes, close: Callable[[], None]) -> None:
        super().__init__(content, media_type="application/json")
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._close()


async def begun(request: Request, events: AsyncIterator[bytes], close: Callable[[], None]) -> EventStream:
    """A stream of `events` once the first is there: until then, an error has its usual status."""
    try:
        first = await unless_left(request, anext(events))
    except BaseException:
        close()
        raise

    async def all_events() -> AsyncIterator[bytes]:
        yield first
        async for each in events:
            yield each

    return EventStream(request, all_events(), close)
