"""Protobuf before it becomes objects: the fields of a message, found without building any.

A few hundred bytes of zstd can hold millions of empty messages. Each of them would become several Python objects, so
they are counted first. One large field is skipped in one step.
"""

from collections.abc import Iterator
from typing import TypeVar

from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet
from tinker_local.types.errors import InvalidRequestError, UnsupportedError

M = TypeVar("M", bound=Message)

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
"""How a field is written. (There are groups too, which this schema and its like do not use.)"""

_FIXED = {FIXED64: 8, FIXED32: 4}

UNKNOWN_BYTES = 4096
"""If the unknown fields of a message are larger, in bytes, the error names their size instead of their numbers."""


class NotProtobuf(ValueError):
    """Bytes that no protobuf message begins with."""


def fields(raw: bytes | bytearray) -> Iterator[tuple[int, int, int, int, int]]:
    """Number, way of writing, begin of the field, begin of its value and end, of each field of `raw`, in order.

    Raises NotProtobuf where `raw` is not protobuf.
    """
    at, size = 0, len(raw)
    while at < size:
        begin = at
        tag, at = _varint(raw, at)
        number, kind = tag >> 3, tag & 7
        value = at
        if kind == BYTES:
            length, value = _varint(raw, at)
            at = value + length
        elif kind == VARINT:
            _, at = _varint(raw, at)
        elif kind in _FIXED:
            at += _FIXED[kind]
        else:
            raise NotProtobuf(f"no field at byte {begin}")
        if number == 0 or at > size:
            raise NotProtobuf(f"no whole field at byte {begin}")
        yield number, kind, begin, value, at


def varint(number: int) -> bytes:
    """A number that is not negative, as it is written."""
    written = bytearray()
    while number > 127:
        written.append(number & 127 | 128)
        number >>= 7
    written.append(number)
    return bytes(written)


def _varint(raw: bytes | bytearray, at: int) -> tuple[int, int]:
    """The number at `at`, of at most 64 bits, and where it ends."""
    found = 0
    for shift, byte in enumerate(raw[at : at + 10]):
        found |= (byte & 127) << 7 * shift
        if byte < 128:
            return found, at + shift + 1
    raise NotProtobuf(f"no number at byte {at}")


def parse(message: M, body: bytes | bytearray, where: str = "body") -> M:
    """`message` filled from `body`; InvalidRequestError if that is not protobuf."""
    try:
        message.ParseFromString(body)  # type: ignore[arg-type]  # the stub lacks bytearray
    except DecodeError as error:
        raise InvalidRequestError(
            f"{where}: {len(body)} bytes that are not a {type(message).__name__} ({error})"
        ) from None
    return message


def refuse_unknown_fields(message: Message, where: str) -> None:
    """UnsupportedError for fields of `message` itself that the schema lacks: a later SDK gives them a meaning.

    Each of them would become an object, so that those of a large message are measured before, which takes a copy.
    """
    if message.ByteSize() > UNKNOWN_BYTES:
        known = type(message)()
        known.CopyFrom(message)
        known.DiscardUnknownFields()
        found = message.ByteSize() - known.ByteSize()
        if not found:
            return
        if found > UNKNOWN_BYTES:
            raise UnsupportedError(f"{where}: {found} bytes of fields that are not known to this server")
    unknown = UnknownFieldSet(message)
    if len(unknown):
        raise unknown_fields(where, (unknown[index].field_number for index in range(len(unknown))))


def unknown_fields(where: str, numbers: Iterator[int] | set[int]) -> UnsupportedError:
    """The error for fields of these numbers."""
    return UnsupportedError(f"{where}: field numbers {sorted(set(numbers))} are not known to this server")
