"""Fields that errors of the endpoints name are those that were sent, without the names of pydantic's unions."""

import base64
import io
import json
from typing import Any

import httpx
import pytest
from PIL import Image
from pydantic import ValidationError
from tinker_local.backend.hosting.anthropic_bodies import MessagesBody
from tinker_local.backend.hosting.openai_bodies import ChatBody
from tinker_local.backend.hosting.server import LoopbackServer
from tinker_local.types import user_message

PNG = "data:image/gif;base64,AAAA"
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
ANTHROPIC = {**CHAT, "max_tokens": 1}


def part(**content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, content]}]}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"stop": 5}, "stop: "),
        ({"stop": [5]}, "stop"),
        (part(type="text"), "messages[0].content[1].text: "),
        (part(type="text", text=5), "messages[0].content[1].text: "),
        (part(type="image_url"), "messages[0].content[1].image_url: "),
        (part(type="image_url", image_url={"url": PNG}), "messages[0].content[1].image_url.url: "),
        (part(type="image_url", image_url={"url": PNG, "size": 1}), "messages[0].content[1].image_url."),
        ({"chat_template_kwargs": {"Thinking": [b"x"]}}, "chat_template_kwargs.Thinking"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}},
            "response_format.json_schema.schema: ",
        ),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name: "),
    ],
)
def test_of_openais(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError) as refused:
        ChatBody.model_validate({**CHAT, **given})
    text = user_message(refused.value)
    assert text.startswith(told), text
    assert not any(
        word in text for word in ("function-before", "tuple[", "NamedFunction", ".str:", "image_url.image_url")
    )


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"system": [{"type": "text"}]}, "system[0].text: "),
        (part(type="text", text=5), "messages[0].content[1].text: "),
        (
            part(type="image", source={"type": "base64", "media_type": "image/gif", "data": "AA"}),
            "messages[0].content[1].source",
        ),
        (part(type="tool_result", tool_use_id=5), "messages[0].content[1].tool_use_id: "),
    ],
)
def test_of_anthropics(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError) as refused:
        MessagesBody.model_validate({**ANTHROPIC, **given})
    text = user_message(refused.value)
    assert text.startswith(told), text
    assert not any(word in text for word in ("function-before", "tuple[", ".str:", "text.text"))


# Whole requests -------------------------------------------------------------------------------------------------------


def png(width: int, height: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), "red").save(buffer, "PNG")
    return buffer.getvalue()


WHOLE = png(64, 32)
BAD_PICTURES = {
    "cut off": png(300, 300)[:-60],
    "too many pixels": png(10_000, 10_000),
    "another kind": b"GIF89a" + bytes(40),
    "nothing in it": b"\x89PNG\r\n\x1a\nhello",
    "empty": b"",
}
TEXT = {"type": "text", "text": "a"}
HALF = "x\ud800"
TOLD = "character 1 is U+D800, half of a surrogate pair"


def sent(server: LoopbackServer, path: str, body: dict[str, Any]) -> str:
    """The error of a request in the bytes that Python's clients write."""
    whole = {"model": "fake/bigram", **body}
    headers = {"Authorization": f"Bearer {server.api_key}"}
    with httpx.Client(trust_env=False, headers=headers, timeout=60) as http:
        answer = http.post(f"{server.url}/v1/{path}", content=json.dumps(whole).encode())
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    message: str = error["message"]
    assert "chunks" not in message
    assert "param" not in error or message.startswith(f"{error['param']}: ")
    return message


def url(data: bytes, kind: str = "png") -> dict[str, Any]:
    text = f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": text}}


def source(data: bytes, kind: str = "png") -> dict[str, Any]:
    text = base64.b64encode(data).decode()
    return {"type": "image", "source": {"type": "base64", "media_type": f"image/{kind}", "data": text}}


@pytest.mark.parametrize("data", BAD_PICTURES.values(), ids=BAD_PICTURES)
def test_a_bad_picture_is_named_where_it_was_sent_on_fakes(loopback_server: LoopbackServer, data: bytes) -> None:
    """The second of three, in a chat, a stream, a message, a count, and what a tool has answered."""
    before = [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]
    chat = [*before, {"role": "user", "content": [TEXT, url(WHOLE), TEXT, url(data), url(WHOLE)]}]
    for stream in (False, True):
        asked = {"messages": chat, "max_tokens": 1, "stream": stream}
        assert sent(loopback_server, "chat/completions", asked).startswith("messages[2].content[3].image_url.url: ")
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    message = [*talk, {"role": "user", "content": [source(WHOLE), source(data), TEXT, source(WHOLE)]}]
    for path, more in (("messages", {"max_tokens": 1}), ("messages/count_tokens", {})):
        told = sent(loopback_server, path, {"system": "s", "messages": message, **more})
        assert told.startswith("messages[2].content[1].source.data: ")


def test_a_bad_picture_of_a_tools_result_is_named_on_fakes(loopback_server: LoopbackServer) -> None:
    """It is a message of the template, and a block of the client's."""
    used = {"type": "tool_use", "id": "c", "name": "t", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [TEXT, source(BAD_PICTURES["cut off"])]}
    talk = [
        {"role": "user", "content": [source(WHOLE), TEXT]},
        {"role": "assistant", "content": [used]},
        {"role": "user", "content": [TEXT, source(WHOLE), result]},
    ]
    tools = [{"name": "t", "input_schema": {"type": "object"}}]
    told = sent(loopback_server, "messages", {"messages": talk, "tools": tools, "max_tokens": 1})
    assert told.startswith("messages[2].content[2].content[1].source.data: ")


def test_pictures_of_another_kind_or_by_name_are_named_on_fakes(loopback_server: LoopbackServer) -> None:
    by_name = {"type": "image_url", "image_url": {"url": "http://h/x.png"}}
    for part, word in ((by_name, "--image-folder"), (url(b"BM123", "bmp"), "no PNG, JPEG, WebP or GIF file")):
        told = sent(loopback_server, "chat/completions", {"messages": [{"role": "user", "content": [TEXT, part]}]})
        assert told.startswith("messages[0].content[1].image_url.url: ")
        assert word in told
    named = {"type": "image", "source": {"type": "url", "url": "http://h/x.png"}}
    for block, field in ((named, "url"), (source(b"BM123", "bmp"), "data")):
        asked = {"messages": [{"role": "user", "content": [TEXT, block]}], "max_tokens": 1}
        assert sent(loopback_server, "messages", asked).startswith(f"messages[0].content[1].source.{field}: ")


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"messages": [{"role": "user", "content": HALF}]}, "messages[0].content"),
        (part(type="text", text=HALF), "messages[0].content[1].text"),
        ({"stop": ["a", HALF]}, "stop[1]"),
        ({"chat_template_kwargs": {"a": HALF}}, "chat_template_kwargs.a"),
        ({"tools": [{"type": "function", "function": {"name": "t", "description": HALF}}]}, "tools[0].function."),
        ({"response_format": {"type": "x", "y": {HALF: 1}}}, "response_format.y: the name 'x\\ud800'"),
    ],
)
def test_half_of_a_surrogate_pair_in_a_chat_is_named_on_fakes(
    loopback_server: LoopbackServer, given: dict[str, Any], field: str
) -> None:
    told = sent(loopback_server, "chat/completions", {**CHAT, "model": "fake/bigram", **given})
    assert told.startswith(field), told
    assert TOLD in told


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"system": HALF}, "system"),
        ({"system": [TEXT, {"type": "text", "text": HALF}]}, "system[1].text"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": HALF}]}]}, "messages[0].content[0].text"),
        ({"stop_sequences": [HALF]}, "stop_sequences[0]"),
    ],
)
def test_half_of_a_surrogate_pair_in_a_message_is_named_on_fakes(
    loopback_server: LoopbackServer, given: dict[str, Any], field: str
) -> None:
    told = sent(loopback_server, "messages", {**ANTHROPIC, "model": "fake/bigram", **given})
    assert told.startswith(f"{field}: {TOLD}"), told


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        (HALF, "prompt: "),
        (["a", HALF], "prompt[1]: "),
        ([5, 9, 99_999], "prompt[2]: "),
        ([[5], [9, 99_999]], "prompt[1][1]: "),
        ([[5], [-9]], "prompt[1]: "),
    ],
)
def test_a_bad_prompt_of_a_completion_is_named_on_fakes(
    loopback_server: LoopbackServer, prompt: Any, field: str
) -> None:
    assert sent(loopback_server, "completions", {"prompt": prompt, "max_tokens": 1}).startswith(field)


def test_other_json_that_is_broken_is_said_as_such_on_fakes(loopback_server: LoopbackServer) -> None:
    headers = {"Authorization": f"Bearer {loopback_server.api_key}"}
    with httpx.Client(trust_env=False, headers=headers, base_url=loopback_server.url) as http:
        for content in (b"{", b'{"a": "\\ud8"}', b'{"a": "\\ud800"', b"[" * 2000 + b'"\\ud800"' + b"]" * 2000):
            answer = http.post("/v1/chat/completions", content=content)
            assert answer.status_code == 400
            assert answer.json()["error"]["message"].startswith("Invalid JSON: ")
