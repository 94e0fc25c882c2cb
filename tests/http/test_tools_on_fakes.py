"""Tools with OpenAI's and Anthropic's own clients: calls over turns, whole and streamed, and what is refused."""

import json
from typing import Any

import anthropic
import openai
import pytest
from tinker_local.backend.fakes.fake_tools import NO_CALL

from tests.http.conftest import BASE

HI: Any = [{"role": "user", "content": "hi"}]
WEATHER: Any = {"type": "object", "properties": {"city": {"enum": ["Bern", "Oslo"]}}, "required": ["city"]}
TIME: Any = {"type": "object", "properties": {"zone": {"type": "integer"}}, "required": ["zone"]}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "description": "Of a city.", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "time", "parameters": TIME}},
]
CLIENT_TOOLS: Any = [
    {"name": "weather", "description": "Of a city.", "input_schema": WEATHER},
    {"name": "time", "input_schema": TIME},
]


def asked(client: openai.OpenAI, seed: int = 0, **fields: Any) -> Any:
    given: Any = {"model": BASE, "messages": HI, "tools": TOOLS, "seed": seed} | fields
    return client.chat.completions.create(**given)


def calls(choice: Any) -> list[tuple[str, dict[str, Any]]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls or ()]


def test_tools_are_called_as_tool_choice_says_on_fakes(client: openai.OpenAI) -> None:
    auto = [asked(client, seed).choices[0] for seed in range(12)]
    assert {choice.finish_reason for choice in auto} == {"tool_calls", "stop"}
    assert {len(calls(choice)) for choice in auto} >= {0, 1}
    assert {choice.message.content for choice in auto} == {None, NO_CALL}
    required = [asked(client, seed, tool_choice="required").choices[0] for seed in range(8)]
    assert {len(calls(choice)) for choice in required} == {1, 2}
    one = [asked(client, seed, tool_choice="required", parallel_tool_calls=False).choices[0] for seed in range(8)]
    assert {len(calls(choice)) for choice in one} == {1}
    for wanted, parameter in (("weather", "city"), ("time", "zone")):
        named: Any = {"type": "function", "function": {"name": wanted}}
        ((name, arguments),) = calls(asked(client, tool_choice=named).choices[0])
        assert (name, set(arguments)) == (wanted, {parameter})
    none = asked(client, tool_choice="none", max_tokens=20)
    assert none.choices[0].message.tool_calls is None
    assert none.usage.prompt_tokens == asked(client, tools=[], max_tokens=20).usage.prompt_tokens


def test_streamed_calls_are_those_of_the_whole_answer_on_fakes(client: openai.OpenAI) -> None:
    seen = 0
    for seed in range(12):
        whole = asked(client, seed).choices[0]
        found: dict[int, list[Any]] = {}
        text, reasons, pieces = "", [], 0
        for chunk in asked(client, seed, stream=True):
            (choice,) = chunk.choices
            text += choice.delta.content or ""
            reasons += [choice.finish_reason] if choice.finish_reason else []
            for call in choice.delta.tool_calls or ():
                pieces += 1
                if call.id is not None:
                    found[call.index] = [call.id, call.function.name, ""]
                found[call.index][2] += call.function.arguments
        assert reasons == [whole.finish_reason]
        assert text == (whole.message.content or "")
        assert [tuple(found[index][1:]) for index in sorted(found)] == [
            (call.function.name, call.function.arguments) for call in whole.message.tool_calls or ()
        ]
        assert pieces >= 4 * len(found)
        seen += len(found)
    assert seen > 2


def test_results_of_tools_come_in_the_next_turn_on_fakes(client: openai.OpenAI) -> None:
    choice = asked(client, tool_choice="required", parallel_tool_calls=False).choices[0]
    (call,) = choice.message.tool_calls
    turns = [*HI, choice.message.to_dict(), {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    said = asked(client, messages=turns, tool_choice="none", max_tokens=8)
    call_text = f"<call>{call.function.name} {call.function.arguments}</call>"
    assert said.usage.prompt_tokens == len(f"user:hi\nassistant:{call_text}\ntool:sunny\nassistant:")
    again = asked(client, messages=turns, tool_choice="required").choices[0]
    assert calls(again)


def test_an_answer_of_a_schema_or_a_call_on_fakes(client: openai.OpenAI) -> None:
    schema: Any = {"type": "object", "properties": {"sum": {"type": "integer"}}}
    form: Any = {"type": "json_schema", "json_schema": {"name": "sum", "schema": schema}}
    found = [asked(client, seed, response_format=form).choices[0] for seed in range(12)]
    assert any(calls(choice) for choice in found)
    assert any("sum" in json.loads(choice.message.content) for choice in found if not calls(choice))
    with pytest.raises(openai.BadRequestError, match=r"response_format.*: tool_choice asks for a call"):
        asked(client, response_format=form, tool_choice="required")


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("tool_choice: asks for a call", {"tools": [], "tool_choice": "required"}),
        ("tool_choice: 'other' is not one of", {"tool_choice": {"type": "function", "function": {"name": "other"}}}),
        ("tool_choice", {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}}),
        ("tools: weather twice", {"tools": [TOOLS[0], TOOLS[0]]}),
        ("tools.*type", {"tools": [{"type": "custom", "custom": {"name": "a"}}]}),
        ("tools.*name", {"tools": [{"type": "function", "function": {"name": "a b"}}]}),
        ("tools: 129 are more", {"tools": [{"type": "function", "function": {"name": f"a{i}"}} for i in range(129)]}),
        ("tool_call_id", {"messages": [*HI, {"role": "tool", "content": "a"}]}),
        ("content: missing", {"messages": [*HI, {"role": "assistant"}]}),
    ],
)
def test_tools_that_cannot_be_served_are_refused_by_name_on_fakes(
    client: openai.OpenAI, field: str, given: Any
) -> None:
    with pytest.raises(openai.BadRequestError, match=field):
        asked(client, **given)


@pytest.mark.parametrize(
    "arguments",
    ["", "{}", '{"a": 1, "b', "null", "[1]", '"{}"', "no JSON", '{"a": "\\ud83d"}', '{"a":' * 500 + "1" + "}" * 500],
)
def test_a_conversation_goes_on_after_a_call_with_arguments_that_are_no_object_on_fakes(
    client: openai.OpenAI, arguments: str
) -> None:
    call: Any = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    answer: Any = {"role": "tool", "tool_call_id": "1", "content": "error: not a JSON object"}
    assert asked(client, messages=[*HI, {"role": "assistant", "tool_calls": [call]}, answer]).choices


def test_anthropics_client_calls_tools_whole_and_streamed_over_turns_on_fakes(claude: anthropic.Anthropic) -> None:
    given: Any = {"model": BASE, "messages": HI, "max_tokens": 200, "tools": CLIENT_TOOLS}
    chosen: Any = {"type": "any", "disable_parallel_tool_use": True}
    said = claude.messages.create(**given, tool_choice=chosen)
    (block,) = said.content
    assert block.type == "tool_use"
    assert block.name in ("weather", "time")
    assert said.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": block.id, "content": "no such city", "is_error": True}
    turns: Any = [*HI, {"role": "assistant", "content": said.content}]
    turns.append({"role": "user", "content": [result, {"type": "text", "text": "and now?"}]})
    counted = claude.messages.count_tokens(model=BASE, messages=turns).input_tokens
    call = f"<call>{block.name} {json.dumps(block.input)}</call>"
    assert counted == len(f"user:hi\nassistant:{call}\ntool:Error: no such city\nuser:and now?\nassistant:")
    assert claude.messages.count_tokens(model=BASE, messages=turns, tools=CLIENT_TOOLS).input_tokens > counted
    kinds: set[tuple[str, ...]] = set()
    for _ in range(300):  # they are drawn without a seed, which this API does not have
        if kinds >= {("text",), ("tool_use",)}:
            break
        with claude.messages.stream(**{**given, "messages": turns}) as stream:
            begun = [event.content_block.type for event in stream if event.type == "content_block_start"]
            message = stream.get_final_message()
        assert begun == [part.type for part in message.content]
        kinds |= {tuple(begun)}
        for part in message.content:
            if part.type == "tool_use":
                assert set(part.input) <= {"city", "zone"}
                assert message.stop_reason == "tool_use"
    assert kinds >= {("text",), ("tool_use",)}


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("tools.*type", {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}),
        ("tool_choice.name", {"tool_choice": {"type": "tool"}}),
        ("tool_choice.name", {"tool_choice": {"type": "auto", "name": "time"}}),
        ("tool_choice: asks for a call", {"tools": [], "tool_choice": {"type": "any"}}),
        (
            "messages.*tool_result is for the role user",
            {
                "messages": [
                    {"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "a"}]}
                ]
            },
        ),
        (
            "no message has their results",
            {
                "messages": [
                    *HI,
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "time", "input": {}}]},
                ]
            },
        ),
    ],
)
def test_what_anthropics_tools_cannot_be_is_refused_by_name_on_fakes(
    claude: anthropic.Anthropic, field: str, given: Any
) -> None:
    body: Any = {"model": BASE, "messages": HI, "max_tokens": 9, "tools": CLIENT_TOOLS} | given
    with pytest.raises(anthropic.BadRequestError, match=field):
        claude.messages.create(**body)
