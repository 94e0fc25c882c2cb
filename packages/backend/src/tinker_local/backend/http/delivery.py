"""Sends large answers as fast as they are read, and bounds what an owner's clients leave unread.

uvicorn takes a whole body at once and keeps it until the client has read it, so that a request would be over for
everything that counts requests while its answer still takes hundreds of megabytes.
"""

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from tinker_local.backend.http import error_responses
from tinker_local.backend.http.access import CALLER
from tinker_local.backend.scheduling.shared_bytes import SharedBytes
from tinker_local.types import TooManyRequestsError

PIECE_BYTES = 256 * 1024
"""Of an answer that are sent at once; an answer of no more is not counted."""

MAX_ANSWER_BYTES = 2**30
"""Of all answers that are being sent. An owner may have as many as are left."""


class Delivery:
    """Sends a large body in pieces, each when the client has read those before. Answers 429 in place of one that is too
    much beside others that clients of the same owner have not read; a single one is always sent."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._unread = SharedBytes(MAX_ANSWER_BYTES)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start: Message | None = None
        refused = False

        async def begin(send: Send) -> None:
            nonlocal start
            if start is not None and not refused:
                begun, start = start, None
                await send(begun)

        async def sending(message: Message) -> None:
            nonlocal start, refused
            if message["type"] == "http.response.start":
                start = message  # the answer may still become another
                return
            body, owner = message.get("body", b""), getattr(scope.get(CALLER), "owner", "")
            large = len(body) if len(body) > PIECE_BYTES else 0
            if not large:
                await begin(send)
                if not refused:
                    await send(message)
                return
            self._unread.take(owner, large)
            try:
                if start is not None and self._too_much(owner, large):
                    refused = True
                    await error_responses.answer(self._why(owner, large), scope["path"])(scope, receive, send)
                if refused:
                    return
                await begin(send)
                await _in_pieces(message, send)
            finally:
                self._unread.give(owner, large)

        await self._app(scope, receive, sending)

    def _too_much(self, owner: str, size: int) -> bool:
        return self._unread.of(owner) > size and self._unread.over(owner)

    def _why(self, owner: str, size: int) -> TooManyRequestsError:
        return TooManyRequestsError(
            f"{self._unread.of(owner) - size} bytes of answers to the owner {owner!r} have not been read, and this one "
            f"has {size}; an owner may have as many as are left of {self._unread.most}: read those first",
            retry_after=1.0,
        )


async def _in_pieces(message: Message, send: Send) -> None:
    body = memoryview(message["body"])
    for begin in range(0, len(body), PIECE_BYTES):
        end = begin + PIECE_BYTES
        more = end < len(body) or message.get("more_body", False)
        await send({"type": message["type"], "body": bytes(body[begin:end]), "more_body": more})
