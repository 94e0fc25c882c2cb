"""Fields that errors of the endpoints name are those that were sent, without the names of pydantic's unions."""

from typing import Any

import pytest
from pydantic import ValidationError
from tinker_local.backend.http.anthropic_bodies import MessagesBody
from tinker_local.backend.http.openai_bodies import ChatBody
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
