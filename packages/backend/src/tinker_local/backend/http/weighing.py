"""What a large body holds, before anything is built of it: JSON values outside of texts, and parts of a conversation.

Both bounds follow from the context. Each message takes some positions of it (its beginning, its role, its end), and
each value at least a fraction of one.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic_core import from_json
from tinker_local.types import InvalidRequestError

SLICE_BYTES = 2**20
"""Looked at in one go, in which other threads run."""

FREE_VALUES, VALUES_PER_POSITION = 2**16, 2
"""Values of a conversation with everything around it, such as the schemas of tools; and more for each position."""

FREE_PARTS, POSITIONS_PER_PART = 1024, 2
"""Messages, their parts and their calls of tools: so many for any context, and one more for so many positions."""

_QUOTE, _BACKSLASH, _COMMA, _ARRAY, _OBJECT = b'"\\,[{'


def check_conversation(body: bytes | bytearray, context: int) -> None:
    """InvalidRequestError if a conversation has more values or parts than one of `context` positions may have. Blocks
    for a millisecond for each megabyte and for what the values take."""
    most = FREE_VALUES + VALUES_PER_POSITION * context
    found = 1
    for count in _values(body):
        found += count
        if found > most:
            raise InvalidRequestError(
                f"body: more than {most} JSON values, the most of a conversation with a context of {context} tokens"
            )
    try:
        whole = from_json(body)
    except ValueError:
        return  # told where the body is read
    parts, most = _parts(whole), FREE_PARTS + context // POSITIONS_PER_PART
    if parts > most:
        raise InvalidRequestError(
            f"messages: {parts} messages, parts and calls of tools are more than {most}, the most with a context of "
            f"{context} tokens"
        )


def _values(body: bytes | bytearray) -> Iterator[int]:
    """Commas and opening brackets outside of texts, slice by slice: one for each JSON value but the first."""
    whole = np.frombuffer(body, np.uint8)
    within, escapes = False, 0
    for begin in range(0, len(whole), SLICE_BYTES):
        part = whole[begin : begin + SLICE_BYTES]
        ends = _unescaped_quotes(part, escapes)
        inside = np.logical_xor.accumulate(ends) ^ within
        marks = (part == _COMMA) | (part == _ARRAY) | (part == _OBJECT)
        yield int(np.count_nonzero(marks & ~inside))
        within = bool(inside[-1])
        run = len(part) - 1 - _last_other(part)
        escapes = (run + (escapes if run == len(part) else 0)) % 2


def _unescaped_quotes(part: npt.NDArray[np.uint8], before: int) -> npt.NDArray[np.bool_]:
    """Where a quote has an even number of backslashes before it. `before`: of those that end the slice before."""
    quotes: npt.NDArray[np.bool_] = part == _QUOTE
    if not before and not (part == _BACKSLASH).any():
        return quotes
    at = np.arange(len(part), dtype=np.int32)
    last = np.maximum.accumulate(np.where(part != _BACKSLASH, at, np.int32(-1)))
    # The backslashes just before a byte are those behind the last other byte before it.
    other = np.concatenate([np.array([-1], np.int32), last[:-1]])
    run = at - 1 - other + np.where(other < 0, before, 0)
    even: npt.NDArray[np.bool_] = run % 2 == 0
    return quotes & even


def _last_other(part: npt.NDArray[np.uint8]) -> int:
    """Where the last byte is that is not a backslash; -1 if there is none."""
    others = np.flatnonzero(part[-64:] != _BACKSLASH)
    if len(others):
        return len(part) - len(part[-64:]) + int(others[-1])
    others = np.flatnonzero(part != _BACKSLASH)
    return int(others[-1]) if len(others) else -1


def _parts(whole: Any) -> int:
    """Messages, their parts and their calls."""
    if not isinstance(whole, dict):
        return 0
    messages = _list(whole.get("messages"))
    texts = len(_list(whole.get("system")))
    inner = (_list(message.get(name)) for message in messages if isinstance(message, dict) for name in _LISTS)
    return texts + len(messages) + sum(map(_count, inner))


_LISTS = ("content", "tool_calls")


def _list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else ()


def _count(parts: Sequence[Any]) -> int:
    """Parts, with those of results of tools."""
    return len(parts) + sum(len(_list(part.get("content"))) for part in parts if isinstance(part, dict))
