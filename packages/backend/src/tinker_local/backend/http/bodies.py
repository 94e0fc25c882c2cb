"""Reading request bodies: bounded before they are held, unpacked or parsed."""

import json
import math
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any, ClassVar, TypeVar

from fastapi import Request
from pydantic import ValidationError
from tinker_local.backend.heap import give_memory_back, unfilled
from tinker_local.backend.http.access import caller_of, check_own_body
from tinker_local.backend.rendering.text import check_text
from tinker_local.backend.scheduling.shared_bytes import SharedBytes
from tinker_local.backend.threads import PARSING
from tinker_local.types import Frozen, InvalidRequestError, TooManyRequestsError, invalid
from tinker_local.types.errors import brief

M = TypeVar("M", bound=Frozen)

Body = bytes | bytearray

MAX_GRADIENT_BYTES = 512 * 2**20
"""Of a forward/backward, as sent and as unpacked: one datum may hold many images. A chunk of the SDK is about 5 MB."""

MAX_IMAGE_BYTES = 128 * 2**20
"""Of a request for samples, for images in base64, besides what the context length allows."""

MAX_JSON_BYTES = 2**20
"""Of any other JSON body. Parsed JSON takes many times the memory of its text."""

MAX_JSON_VALUES = 2**16
"""In any JSON body that has no other bound."""

INLINE_BYTES = 32 * 1024
"""JSON up to this size is parsed on the event loop; larger bodies in a thread."""

MAX_RATIO, ANY_RATIO_BYTES = 200, 32 * 2**20
"""A zstd body may unpack to this many times its size, or to this many bytes whatever its size. (Real gradients shrink
to about a tenth; a bomb reaches a ratio of 30,000.)"""


PART_BYTES = 64 * 1024
"""Parts of a body that are smaller are joined as they come, so that a part takes about the memory of its bytes."""

JOINED_INLINE_BYTES = 2**20
"""A body up to this size is joined on the event loop."""

GIVEN_BACK_BYTES = 32 * 2**20
"""Of bodies that were freed, after which their memory goes back to the system: glibc keeps it, whatever its size. It
takes some 5 ms, in which other threads wait if they allocate; 512 MiB at once would take 100."""

MAX_BODY_BYTES = 2 * (MAX_GRADIENT_BYTES + 2**26)
"""Of all bodies that come or wait to be parsed. An owner may have as many as are left: half if it is alone, which is
one of the longest and some others."""

ALWAYS_TAKEN_BYTES = 64 * 1024
"""A body up to this size is taken, and not counted: polls, heartbeats and steps go on while gradients wait."""

BODY_BYTES = "tinker_local.body_bytes"
"""Where a request's scope has how many bytes its body had."""

_held = SharedBytes(MAX_BODY_BYTES)


class Incoming:
    """A body that is still coming, held once.

    One whose length was declared fills a buffer of that length, as soon as a first part of it is there. The parts of
    another are joined at its end, in a thread: a buffer that grows would be copied again and again, up to 32 MiB at a
    time, while the event loop and all threads wait.
    """

    freed: ClassVar[int] = 0
    """Bytes whose memory was not given back yet."""

    def __init__(self, declared: int | None = None) -> None:
        self.size = 0
        self._declared = 0 if declared is None else declared
        self._parts: list[bytes] = []
        self._small = bytearray()
        self._buffer: memoryview | None = None

    def append(self, part: bytes) -> None:
        if self._buffer is None and JOINED_INLINE_BYTES < self.size + len(part) <= self._declared:
            self._buffer = memoryview(unfilled(self._declared))
            for _ in self._moved(self._buffer):
                pass
        begin, self.size = self.size, self.size + len(part)
        if self._buffer is None:
            self._keep(part)
        elif self.size <= self._declared:
            self._buffer[begin : self.size] = part
        else:
            raise InvalidRequestError(f"body: more than the {self._declared} bytes of Content-Length")

    def _keep(self, part: bytes) -> None:
        if len(part) < PART_BYTES:
            self._small += part
            if len(self._small) < PART_BYTES:
                return
            part = b""
        if self._small:
            self._parts.append(bytes(self._small))
            self._small = bytearray()
        if part:
            self._parts.append(part)

    def _moved(self, buffer: memoryview) -> Iterator[int]:
        """Move the parts to the beginning of `buffer`; the length of each, which is freed."""
        end = 0
        self._parts = [*self._parts, bytes(self._small)][::-1]
        self._small = bytearray()
        while self._parts:
            begin, end = end, end + len(self._parts[-1])
            buffer[begin:end] = self._parts.pop()
            yield end - begin

    async def whole(self) -> Body:
        """The body, which this no longer has."""
        if self._buffer is None and self.size <= JOINED_INLINE_BYTES:
            return b"".join([*self._parts, bytes(self._small)])
        return self._taken() if self._buffer is not None else await PARSING.run(self._joined)

    def _joined(self) -> bytearray:
        """The parts in one; blocks, while other threads run in between."""
        self._buffer = memoryview(unfilled(self.size))
        for freed in self._moved(self._buffer):
            Incoming._count_freed(freed)
        return self._taken()

    def _taken(self) -> bytearray:
        assert self._buffer is not None
        buffer, whole = self._buffer, self._buffer.obj
        self._buffer = None
        buffer.release()
        assert isinstance(whole, bytearray)
        del whole[self.size :]  # of a body that is shorter than declared
        return whole

    def drop(self) -> None:
        """Free what is here, while other threads run, and count what was freed elsewhere; blocks."""
        left, self._buffer = self.size, None
        while self._parts:
            left -= len(self._parts[-1])
            Incoming._count_freed(len(self._parts.pop()))
        Incoming._count_freed(left)

    @staticmethod
    def _count_freed(size: int) -> None:
        Incoming.freed += size  # two threads may miss some of it, and give back a little later
        if Incoming.freed >= GIVEN_BACK_BYTES:
            Incoming.freed = 0
            give_memory_back()


@asynccontextmanager
async def body_of(
    request: Request, limit: int = MAX_JSON_BYTES, values: float = MAX_JSON_VALUES
) -> AsyncIterator[Body]:
    """The body as sent, which is to be parsed in this context: until it ends, its bytes count.

    InvalidRequestError as soon as it is over `limit` bytes, or has more than `values` JSON values (infinity: a body of
    another kind); TooManyRequestsError if its owner holds more of such bodies than are left.

    A JSON text has at most one value for each comma and each opening bracket. They are counted as they come, at the
    speed of memory; the parser needs a hundred times as long, and memory for each.
    """
    given = request.headers.get("content-length", "")
    declared = int(given) if given.isdecimal() else None
    if declared is not None and declared > limit:
        raise InvalidRequestError(f"body: {given} bytes are over the limit of {limit}")
    found, counted = 1, 0
    incoming, owner = Incoming(declared), caller_of(request).owner
    try:
        async for part in request.stream():
            incoming.append(part)
            if incoming.size > limit:
                raise InvalidRequestError(f"body: over the limit of {limit} bytes")
            if incoming.size > ALWAYS_TAKEN_BYTES:
                _held.take(owner, incoming.size - counted)
                counted = incoming.size
                _check_held(owner)
            if values < math.inf:
                found += sum(part.count(mark) for mark in (b",", b"[", b"{"))
                if found > values:
                    raise InvalidRequestError(
                        f"body: {incoming.size} bytes of it have more than {values} JSON values, the most that this "
                        "request can need"
                    )
        request.scope[BODY_BYTES] = incoming.size
        yield await incoming.whole()
    finally:
        if incoming.size > JOINED_INLINE_BYTES:
            PARSING.run(incoming.drop)
        if counted:
            _held.give(owner, counted)


def _check_held(owner: str) -> None:
    """TooManyRequestsError if `owner` holds more than is left."""
    if _held.over(owner):
        raise TooManyRequestsError(
            f"body: {_held.of(owner)} bytes of requests of the owner {owner!r} come or wait to be parsed, and "
            f"{_held.total - _held.of(owner)} of others; an owner may have as many as are left of {_held.most}: send "
            "fewer at once",
            retry_after=1.0,
        )


async def discard_body(request: Request) -> None:
    """Read the body and drop it."""
    async for _ in request.stream():
        pass


def unpack(body: Body, encoding: str | None) -> Body:
    """The body without its Content-Encoding (zstd or none); blocks, so call it in a thread."""
    if encoding in (None, "", "identity"):
        return body
    if encoding != "zstd":
        raise InvalidRequestError(f"Content-Encoding: {encoding!r} is not supported; send zstd or nothing")
    import zstandard

    # The frame declares its length: check it before unpacking, and refuse a frame that turns out longer or shorter.
    # (A streaming reader accepts a truncated frame without an error.)
    limit = min(MAX_GRADIENT_BYTES, max(ANY_RATIO_BYTES, MAX_RATIO * len(body)))
    try:
        size = zstandard.frame_content_size(body)
        if size < 0:
            raise InvalidRequestError("body: the zstd frame does not say its content size; compress in one call")
        if size > limit:
            raise InvalidRequestError(
                f"body: {len(body)} bytes of zstd would unpack to {size} bytes, the limit is {limit}"
            )
        return zstandard.ZstdDecompressor().decompress(body, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise InvalidRequestError(f"body: {len(body)} bytes are not one whole zstd frame: {error}") from None


async def parse(
    request: Request,
    model: type[M],
    limit: int = MAX_JSON_BYTES,
    values: int = MAX_JSON_VALUES,
    check: Callable[[Body], None] | None = None,
) -> M:
    """The JSON body as `model`, if it has at most `limit` bytes and `values` values and names nothing of another
    owner; an empty body reads as `{}`. `check`: called in a thread with one that is not small, before it is parsed."""
    async with body_of(request, limit, values) as sent:
        if check is not None and len(sent) > INLINE_BYTES:
            await PARSING.run(check, sent)
        body = await parse_json(sent or b"{}", model)
    await check_own_body(request, body)
    return body


async def parse_json(body: Body, model: type[M]) -> M:
    """`body` as `model`; InvalidRequestError names what is wrong."""
    if len(body) <= INLINE_BYTES:
        return validate(body, model)
    return await PARSING.run(validate, body, model)


def validate(body: Body, model: type[M]) -> M:
    """`parse_json` that blocks."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        if error.errors(include_url=False, include_context=False, include_input=False)[0]["type"] == "json_invalid":
            _check_pairs(body)
        raise invalid(error) from None


def _check_pairs(body: Body) -> None:
    """Name the field of a text with half of a surrogate pair, which Python writes and pydantic calls a broken
    escape."""
    try:
        whole = json.loads(bytes(body).decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError):
        return
    for path, text in _texts(whole):
        check_text(text, path)


def _texts(whole: Any) -> Iterator[tuple[str, str]]:
    """Every text of JSON with its field, in order; names before what they name."""
    left = [("", whole)]
    while left:
        path, value = left.pop()
        if isinstance(value, str):
            yield path or "body", value
        elif isinstance(value, dict):
            prefix = f"{path}." if path else ""
            left += [(f"{prefix}{_short(name)}", inner) for name, inner in reversed(value.items())]
            left += [(f"{path or 'body'}: the name {brief(name)}", name) for name in reversed(value)]
        elif isinstance(value, list):
            left += reversed([(f"{path}[{at}]", inner) for at, inner in enumerate(value)])


def _short(name: str) -> str:
    return name if len(name) <= 80 else brief(name)
