"""Fields of OpenAI's and Anthropic's APIs that offer tools, and those of messages that have calls and results."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field
from tinker_local.backend.hosting.endpoint_fields import Label
from tinker_local.backend.rendering.grammar import Grammar, check_nesting
from tinker_local.backend.rendering.text import ToolCall
from tinker_local.backend.rendering.tools import OfferedTools, Tool
from tinker_local.types import Frozen, InvalidRequestError

MOST_TOOLS = 128
"""Of a request, as in OpenAI's API."""

MOST_SCHEMA = 2**20
"""Characters of a tool's parameters. All together, tools fit into the context."""

ToolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,128}$")]
CallId = Annotated[str, Field(min_length=1, max_length=256)]

# OpenAI's ------------------------------------------------------------------------------------------------------------


class Function(Frozen):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(Frozen):
    type: Literal["function"]
    function: Function

    def tool(self) -> Tool:
        """As models are offered it."""
        given = self.function
        return Tool(given.name, given.description, given.parameters, bool(given.strict))


class FunctionName(Frozen):
    name: ToolName


class NamedFunction(Frozen):
    type: Literal["function"]
    function: FunctionName


ToolChoice = Literal["none", "auto", "required"] | NamedFunction


class FunctionCall(Frozen):
    """`arguments`: what a model wrote, which may not be JSON; the client answered it with an error, and goes on."""

    name: ToolName
    arguments: str
    parsed_arguments: Label = None
    """What OpenAI's client makes of `arguments`, and sends back with the message."""


class MessageCall(Frozen):
    id: CallId
    type: Literal["function"]
    function: FunctionCall
    index: Label = None

    def call(self) -> ToolCall:
        """As templates take it."""
        return ToolCall(self.id, self.function.name, self.function.arguments)


# Anthropic's ---------------------------------------------------------------------------------------------------------


class ClientTool(Frozen):
    """A tool that the client runs."""

    name: ToolName
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    description: str | None = None
    strict: bool | None = None
    cache_control: Label = None
    eager_input_streaming: Label = None

    def tool(self) -> Tool:
        """As models are offered it."""
        return Tool(self.name, self.description, self.input_schema, bool(self.strict))


class ClientToolChoice(Frozen):
    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: bool | None = None


# Both ----------------------------------------------------------------------------------------------------------------


def offer(
    tools: Sequence[Tool], *, must: bool, only: str | None, several: bool, answer: Grammar | None
) -> OfferedTools | None:
    """None without tools. InvalidRequestError for tools that cannot be offered together, or as they are chosen."""
    if not tools and (must or only is not None):
        raise InvalidRequestError("tool_choice: asks for a call, and there are no tools")
    if len(tools) > MOST_TOOLS:
        raise InvalidRequestError(f"tools: {len(tools)} are more than {MOST_TOOLS}")
    names = [tool.name for tool in tools]
    if twice := {name for name in names if names.count(name) > 1}:
        raise InvalidRequestError(f"tools: {', '.join(sorted(twice))} twice")
    if only is not None and only not in names:
        raise InvalidRequestError(f"tool_choice: {only!r} is not one of the tools {', '.join(names)}")
    if answer is not None and (must or only is not None) and tools:
        raise InvalidRequestError(f"{answer.field}: tool_choice asks for a call, so there is no such answer")
    for index, tool in enumerate(tools):
        check_nesting(tool.parameters, f"tools[{index}]", MOST_SCHEMA)
    return OfferedTools(tuple(tools), must, only, several, answer) if tools else None
