"""Changes to valid input: bytes, JSON values, protobuf fields, chunks of PNG files."""

import json
import random
import struct
import zlib
from collections.abc import Sequence
from typing import Any

NUMBERS = (0, 1, -1, 127, 128, 255, 256, 2**15, 2**16, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1)
TEXTS = (
    "",
    "\0",
    "\ud800",
    "é",
    "x" * 300,
    "../..",
    "%00",
    "tinker://a/weights/b",
    "NaN",
    "1e999",
    "😀",
    "\x7f",
    "a:b:c",
)
VALUES: tuple[Any, ...] = (None, True, False, [], {}, [[]], [None], 0.5, 1e308, -0.0, 1e-320, *NUMBERS, *TEXTS)


def of_bytes(rng: random.Random, data: bytes, other: bytes = b"") -> bytes:
    """One to four changes anywhere."""
    found = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randint(0, len(found))
        match rng.randrange(8):
            case 0 if found:
                found[at % len(found)] ^= 1 << rng.randrange(8)
            case 1:
                found[at:at] = rng.randbytes(rng.choice((1, 2, 4, 8)))
            case 2:
                del found[at : at + rng.choice((1, 2, 4, 64))]
            case 3:
                found[at : at + 4] = rng.choice((b"\xff\xff\xff\xff", b"\0\0\0\0", b"\x7f\xff\xff\xff", b"\x80\0\0\0"))
            case 4:
                del found[at:]
            case 5:
                piece = found[at : at + rng.randint(1, 64)]
                found[at:at] = piece * rng.choice((1, 2, 50))
            case 6 if other:
                start = rng.randrange(len(other))
                found[at : at + rng.randint(0, 32)] = other[start : start + rng.randint(1, 64)]
            case _:
                found[at : at + 1] = bytes([rng.choice((0, 1, 8, 9, 10, 13, 32, 34, 44, 58, 127, 128, 255))])
    return bytes(found)


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where something is in a JSON value."""
    found = [at]
    if isinstance(value, dict):
        for key in value:
            found += places(value[key], (*at, key))
    elif isinstance(value, list):
        for index in range(min(len(value), 8)):
            found += places(value[index], (*at, index))
    return found


def replaced(value: Any, at: tuple[Any, ...], new: Any) -> Any:
    """A copy with `new` in one place."""
    if not at:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[at[0]] = replaced(value[at[0]], at[1:], new)
    return copy


def of_json(rng: random.Random, value: Any) -> bytes:
    """One to three values changed, keys added or left out; with NaN and surrogates, which Python can write."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        at = rng.choice(places(value))
        part = value
        for step in at:
            part = part[step]
        new = rng.choice(VALUES)
        if isinstance(part, dict) and rng.random() < 0.5:
            new = {**part, rng.choice(("type", "x", "", *map(str, part))): new}
            if new and rng.random() < 0.3:
                del new[rng.choice(list(new))]
        elif isinstance(part, list) and rng.random() < 0.5:
            new = part + [new] * rng.choice((1, 2, 40))
        elif isinstance(part, int | float) and not isinstance(part, bool) and rng.random() < 0.6:
            new = rng.choice((part + 1, -part, part * 2**31, float("nan"), float("inf"), float(part), str(part)))
        value = replaced(value, at, new)
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (ValueError, OverflowError):
        text = "null"
    if rng.random() < 0.05:
        text = text.replace(": ", ": " + rng.choice(("[" * 2000, "9" * 5000, "-", "1e400", "{" * 50)), 1)
    return text.encode("utf-8", "surrogatepass")


Field = tuple[int, int, Any]


def fields_of(data: bytes) -> list[Field] | None:
    """(number, wire type, value) of each field; None if it is not protobuf."""
    found, at = [], 0
    while at < len(data):
        value: Any = None
        tag, at = _varint(data, at)
        if at < 0 or tag >> 3 == 0:
            return None
        kind = tag & 7
        if kind == 0:
            value, at = _varint(data, at)
        elif kind == 2:
            size, at = _varint(data, at)
            if at < 0 or at + size > len(data):
                return None
            value, at = data[at : at + size], at + size
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
            value, at = data[at : at + size], at + size
        else:
            return None
        if at < 0 or at > len(data):
            return None
        found.append((tag >> 3, kind, value))
    return found


def message_of(fields: Sequence[Field]) -> bytes:
    found = bytearray()
    for number, kind, value in fields:
        found += varint(number << 3 | kind)
        if kind == 0:
            found += varint(value)
        elif kind == 2:
            found += varint(len(value)) + value
        else:
            found += value
    return bytes(found)


def of_protobuf(rng: random.Random, data: bytes, depth: int = 0) -> bytes:
    """A field changed, somewhere inside: its content, number, type or count."""
    fields = fields_of(data)
    if not fields or (depth > 1 and rng.random() < 0.2):
        return of_bytes(rng, data)
    at = rng.randrange(len(fields))
    number, kind, value = fields[at]
    match rng.randrange(9):
        case 0:
            fields[at] = (rng.choice((1, 2, 3, 4, 5, 6, 7, 8, 15, 16, 1000, 2**29 - 1)), kind, value)
        case 1:
            del fields[at]
        case 2:
            fields[at:at] = [fields[at]] * rng.choice((1, 2, 100))
        case 3:
            rng.shuffle(fields)
        case 4:
            fields.append((number, 0, rng.choice(NUMBERS) % 2**64))
        case 5:
            fields.append((number, 2, rng.randbytes(rng.choice((0, 1, 4, 8, 24)))))
        case _:
            if kind == 2:
                fields[at] = (number, kind, of_protobuf(rng, value, depth + 1))
            elif kind == 0:
                fields[at] = (number, kind, rng.choice(NUMBERS) % 2**64)
            else:
                fields[at] = (number, kind, rng.choice((b"\0", b"\xff", b"\x7f", b"\xf0")) * len(value))
    return message_of(fields)


def varint(number: int) -> bytes:
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    return bytes([*found, number])


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Number and the place after it; -1 if there is none."""
    number = shift = 0
    while at < len(data) and shift < 70:
        number |= (data[at] & 127) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 128:
            return number, at
    return 0, -1


def of_png(rng: random.Random, data: bytes) -> bytes:
    """A chunk of a PNG changed, doubled or left out, with right checksums, so that what is inside is read."""
    chunks, at = [], 8
    while at + 12 <= len(data):
        (size,) = struct.unpack(">I", data[at : at + 4])
        chunks.append((data[at + 4 : at + 8], data[at + 8 : at + 8 + size]))
        at += 12 + size
    if not chunks:
        return of_bytes(rng, data)
    at = rng.randrange(len(chunks))
    kind, content = chunks[at]
    match rng.randrange(5):
        case 0:
            chunks[at:at] = [chunks[at]] * rng.choice((1, 3))
        case 1:
            del chunks[at]
        case 2:
            chunks.insert(
                at,
                (
                    rng.choice((b"tRNS", b"PLTE", b"iCCP", b"zTXt", b"eXIf", b"acTL", b"fcTL", b"fdAT", b"gAMA")),
                    rng.randbytes(rng.randrange(40)),
                ),
            )
        case _:
            chunks[at] = (kind, of_bytes(rng, content))
    parts = [data[:8]]
    for kind, content in chunks:
        parts.append(struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content)))
    return b"".join(parts)
