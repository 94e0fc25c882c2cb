"""The requests of Anthropic's API that are served. Anything else in them is refused by name."""

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, ValidationError, model_validator
from tinker_local.backend.http.endpoint_fields import (
    Image,
    Label,
    ModelName,
    Unsupported,
    image_at,
    image_of,
    only,
)
from tinker_local.backend.rendering.text import ChatMessage, Part
from tinker_local.types import Frozen, SamplingParams, user_message
from tinker_local.types.base import TupleOf


class TextBlock(Frozen):
    type: Literal["text"]
    text: str
    citations: Unsupported = None
    cache_control: Label = None

    def part(self) -> Part:
        """As templates take it."""
        return self.text


def _image(source: Any) -> Any:
    """The image of a `source`; ValueError."""
    match source:
        case {"type": "base64", "media_type": str(media_type), "data": str(data), **further}:
            image: Image = image_of(media_type, data)
        case {"type": "url", "url": str(url), **further}:
            image = image_at(url)
        case _:
            raise ValueError("must be {type: base64, media_type, data} or {type: url, url}")
    if further:
        raise ValueError(f"{', '.join(map(str, further))} is not supported by this server")
    return image


class ImageBlock(Frozen):
    type: Literal["image"]
    source: Annotated[Image, BeforeValidator(_image)]
    cache_control: Label = None

    def part(self) -> Part:
        """As templates take it."""
        return self.source


def _as_blocks(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


class Turn(Frozen):
    role: Literal["system", "user", "assistant"]
    content: Annotated[
        TupleOf[Annotated[TextBlock | ImageBlock, Field(discriminator="type")]], BeforeValidator(_as_blocks)
    ]


class Conversation(Frozen):
    """`POST messages/count_tokens`."""

    model: ModelName
    messages: Annotated[TupleOf[Turn], Field(min_length=1)]
    system: Annotated[TupleOf[TextBlock] | None, BeforeValidator(_as_blocks)] = None
    tools: Annotated[Any, only([])] = None
    tool_choice: Unsupported = None
    thinking: Annotated[Any, only({"type": "disabled"})] = None
    output_config: Annotated[Any, only({})] = None
    context_management: Unsupported = None
    mcp_servers: Annotated[Any, only([])] = None
    cache_control: Label = None

    @property
    def goes_on(self) -> bool:
        """Whether the last message is the beginning of the reply."""
        return self.messages[-1].role == "assistant"

    def as_chat(self) -> list[ChatMessage]:
        """As templates take it."""
        system = [] if not self.system else [ChatMessage("system", tuple(block.part() for block in self.system))]
        return system + [
            ChatMessage(turn.role, tuple(block.part() for block in turn.content)) for turn in self.messages
        ]


class MessagesBody(Conversation):
    """`POST messages`."""

    max_tokens: Annotated[int, Field(ge=1)]
    stream: bool | None = None
    stop_sequences: TupleOf[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    container: Unsupported = None
    service_tier: Annotated[Any, only("auto", "standard_only")] = None
    metadata: Label = None

    @model_validator(mode="after")
    def _checked(self) -> Self:
        self.params()
        return self

    def params(self) -> SamplingParams:
        """As the sampler takes them; ValueError."""
        given = {name: getattr(self, name) for name in ("max_tokens", "temperature", "top_p", "top_k")}
        given["stop"] = self.stop_sequences or None
        try:
            return SamplingParams.model_validate({name: value for name, value in given.items() if value is not None})
        except ValidationError as error:
            raise ValueError(user_message(error).replace("stop:", "stop_sequences:", 1)) from None
