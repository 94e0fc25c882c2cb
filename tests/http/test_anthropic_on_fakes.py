"""Anthropic's own client against this server: messages, streams, images, counts, and what is refused."""

import base64
import io
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from PIL import Image
from tinker_local.backend.hosting.server import LoopbackServer

MODEL = "fake/bigram"
GREEDY = {"temperature": 0}
HI: Any = [{"role": "user", "content": "hi"}]
GOES_ON: Any = [*HI, {"role": "assistant", "content": "e"}]
"""After this, the fake's likeliest reply has four characters."""


@pytest.fixture(scope="module")
def client(loopback_server: LoopbackServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=loopback_server.url, api_key=loopback_server.api_key, max_retries=0) as one:
        yield one


def picture(colour: str = "red", media_type: str = "image/png") -> Any:
    buffer = io.BytesIO()
    Image.new("RGB", (64, 32), colour).save(buffer, "PNG")
    data = base64.b64encode(buffer.getvalue()).decode()
    return {"type": "image", "source": {"type": "base64", "media_type": media_type, "data": data}}


def test_an_image_is_read_as_what_its_bytes_are_on_fakes(client: anthropic.Anthropic) -> None:
    """The media type of a clipboard or a file's name may be another."""

    def ask(colour: str, media_type: str) -> Any:
        content = [picture(colour, media_type), {"type": "text", "text": "what?"}]
        asked: Any = {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 8}
        said = client.messages.create(**asked, extra_body=GREEDY)
        return said.content[0].text  # type: ignore[union-attr]

    right = ask("red", "image/png")
    assert {ask("red", f"image/{kind}") for kind in ("jpeg", "webp", "gif")} == {right}
    assert ask("blue", "image/jpeg") != right


def test_a_message_and_its_counts_on_fakes(client: anthropic.Anthropic) -> None:
    asked: Any = {"model": MODEL, "system": "be", "messages": HI}
    prompt = len("system:be\nuser:hi\nassistant:")
    assert client.messages.count_tokens(**asked).input_tokens == prompt
    said = client.messages.create(**asked, max_tokens=1, extra_body=GREEDY)
    assert (said.type, said.role, said.model) == ("message", "assistant", MODEL)
    assert said.usage.input_tokens + (said.usage.cache_read_input_tokens or 0) == prompt
    assert said.usage.output_tokens == 1
    asked["messages"] = GOES_ON
    for most, reason in ((3, "max_tokens"), (30, "end_turn")):
        said = client.messages.create(**asked, max_tokens=most, extra_body=GREEDY)
        assert said.stop_reason == reason
        assert said.usage.output_tokens == min(most, 5)


def test_a_stream_ends_with_the_text_reason_and_usage_of_the_whole_on_fakes(client: anthropic.Anthropic) -> None:
    asked: Any = {
        "model": MODEL,
        "messages": GOES_ON,
        "max_tokens": 24,
        "extra_body": {**GREEDY, "top_k": 3, "top_p": 0.9},
    }
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert len(text) == 4
    assert text == final.content[0].text == whole.content[0].text  # type: ignore[union-attr]
    assert (final.stop_reason, final.stop_sequence) == (whole.stop_reason, whole.stop_sequence)
    assert final.usage.output_tokens == whole.usage.output_tokens
    kinds = [each.type for each in client.messages.create(**asked, stream=True)]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) <= {"content_block_delta"}


def test_a_stop_sequence_is_named_and_cut_off_on_fakes(client: anthropic.Anthropic) -> None:
    asked: Any = {"model": MODEL, "messages": GOES_ON, "max_tokens": 24, "extra_body": GREEDY}
    text = client.messages.create(**asked).content[0].text  # type: ignore[union-attr]
    assert text
    stops = ["zzz", text[1:3], text[2]]
    stopped = client.messages.create(**asked, stop_sequences=stops)
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", text[1:3])
    assert stopped.content[0].text == text[0]  # type: ignore[union-attr]
    with client.messages.stream(**asked, stop_sequences=stops) as stream:
        assert "".join(stream.text_stream) == text[0]
        assert stream.get_final_message().stop_sequence == text[1:3]


def test_images_count_and_are_read_on_fakes(client: anthropic.Anthropic) -> None:
    def ask(colour: str) -> Any:
        messages: Any = [{"role": "user", "content": [picture(colour), {"type": "text", "text": "what?"}]}]
        assert client.messages.count_tokens(model=MODEL, messages=messages).input_tokens == 2 + len(
            "user:what?\nassistant:"
        )
        return client.messages.create(model=MODEL, messages=messages, max_tokens=8, extra_body=GREEDY).content

    assert ask("red") != ask("blue")


def test_the_beginning_of_a_reply_is_continued_on_fakes(client: anthropic.Anthropic) -> None:
    assert client.messages.count_tokens(model=MODEL, messages=GOES_ON).input_tokens == len("user:hi\nassistant:e")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, r"tools\[0\]"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking: this field is not supported"),
        ({"extra_body": {"never": 1}}, "never: this field is not supported"),
        ({"max_tokens": 0}, "max_tokens: "),
        ({"extra_body": {"temperature": -1}}, "temperature: "),
        ({"stop_sequences": [""]}, "stop_sequences: "),
        ({"stop_sequences": ["x" * 5000]}, "stop_sequences: "),
        ({"messages": []}, "messages: "),
        ({"messages": [{"role": "tool", "content": "x"}]}, r"messages\[0\].role: "),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, r"messages\[0\].content\[0\]: "),
    ],
)
def test_what_is_not_served_is_refused_by_name_on_fakes(
    client: anthropic.Anthropic, fields: dict[str, Any], reason: str
) -> None:
    with pytest.raises(anthropic.BadRequestError, match=reason) as refused:
        client.messages.create(**{"model": MODEL, "messages": HI, "max_tokens": 2, **fields})
    assert refused.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]


@pytest.mark.parametrize(
    ("characters", "most", "reason"),
    [
        (10_000, 2, r"prompt is too long: 1\d{4} tokens > 4095 maximum"),
        (10**7, 2, r"prompt is too long: \d+ tokens > 4095 maximum"),
        (1, 4096, r"input length and `max_tokens` exceed context limit: \d+ \+ 4096 > 4096"),
    ],
)
def test_a_context_that_is_too_short_is_said_as_anthropic_says_it_on_fakes(
    client: anthropic.Anthropic, characters: int, most: int, reason: str
) -> None:
    said: Any = [{"role": "user", "content": "z" * characters}]
    for stream in (False, True):
        with pytest.raises(anthropic.BadRequestError, match=reason):
            client.messages.create(model=MODEL, messages=said, max_tokens=most, stream=stream)


def test_errors_have_anthropics_shape_at_both_addresses_on_fakes(
    client: anthropic.Anthropic, loopback_server: LoopbackServer
) -> None:
    there = client.with_options(base_url=f"{loopback_server.url}/anthropic/api")
    for one in (client, there):
        with pytest.raises(anthropic.NotFoundError, match=MODEL):
            one.messages.create(model="no/model", messages=HI, max_tokens=2)
        with pytest.raises(anthropic.AuthenticationError) as refused:
            one.with_options(api_key="tml-wrong-key-0000").messages.create(model=MODEL, messages=HI, max_tokens=2)
        assert refused.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]
    said = there.messages.create(model=MODEL, messages=HI, max_tokens=2)
    assert said.usage.output_tokens <= 2
