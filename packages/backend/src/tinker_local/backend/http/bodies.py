"""Reading request bodies: bounded before they are held, unpacked or parsed."""

import math
from collections import Counter
from typing import ClassVar, TypeVar

from fastapi import Request
from pydantic import ValidationError
from tinker_local.backend.http.access import caller_of, check_own_body
from tinker_local.backend.rendering.decoding import give_memory_back
from tinker_local.backend.threads import PARSING
from tinker_local.types import Frozen, InvalidRequestError, TooManyRequestsError, invalid

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
"""A body up to this size is joined on the event loop; a larger one in a thread."""

GIVEN_BACK_BYTES = 32 * 2**20
"""Of parts that were freed, after which their memory goes back to the system: glibc keeps it, whatever its size. It
takes some 5 ms, in which other threads wait if they allocate; 512 MiB at once would take 100."""


class Parts:
    """A body that is still coming. A buffer that grows would be copied again and again, up to 32 MiB at a time, while
    the event loop and all threads wait; and freed at once."""

    freed: ClassVar[int] = 0
    """Bytes whose memory was not given back yet."""

    def __init__(self) -> None:
        self.size = 0
        self._parts: list[bytes] = []
        self._small = bytearray()

    def append(self, part: bytes) -> None:
        self.size += len(part)
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

    def joined(self) -> bytes:
        """The whole. Other threads run meanwhile, since all parts are bytes."""
        return b"".join([*self._parts, bytes(self._small)])

    def drop(self) -> None:
        """Free the parts, while other threads run, and give the memory back to the system; blocks."""
        while self._parts:
            Parts.freed += len(self._parts.pop())  # two threads may miss some of it, and give back a little later
            if Parts.freed >= GIVEN_BACK_BYTES:
                Parts.freed = 0
                give_memory_back()


async def read_body(request: Request, limit: int = MAX_JSON_BYTES, values: float = MAX_JSON_VALUES) -> bytes:
    """The body as sent; InvalidRequestError as soon as it is over `limit` bytes, or has more than `values` JSON values
    (infinity: a body of another kind).

    A JSON text has at most one value for each comma and each opening bracket. They are counted as they come, at the
    speed of memory; the parser needs a hundred times as long, and memory for each.
    """
    declared = request.headers.get("content-length")
    if declared is not None and declared.isdigit() and int(declared) > limit:
        raise InvalidRequestError(f"body: {declared} bytes are over the limit of {limit}")
    found = 1
    parts, owner = Parts(), caller_of(request).owner
    try:
        async for part in request.stream():
            parts.append(part)
            _unfinished[owner] += len(part)
            if parts.size > limit:
                raise InvalidRequestError(f"body: over the limit of {limit} bytes")
            _check_unfinished(owner)
            if values < math.inf:
                found += sum(part.count(mark) for mark in (b",", b"[", b"{"))
                if found > values:
                    raise InvalidRequestError(
                        f"body: {parts.size} bytes of it have more than {values} JSON values, the most that this "
                        "request can need"
                    )
        return parts.joined() if parts.size <= JOINED_INLINE_BYTES else await PARSING.run(parts.joined)
    finally:
        if parts.size > JOINED_INLINE_BYTES:
            PARSING.run(parts.drop)
        _unfinished[owner] -= parts.size
        if not _unfinished[owner]:
            del _unfinished[owner]


MAX_UNFINISHED_BYTES, MAX_UNFINISHED_BYTES_OF_AN_OWNER = 2**30, MAX_GRADIENT_BYTES
"""Of all bodies that have begun to come and have not ended."""

_unfinished: Counter[str] = Counter()


def _check_unfinished(owner: str) -> None:
    """TooManyRequestsError if more is held of bodies that have not ended."""
    for held, most, whose in (
        (_unfinished[owner], MAX_UNFINISHED_BYTES_OF_AN_OWNER, f"the owner {owner!r}"),
        (_unfinished.total(), MAX_UNFINISHED_BYTES, "all clients"),
    ):
        if held > most:
            raise TooManyRequestsError(
                f"body: {held} bytes of unfinished requests of {whose} are held, the most is {most}", retry_after=1.0
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


async def parse(request: Request, model: type[M], limit: int = MAX_JSON_BYTES, values: int = MAX_JSON_VALUES) -> M:
    """The JSON body as `model`, if it has at most `limit` bytes and `values` values and names nothing of another
    owner; an empty body reads as `{}`."""
    body = await parse_json(await read_body(request, limit, values) or b"{}", model)
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
        raise invalid(error) from None
