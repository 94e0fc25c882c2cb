"""Reading request bodies: bounded before they are held, unpacked or parsed."""

import asyncio
from typing import TypeVar

from fastapi import Request
from pydantic import ValidationError
from tinker_local.types import Frozen, InvalidRequestError, invalid

M = TypeVar("M", bound=Frozen)

MAX_BODY_BYTES = 512 * 2**20
"""Of a body as sent and as unpacked. A single datum or image may be large; a chunk of the SDK is about 5 MB."""

INLINE_BYTES = 32 * 1024
"""JSON up to this size is parsed on the event loop; larger bodies (images) in a thread."""


async def read_body(request: Request) -> bytes:
    """The body as sent; InvalidRequestError as soon as it is over the limit."""
    declared = request.headers.get("content-length")
    if declared is not None and declared.isdigit() and int(declared) > MAX_BODY_BYTES:
        raise InvalidRequestError(f"the body of {declared} bytes is over the limit of {MAX_BODY_BYTES}")
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > MAX_BODY_BYTES:
            raise InvalidRequestError(f"the body is over the limit of {MAX_BODY_BYTES} bytes")
        parts.append(part)
    return b"".join(parts)


def unpack(body: bytes, encoding: str | None) -> bytes:
    """The body without its Content-Encoding (zstd or none); blocks, so call it in a thread."""
    if encoding in (None, "", "identity"):
        return body
    if encoding != "zstd":
        raise InvalidRequestError(f"Content-Encoding: {encoding!r} is not supported; send zstd or nothing")
    import zstandard

    unpacked = bytearray()
    try:
        with zstandard.ZstdDecompressor().stream_reader(body, read_across_frames=True) as reader:
            while part := reader.read(2**20):
                unpacked += part
                if len(unpacked) > MAX_BODY_BYTES:
                    raise InvalidRequestError(
                        f"the body of {len(body)} bytes unpacks to more than the limit of {MAX_BODY_BYTES}"
                    )
    except zstandard.ZstdError as error:
        raise InvalidRequestError(f"the body is not valid zstd: {error}") from None
    if body and not unpacked:
        raise InvalidRequestError("the body is not valid zstd: it holds no frame")
    return bytes(unpacked)


async def parse(request: Request, model: type[M]) -> M:
    """The JSON body as `model`; an empty body reads as `{}`."""
    body = await read_body(request) or b"{}"
    if len(body) <= INLINE_BYTES:
        return validate(body, model)
    return await asyncio.to_thread(validate, body, model)


def validate(body: bytes, model: type[M]) -> M:
    """`body` as `model`; InvalidRequestError names what is wrong."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise invalid(error) from None
