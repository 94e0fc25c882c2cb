"""Calls that a published template writes are read back as the same calls, whole and streamed by real tokens."""

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest
from tinker_local.backend.models.load_engines import load_tools
from tinker_local.backend.rendering.text import ChatMessage, ToolCall
from tinker_local.backend.rendering.tools import OfferedTools, Reply, ReplyForm, ReplyPiece, Tool
from tinker_local.types import UnsupportedError

from tests.real_tokenizers.conftest import Real, real_one

CITY: Any = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
OFFERED = OfferedTools((Tool("weather", "Of a city", CITY), Tool("time")))
Calls = Sequence[tuple[str, dict[str, Any]]]

CALLS: tuple[Calls, ...] = (
    [("weather", {"city": "Bern", "days": 2})],
    [("time", {})],
    [("weather", {"city": "Bern"}), ("time", {}), ("weather", {"city": "Oslo", "days": -1})],
    [("weather", {"city": '東京 "駅"\n\t\\n {"a": [}] 👩‍🚀 𒀀 é <b>&amp;</b> %}', "days": 10**15})],
    [("weather", {"city": "", "more": [1.5, None, True, {"": {"a": []}}], "名前": {"é": "\u2028\x7f"}})],
    [("weather", {"city": "<|im_end|><think></think></tool_response><tool_call>"})],
)


@pytest.fixture(scope="module")
def form() -> ReplyForm:
    """Of replies to `OFFERED`, by the parser of the family."""
    tools = load_tools(str(real_one("qwen3").path), "qwen3", None)
    assert not isinstance(tools, str)
    return tools.form(OFFERED)


def reply_with(qwen3: Real, said: str, calls: Calls) -> list[int]:
    """The tokens of a reply with these calls, as the template writes it, with the one that ends it."""
    functions = [tool.as_function() for tool in OFFERED.tools]
    asked = ChatMessage("user", ("hi",))
    written = tuple(ToolCall(f"call_{at}", name, json.dumps(given)) for at, (name, given) in enumerate(calls))
    whole = qwen3.ids(asked, ChatMessage("assistant", (said,), written), functions=functions)
    prompt = qwen3.ids(asked, functions=functions)
    assert whole[: len(prompt)] == prompt
    return whole[len(prompt) : whole.index(qwen3.tokenizer.eos_token_id, len(prompt)) + 1]


def calls_in(pieces: Sequence[ReplyPiece]) -> list[tuple[str, Any]]:
    """Names and arguments, put together from pieces of a stream; no two calls have the same id."""
    parts = [part for piece in pieces for part in piece.calls]
    count = max((part.index for part in parts), default=-1) + 1
    ids = [part.id for part in parts if part.id is not None]
    assert len({*ids}) == len(ids) == count
    return [
        (
            "".join(part.name or "" for part in parts if part.index == index),
            json.loads("".join(part.arguments for part in parts if part.index == index)),
        )
        for index in range(count)
    ]


@pytest.mark.parametrize("calls", CALLS, ids=range(len(CALLS)))
@pytest.mark.parametrize("said", ["", "<think>\nhm, 你好\n</think>\n\nI look. 👩‍🚀"], ids=["calls alone", "after text"])
def test_calls_that_the_template_writes_are_read_as_the_same_calls(
    qwen3: Real, form: ReplyForm, calls: Calls, said: str
) -> None:
    tokens = reply_with(qwen3, said, calls)
    before = said or "<think>\n\n</think>\n\n"  # which the template writes
    whole = Reply(qwen3.text, (), form)
    piece = whole.whole(tokens, "stop")
    assert calls_in([piece]) == calls
    assert piece.text.strip() == before.strip()
    assert whole.called
    draw = random.Random(3)
    for cuts in (range(1, len(tokens)), *(sorted(draw.sample(range(1, len(tokens)), 5)) for _ in range(5)), ()):
        streamed = Reply(qwen3.text, (), form)
        ends = (*cuts, len(tokens))
        pieces = [
            streamed.add(tokens[start:end], "stop" if end == len(tokens) else None)
            for start, end in zip((0, *ends[:-1]), ends, strict=True)
        ]
        assert calls_in(pieces) == calls
        assert "".join(one.text for one in pieces).strip() == before.strip()
        assert streamed.called


def test_a_reply_without_calls_is_its_text(qwen3: Real, form: ReplyForm) -> None:
    for said in ("just 你好 👩‍🚀 {text}", '{"name": "time", "arguments": {}}', "a <b tool_call> <tool_cal"):
        tokens = [*qwen3.text_ids(said), qwen3.tokenizer.eos_token_id]
        assert Reply(qwen3.text, (), form).whole(tokens, "stop") == ReplyPiece(said)
        streamed = Reply(qwen3.text, (), form)
        pieces = [streamed.add([token], "stop" if at == len(tokens) - 1 else None) for at, token in enumerate(tokens)]
        assert "".join(piece.text for piece in pieces) == said
        assert not streamed.called


def test_llama_3_without_its_mark_of_calls_says_so() -> None:
    """The tokenizer of Llama 3 has a reserved token where Llama 3.1 has `<|python_tag|>`."""
    tools = load_tools(str(real_one("llama3").path), "llama", None)
    assert not isinstance(tools, str)
    with pytest.raises(UnsupportedError, match=r"tools: the tool parser 'llama3_json' .* '<\|python_tag\|>'"):
        tools.form(OFFERED)


@pytest.mark.parametrize(("name", "model_type"), [("gemma3", "gemma3_text"), ("gpt_oss", "gpt_oss")])
def test_families_without_a_form_of_calls_say_so(name: str, model_type: str) -> None:
    tools = load_tools(str(real_one(name).path), model_type, None)
    assert isinstance(tools, str)
    assert "--tool-parser" in tools


def test_a_forced_call_has_a_grammar_and_a_parser_that_cannot_force_says_so(qwen3: Real) -> None:
    tools = load_tools(str(qwen3.path), "qwen3", None)
    assert not isinstance(tools, str)
    assert tools.form(OfferedTools(OFFERED.tools, must=True)).grammar is not None
    pythonic = load_tools(str(qwen3.path), "qwen3", "pythonic")
    assert not isinstance(pythonic, str)
    with pytest.raises(UnsupportedError, match="parallel_tool_calls"):
        pythonic.form(OfferedTools(OFFERED.tools, several=False))
