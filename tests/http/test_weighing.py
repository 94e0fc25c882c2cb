"""What a body holds is counted before it is parsed, without being fooled by what its texts hold."""

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tinker_local.backend.http import weighing
from tinker_local.backend.http.weighing import FREE_PARTS, FREE_VALUES, check_conversation
from tinker_local.types import InvalidRequestError

LETTERS = st.text(st.sampled_from('a,[{"\\\n é'), max_size=12)
VALUES = st.recursive(
    st.none() | st.integers() | LETTERS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(LETTERS, inner, max_size=4),
    max_leaves=20,
)


@given(value=VALUES, size=st.integers(1, 40), ascii_only=st.booleans())
def test_values_are_those_outside_of_texts_wherever_the_slices_are_cut(value: Any, size: int, ascii_only: bool) -> None:
    body = json.dumps(value, ensure_ascii=ascii_only).encode()
    outside = re.sub(rb'"(?:[^"\\]|\\.)*"', b"", body)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weighing, "SLICE_BYTES", size)
        found = sum(weighing._values(body))
    assert found == sum(outside.count(mark) for mark in (b",", b"[", b"{"))


def body_of(messages: list[Any], **more: Any) -> bytes:
    return json.dumps({"model": "m", "messages": messages, **more}).encode()


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (body_of([{"role": "user", "content": ""}] * (FREE_PARTS + 33)), f"{FREE_PARTS + 33} messages, parts"),
        (
            body_of([{"role": "user", "content": [{"type": "text", "text": ""}] * (FREE_PARTS + 40)}]),
            f"{FREE_PARTS + 41} messages, parts",
        ),
        (
            body_of([{"role": "assistant", "tool_calls": [{"id": "a"}] * (FREE_PARTS + 40)}]),
            f"{FREE_PARTS + 41} messages, parts",
        ),
        (
            body_of([{"role": "user", "content": [{"type": "tool_result", "content": [{"type": "text"}] * 2000}]}]),
            "2002 messages, parts",
        ),
        (
            body_of([], structured_outputs={"json": {"enum": [1] * 100_000}}),
            f"more than {FREE_VALUES + 128} JSON values",
        ),
    ],
    ids=["messages", "parts", "calls", "parts of results", "schema"],
)
def test_more_than_a_context_has_room_for_is_refused_before_it_is_built(body: bytes, told: str) -> None:
    with pytest.raises(InvalidRequestError, match=told):
        check_conversation(body, 64)


def test_texts_of_any_kind_and_bodies_that_are_no_conversation_pass() -> None:
    check_conversation(body_of([{"role": "user", "content": ",[{" * 100_000}] * FREE_PARTS), 64)
    for body in (b"", b"[", b"1", b'{"messages": 3, "system": "a"}', b'{"messages": [1, {"content": "a"}]}'):
        check_conversation(body, 64)
