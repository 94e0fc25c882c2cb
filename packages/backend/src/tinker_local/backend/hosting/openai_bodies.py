"""The requests of OpenAI's API that are served. Anything else in them is refused by name.

A parameter that would not change the answer may be sent: a label, or one that asks for what is done anyway.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, ValidationError, model_validator
from tinker_local.backend.hosting.endpoint_fields import (
    ControlTokens,
    Image,
    Label,
    ModelName,
    Unsupported,
    image_at,
    only,
)
from tinker_local.backend.hosting.grammar_fields import ResponseFormat, StructuredOutputs, TextFormat
from tinker_local.backend.hosting.tool_fields import CallId, FunctionTool, MessageCall, NamedFunction, ToolChoice, offer
from tinker_local.backend.rendering.grammar import Grammar
from tinker_local.backend.rendering.text import ChatMessage, TemplateValue
from tinker_local.backend.rendering.tools import OfferedTools
from tinker_local.backend.sampling.sampler import Penalties
from tinker_local.types import Frozen, ModelInput, SamplingParams, user_message
from tinker_local.types.base import TupleOf

MAX_LIKELIEST = 20
"""`top_logprobs`, as in OpenAI's API."""

Penalty = Annotated[float, Field(ge=-2, le=2)]

COMPLETION_TOKENS = 16
"""`max_tokens` of a completion that gives none, as in OpenAI's API."""


class TextPart(Frozen):
    type: Literal["text"]
    text: str


class ImageUrl(Frozen):
    url: Annotated[Image, BeforeValidator(image_at)]
    detail: Literal["auto", "low", "high"] | None = None
    """A hint of how closely to look. These models see every image in its own size."""


class ImagePart(Frozen):
    type: Literal["image_url"]
    image_url: ImageUrl


def _as_parts(content: Any) -> Any:
    if content is None:  # of an assistant that only calls
        return []
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


class Message(Frozen):
    """`name`: of the tool whose result this is. Others name who wrote the message, of which templates know nothing."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        TupleOf[Annotated[TextPart | ImagePart, Field(discriminator="type")]], BeforeValidator(_as_parts)
    ] = ()
    name: str | None = None
    tool_calls: TupleOf[MessageCall] | None = None
    tool_call_id: CallId | None = None
    function_call: Unsupported = None
    refusal: Unsupported = None
    audio: Unsupported = None
    annotations: Annotated[Any, only([])] = None
    reasoning_content: Unsupported = None
    parsed: Label = None
    """What OpenAI's client makes of `content`, and sends back with the message."""

    @model_validator(mode="after")
    def _of_its_role(self) -> Self:
        if self.tool_calls and self.role != "assistant":
            raise ValueError("tool_calls: only for the role assistant")
        if (self.tool_call_id is None) == (self.role == "tool"):
            raise ValueError("tool_call_id: for the role tool, and only for it")
        if "content" not in self.model_fields_set and not self.tool_calls:
            raise ValueError("content: missing")
        return self

    def as_chat(self, names: Mapping[str, str], where: str) -> ChatMessage:
        """As templates take it. `names`: of the tools, by the ids of their calls. `where`: its field."""
        parts = tuple(part.text if isinstance(part, TextPart) else part.image_url.url for part in self.content)
        calls = tuple(call.call() for call in self.tool_calls or ())
        answers = None if self.tool_call_id is None else (self.tool_call_id, self.name or names.get(self.tool_call_id))
        role, shown = "system" if self.role == "developer" else self.role, enumerate(self.content)
        images = [f"{where}.content[{at}].image_url.url" for at, part in shown if isinstance(part, ImagePart)]
        return ChatMessage(role, parts, calls, answers, tuple(images))


class StreamOptions(Frozen):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class Body(Frozen):
    """What both kinds of requests have. `top_k` (0: no limit), `structured_outputs`, `stop_token_ids`,
    `return_token_ids` and `return_tokens_as_token_ids` are vLLM's, as are some that change nothing."""

    model: ModelName
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    stop: str | TupleOf[str] | None = None
    stop_token_ids: TupleOf[int] | None = None
    seed: int | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    repetition_penalty: Annotated[Any, only(1)] = None
    min_p: Annotated[Any, only(0)] = None
    min_tokens: Annotated[Any, only(0)] = None
    ignore_eos: Annotated[Any, only(False)] = None
    skip_special_tokens: Annotated[Any, only(True)] = None
    spaces_between_special_tokens: Annotated[Any, only(True)] = None
    include_stop_str_in_output: Annotated[Any, only(False)] = None
    use_beam_search: Annotated[Any, only(False)] = None
    length_penalty: Annotated[Any, only(1)] = None
    logit_bias: Annotated[Any, only({})] = None
    user: Label = None
    metadata: Label = None

    @model_validator(mode="after")
    def _checked(self) -> Self:
        self.params()
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: only for stream=true")
        if self.stop_token_ids and self.stops:
            raise ValueError("stop_token_ids: not together with stop")
        if self.structured_outputs is not None and self.response_format not in (None, TextFormat(type="text")):
            raise ValueError("structured_outputs: not together with response_format")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        """The texts of `stop`."""
        return (self.stop,) if isinstance(self.stop, str) else self.stop or ()

    def most_tokens(self) -> int | None:
        """How many tokens may be sampled; None: up to the context."""
        return self.max_tokens

    def grammar(self) -> Grammar | None:
        """What the answer must spell; InvalidRequestError."""
        if self.structured_outputs is not None:
            return self.structured_outputs.grammar("structured_outputs")
        return None if self.response_format is None else self.response_format.grammar("response_format")

    def penalties(self) -> Penalties | None:
        """As the sampler takes them."""
        given = Penalties(self.presence_penalty or 0.0, self.frequency_penalty or 0.0)
        return None if given == Penalties() else given

    def params(self) -> SamplingParams:
        """As the sampler takes them; ValueError."""
        given = {name: getattr(self, name) for name in ("temperature", "top_p", "top_k", "seed")}
        given |= {"stop": self.stops or self.stop_token_ids or None, "max_tokens": self.most_tokens()}
        given["top_k"] = given["top_k"] or None  # 0 is vLLM's word for no limit
        try:
            return SamplingParams.model_validate({name: value for name, value in given.items() if value is not None})
        except ValidationError as error:
            raise ValueError(user_message(error)) from None


class ChatPrompt(Frozen):
    """A conversation, and what goes into its prompt."""

    model: ModelName
    messages: Annotated[TupleOf[Message], Field(min_length=1)]
    chat_template_kwargs: dict[str, TemplateValue] | None = None
    control_tokens: ControlTokens = ()
    tools: TupleOf[FunctionTool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Annotated[Any, only("none")] = None
    add_generation_prompt: Annotated[Any, only(True)] = None
    continue_final_message: Annotated[Any, only(False)] = None
    add_special_tokens: Annotated[Any, only(False)] = None

    def as_chat(self) -> list[ChatMessage]:
        """As templates take it."""
        names = {call.id: call.function.name for message in self.messages for call in message.tool_calls or ()}
        return [message.as_chat(names, f"messages[{at}]") for at, message in enumerate(self.messages)]

    def grammar(self) -> Grammar | None:
        """What the answer must spell."""
        return None

    def offered(self) -> OfferedTools | None:
        """The tools that the model may call; InvalidRequestError."""
        choice = self.tool_choice
        tools = [] if choice == "none" else [tool.tool() for tool in self.tools or ()]
        only = choice.function.name if isinstance(choice, NamedFunction) else None
        several = self.parallel_tool_calls is not False
        return offer(tools, must=choice == "required", only=only, several=several, answer=self.grammar())


class ChatBody(Body, ChatPrompt):
    """`POST chat/completions`."""

    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LIKELIEST)] | None = None
    echo: Annotated[Any, only(False)] = None
    functions: Annotated[Any, only([])] = None
    function_call: Annotated[Any, only("none")] = None
    modalities: Annotated[Any, only(["text"])] = None
    verbosity: Annotated[Any, only("medium")] = None
    prediction: Unsupported = None
    audio: Unsupported = None
    web_search_options: Unsupported = None
    store: Annotated[Any, only(False)] = None
    service_tier: Annotated[Any, only("auto", "default")] = None
    safety_identifier: Label = None
    prompt_cache_key: Label = None

    @model_validator(mode="after")
    def _of_chat(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: only with logprobs=true")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError(
                f"max_tokens: {self.max_tokens} is not max_completion_tokens, {self.max_completion_tokens}; give one"
            )
        return self

    def most_tokens(self) -> int | None:
        """See `Body`."""
        return self.max_completion_tokens or self.max_tokens


class TokenizeBody(ChatPrompt):
    """`POST /tokenize`, of a conversation or a text."""

    messages: Annotated[TupleOf[Message], Field(min_length=1)] = ()
    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        if bool(self.messages) == (self.prompt is not None):
            raise ValueError("messages: give either messages or a prompt")
        if self.add_special_tokens not in (None, not self.messages):
            raise ValueError(f"add_special_tokens: {self.add_special_tokens} is not supported by this server")
        return self


class DetokenizeBody(Frozen):
    """`POST /detokenize`."""

    model: ModelName
    tokens: TupleOf[Annotated[int, Field(ge=0, lt=2**31)]]


def _as_prompts(prompt: Any) -> Any:
    """One or several prompts, each a text or token ids, none of them empty; ValueError."""
    given = prompt if isinstance(prompt, list) and prompt and type(prompt[0]) is not int else [prompt]
    found: list[str | ModelInput] = []
    for index, one in enumerate(given):
        if not isinstance(one, str | list) or not one:
            raise ValueError(f"[{index}] must be a text or a list of token ids, and not empty")
        try:
            found.append(one if isinstance(one, str) else ModelInput.from_ints(one))
        except ValueError as error:
            raise ValueError(f"[{index}]: {error}") from None
    return tuple(found)


def _as_count(logprobs: Any) -> Any:
    """true and false are meant for chat completions, and are 1 (as in vLLM's server) and none here."""
    return (1 if logprobs else None) if isinstance(logprobs, bool) else logprobs


class CompletionBody(Body):
    """`POST completions`. With `echo`, `max_tokens` may be 0: then the answer is the prompt alone."""

    prompt: Annotated[tuple[str | ModelInput, ...], BeforeValidator(_as_prompts)]
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: Annotated[Annotated[int, Field(ge=0, le=MAX_LIKELIEST)] | None, BeforeValidator(_as_count)] = None
    echo: bool | None = None
    best_of: Annotated[Any, only(1)] = None
    suffix: Unsupported = None

    @model_validator(mode="after")
    def _of_echo(self) -> Self:
        if self.max_tokens == 0 and (self.stream or not self.echo):
            raise ValueError("max_tokens: 0 is only for echo=true and stream=false")
        if self.echo and self.stream and self.logprobs is not None:
            raise ValueError("echo: with logprobs only for stream=false")
        return self

    def most_tokens(self) -> int | None:
        """See `Body`."""
        return COMPLETION_TOKENS if self.max_tokens is None else max(self.max_tokens, 1)
