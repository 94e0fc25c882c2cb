"""The requests of Anthropic's API that are served. Anything else in them is refused by name."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, ValidationError, model_validator
from tinker_local.backend.hosting.endpoint_fields import (
    ControlTokens,
    Image,
    Label,
    ModelName,
    Unsupported,
    image_at,
    image_of,
    only,
)
from tinker_local.backend.hosting.grammar_fields import OutputConfig
from tinker_local.backend.hosting.tool_fields import CallId, ClientTool, ClientToolChoice, ToolName, offer
from tinker_local.backend.rendering.grammar import Grammar
from tinker_local.backend.rendering.text import ChatMessage, Part, ToolCall
from tinker_local.backend.rendering.tools import OfferedTools
from tinker_local.types import Frozen, ImageChunk, InvalidRequestError, SamplingParams, user_message
from tinker_local.types.base import TupleOf


class TextBlock(Frozen):
    type: Literal["text"]
    text: str
    citations: Unsupported = None
    cache_control: Label = None

    def part(self) -> Part:
        """As templates take it."""
        return self.text


def _named(field: str, make: Callable[..., Any], *given: str) -> Any:
    """What `make` makes of a field's value; ValueError names the field."""
    try:
        return make(*given)
    except ValueError as error:
        raise ValueError(f"{field}: {error}") from None


def _image(source: Any) -> Any:
    """The image of a `source`; ValueError."""
    match source:
        case {"type": "base64", "media_type": str(), "data": str(data), **further}:
            image: Image = _named("data", image_of, data)
        case {"type": "url", "url": str(url), **further}:
            image = _named("url", image_at, url)
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

    @property
    def field(self) -> str:
        """What has the image."""
        return "source.data" if isinstance(self.source, ImageChunk) else "source.url"


def _image_fields(content: Sequence[Frozen], where: str) -> tuple[str, ...]:
    return tuple(f"{where}[{at}].{block.field}" for at, block in enumerate(content) if isinstance(block, ImageBlock))


def _as_blocks(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


class ToolUseBlock(Frozen):
    type: Literal["tool_use"]
    id: CallId
    name: ToolName
    input: dict[str, Any]
    cache_control: Label = None
    caller: Label = None

    def call(self) -> ToolCall:
        """As templates take it."""
        return ToolCall(self.id, self.name, json.dumps(self.input, ensure_ascii=False))


class ToolResultBlock(Frozen):
    """`is_error` puts a word before the result."""

    type: Literal["tool_result"]
    tool_use_id: CallId
    content: Annotated[
        TupleOf[Annotated[TextBlock | ImageBlock, Field(discriminator="type")]], BeforeValidator(_as_blocks)
    ] = ()
    is_error: bool | None = None
    cache_control: Label = None

    def as_chat(self, names: Mapping[str, str], where: str) -> ChatMessage:
        """As templates take it. `names`: of the tools, by the ids of their calls. `where`: its field."""
        parts = (*(("Error: ",) if self.is_error else ()), *(block.part() for block in self.content))
        answers = self.tool_use_id, names.get(self.tool_use_id)
        return ChatMessage("tool", parts, (), answers, _image_fields(self.content, f"{where}.content"))


Block = Annotated[TextBlock | ImageBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")]


class Turn(Frozen):
    role: Literal["system", "user", "assistant"]
    content: Annotated[TupleOf[Block], BeforeValidator(_as_blocks)]

    @model_validator(mode="after")
    def _of_its_role(self) -> Self:
        for index, block in enumerate(self.content):
            needed = {"tool_use": "assistant", "tool_result": "user"}.get(block.type, self.role)
            if self.role != needed:
                raise ValueError(f"content[{index}]: {block.type} is for the role {needed}")
        return self

    def as_chat(self, names: Mapping[str, str], where: str) -> Iterator[ChatMessage]:
        """As templates take it: each result of a tool is a message. `where`: its field."""
        parts: list[Part] = []
        images: list[str] = []
        for at, block in enumerate(self.content):
            field = f"{where}.content[{at}]"
            if isinstance(block, ToolResultBlock):
                if parts:
                    yield ChatMessage(self.role, tuple(parts), image_fields=tuple(images))
                    parts, images = [], []
                yield block.as_chat(names, field)
            elif not isinstance(block, ToolUseBlock):
                parts.append(block.part())
                images += [f"{field}.{block.field}"] if isinstance(block, ImageBlock) else []
        calls = tuple(block.call() for block in self.content if isinstance(block, ToolUseBlock))
        if parts or calls or not self.content:
            yield ChatMessage(self.role, tuple(parts), calls, image_fields=tuple(images))


class Conversation(Frozen):
    """`POST messages/count_tokens`."""

    model: ModelName
    messages: Annotated[TupleOf[Turn], Field(min_length=1)]
    system: Annotated[TupleOf[TextBlock] | None, BeforeValidator(_as_blocks)] = None
    tools: TupleOf[ClientTool] | None = None
    tool_choice: ClientToolChoice | None = None
    thinking: Annotated[Any, only({"type": "disabled"})] = None
    output_config: OutputConfig | None = None
    context_management: Unsupported = None
    mcp_servers: Annotated[Any, only([])] = None
    cache_control: Label = None
    control_tokens: ControlTokens = ()

    @model_validator(mode="after")
    def _ends(self) -> Self:
        last = self.messages[-1]
        if any(isinstance(block, ToolUseBlock) for block in last.content):
            raise ValueError(f"messages[{len(self.messages) - 1}]: calls tools, and no message has their results")
        return self

    @property
    def goes_on(self) -> bool:
        """Whether the last message is the beginning of the reply."""
        return self.messages[-1].role == "assistant"

    def as_chat(self) -> list[ChatMessage]:
        """As templates take it."""
        system = [] if not self.system else [ChatMessage("system", tuple(block.part() for block in self.system))]
        blocks = [block for turn in self.messages for block in turn.content]
        names = {block.id: block.name for block in blocks if isinstance(block, ToolUseBlock)}
        turns = enumerate(self.messages)
        return system + [message for at, turn in turns for message in turn.as_chat(names, f"messages[{at}]")]

    def grammar(self) -> Grammar | None:
        """What the answer must spell; InvalidRequestError."""
        chosen = None if self.output_config is None else self.output_config.format
        return None if chosen is None else chosen.grammar("output_config.format")

    def offered(self) -> OfferedTools | None:
        """The tools that the model may call; InvalidRequestError."""
        choice = self.tool_choice or ClientToolChoice(type="auto")
        if (choice.name is None) == (choice.type == "tool"):
            raise InvalidRequestError("tool_choice.name: for the type tool, and only for it")
        tools = [] if choice.type == "none" else [tool.tool() for tool in self.tools or ()]
        several = not choice.disable_parallel_tool_use
        return offer(tools, must=choice.type == "any", only=choice.name, several=several, answer=self.grammar())


class MessagesBody(Conversation):
    """`POST messages`."""

    max_tokens: Annotated[int, Field(ge=1)]
    stream: bool | None = None
    return_token_ids: bool | None = None
    """Not Anthropic's: the answer has the ids that the model read and sampled, and their logprobs."""
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
        given["top_k"] = given["top_k"] or None  # 0: no limit
        try:
            return SamplingParams.model_validate({name: value for name, value in given.items() if value is not None})
        except ValidationError as error:
            raise ValueError(user_message(error).replace("stop:", "stop_sequences:", 1)) from None
