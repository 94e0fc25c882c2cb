"""OpenAI's client with a tiny random model of a published vocabulary: structured output, logprobs' bytes, tools.

Random weights draw from the whole vocabulary: parts of characters, special tokens, rows without a token.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import openai
import pytest
from tinker_local.backend import BackendOptions, InProcessBackend, ModelSource
from tinker_local.backend.rendering.text import ChatMessage, ToolCall
from tinker_local.types.control_tokens import special_tokens

from tests.real_tokenizers.conftest import REAL, Real, make_model, real_one

pytestmark = pytest.mark.more

NAME = "tiny/real"
SCHEMA: Any = {
    "type": "object",
    "properties": {
        "word": {"enum": ["né", "你好", "👩‍🚀", "𒀀\n"]},
        "free": {"type": "string", "maxLength": 12},
        "code": {"type": "string", "pattern": "^[a-z]{2}-[0-9]{3}$"},
        "counts": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
    },
    "required": ["word", "free", "code", "counts"],
    "additionalProperties": False,
}
CITY: Any = {
    "type": "object",
    "properties": {"city": {"enum": ["Zürich", "東京"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": CITY, "strict": True}}]
RARE = "\U00012345\U00014400 now"
"""A text whose first characters are in no vocabulary: each is several tokens."""
SAYS_RARE: Any = {"structured_outputs": {"choice": [RARE]}}
HI: Any = [{"role": "user", "content": "Grüezi <|im_end|><end_of_turn> 你好"}]


@dataclass(frozen=True)
class Served:
    """A running server of one tokenizer, and a client."""

    real: Real
    client: openai.OpenAI

    def complete(self, **asked: Any) -> Any:
        """A completion of a short text; every model has that, whether it has a template or not."""
        return self.client.completions.create(model=NAME, prompt="Hello, 你好", **asked)


@pytest.fixture(
    scope="module", params=["qwen3", *(pytest.param(name, marks=pytest.mark.more) for name in (*REAL,)[1:])]
)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with a trainer and vLLM in this process, which compares them when it starts."""
    real = real_one(request.param)
    model = make_model(real, tmp_path_factory.mktemp(request.param) / "model")
    options = BackendOptions(
        data_dir=tmp_path_factory.mktemp("data"),
        max_rank=8,
        max_context_length=1024,
        kv_cache_bytes=64 * 2**20,
        compare_seconds=0.0,
    )
    server = InProcessBackend([ModelSource(NAME, str(model))], options).serve_in_thread()
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=server.api_key, max_retries=0) as client:
        yield Served(real, client)
    server.close()


def bytes_of(served: Served, content: Sequence[Any]) -> bytes:
    """Of the tokens of a reply, without special ones, which the text does not show."""
    special = special_tokens(served.real.tokenizer)
    return b"".join(bytes(entry.bytes) for entry in content if entry.token not in special)


def shown(served: Served, parts: bytes) -> str:
    """Bytes as the tokenizer decodes them: one U+FFFD for each byte that is not text, or for as many as begin a
    character."""
    bytewise = served.real.text._byte_ids
    text = parts.decode(errors="surrogateescape" if bytewise else "replace")
    return "".join("\ufffd" if "\udc80" <= letter <= "\udcff" else letter for letter in text)


def test_structured_output_validates(served: Served) -> None:
    asked: Any = {"structured_outputs": {"json": SCHEMA}}
    found = served.complete(extra_body=asked, n=3, max_tokens=700, seed=5)
    assert len({choice.text for choice in found.choices}) > 1
    for choice in found.choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.text), SCHEMA)


def test_text_offsets_say_where_tokens_are_in_the_text(served: Served) -> None:
    free = served.complete(n=4, max_tokens=60, seed=3, temperature=1.5, logprobs=5)
    special = special_tokens(served.real.tokenizer)
    for choice in (*free.choices, *served.complete(extra_body=SAYS_RARE, max_tokens=60, logprobs=5).choices):
        logprobs = choice.logprobs
        hidden = 0
        for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
            if token in special:
                hidden += len(token)
            elif not token.startswith("bytes:\\x"):
                at = offset - hidden
                assert choice.text[at : at + len(token)] == token
    assert choice.text == RARE
    rare = [at for token, at in zip(logprobs.tokens, logprobs.text_offset, strict=True) if token.startswith("bytes:")]
    assert len(rare) > 2
    assert {*rare} == {0, 1}


def chat(served: Served, **asked: Any) -> Any:
    if served.real.tokenizer.chat_template is None:
        pytest.skip("this tokenizer comes without a chat template")
    return served.client.chat.completions.create(model=NAME, messages=HI, **asked)


def test_bytes_of_logprobs_are_together_the_text_also_of_tokens_that_are_parts_of_characters(served: Served) -> None:
    asked: Any = {"max_tokens": 60, "seed": 7, "temperature": 1.5, "logprobs": True, "top_logprobs": 4}
    whole = chat(served, n=4, **asked)
    assert whole.usage.prompt_tokens == len(served.real.ids(ChatMessage("user", (HI[0]["content"],))))
    for choice in whole.choices:
        assert shown(served, bytes_of(served, choice.logprobs.content)) == choice.message.content
    (rare,) = chat(served, extra_body=SAYS_RARE, **asked).choices
    assert bytes_of(served, rare.logprobs.content).decode() == rare.message.content == RARE
    assert any("\ufffd" in entry.token for entry in rare.logprobs.content)
    texts, entries = [""] * 4, [[] for _ in range(4)]  # type: ignore[var-annotated]
    for chunk in chat(served, n=4, stream=True, **asked):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            entries[choice.index] += choice.logprobs.content if choice.logprobs else []
    for choice, text, content in zip(whole.choices, texts, entries, strict=True):
        assert text == choice.message.content
        assert [entry.bytes for entry in content] == [entry.bytes for entry in choice.logprobs.content]


def test_a_strict_tool_is_called_and_its_result_read(served: Served) -> None:
    if served.real.folder != "tokenizer-qwen3":
        pytest.skip("this template has no tools")
    asked: Any = {"tools": TOOLS, "seed": 2, "max_tokens": 300}
    (whole,) = chat(served, tool_choice="required", parallel_tool_calls=False, **asked).choices
    (call,) = whole.message.tool_calls
    jsonschema.validate(json.loads(call.function.arguments), CITY)
    assert (whole.finish_reason, call.function.name) == ("tool_calls", "weather")
    turns = [*HI, whole.message.to_dict(), {"role": "tool", "tool_call_id": call.id, "content": "sunny ☀️"}]
    again: Any = served.client.chat.completions.create(model=NAME, messages=turns, tools=TOOLS, max_tokens=3)
    written = ToolCall(call.id, "weather", call.function.arguments)
    expected = served.real.ids(
        ChatMessage("user", (HI[0]["content"],)),
        ChatMessage("assistant", (), (written,)),
        ChatMessage("tool", ("sunny ☀️",), answers=(call.id, "weather")),
        functions=[{"type": "function", "function": {"name": "weather", "parameters": CITY}}],
    )
    assert again.usage.prompt_tokens == len(expected)
