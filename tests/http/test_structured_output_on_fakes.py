"""Structured output with OpenAI's and Anthropic's own clients: what is spelled, its logprobs, and what is refused."""

import json
import math
from dataclasses import replace
from typing import Any, Literal

import anthropic
import jsonschema  # type: ignore[import-untyped]
import openai
import pydantic
import pytest
from tinker_local.backend import BackendOptions, InProcessBackend, ModelSource
from tinker_local.backend.models.load_engines import load_fake

from tests.http.conftest import BASE

HI: Any = [{"role": "user", "content": "hi"}]
SCHEMA: Any = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}, "count": {"type": "integer"}},
    "required": ["colour", "count"],
    "additionalProperties": False,
}
ASKED: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}


class Colour(pydantic.BaseModel):
    colour: Literal["red", "green"]
    count: int


def test_answers_are_of_the_schema_whole_and_streamed_on_fakes(client: openai.OpenAI) -> None:
    found = set()
    for seed in range(6):
        asked: Any = {"model": BASE, "messages": HI, "seed": seed, "response_format": ASKED}
        whole = client.chat.completions.create(**asked).choices[0]
        assert whole.finish_reason == "stop"
        said = json.loads(whole.message.content or "")
        jsonschema.validate(said, SCHEMA)
        found.add(said["colour"])
        stream = client.chat.completions.create(**asked, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == whole.message.content
    assert found == {"red", "green"}
    parsed = client.chat.completions.parse(model=BASE, messages=HI, response_format=Colour).choices[0].message.parsed
    assert parsed is not None
    assert parsed.colour in ("red", "green")
    anything = client.chat.completions.create(model=BASE, messages=HI, response_format={"type": "json_object"})
    assert isinstance(json.loads(anything.choices[0].message.content or ""), dict)


def test_vllms_structured_outputs_are_taken_in_both_routes_on_fakes(client: openai.OpenAI) -> None:
    choice: Any = {"structured_outputs": {"choice": ["left", "right"]}}
    said = client.chat.completions.create(model=BASE, messages=HI, extra_body=choice).choices[0].message.content
    assert said in ("left", "right")
    assert client.completions.create(model=BASE, prompt="a", extra_body=choice).choices[0].text in ("left", "right")
    given: Any = {"structured_outputs": {"json": json.dumps(SCHEMA)}}
    text = client.chat.completions.create(model=BASE, messages=HI, extra_body=given).choices[0].message.content
    jsonschema.validate(json.loads(text or ""), SCHEMA)


def test_anthropics_client_parses_an_output_format_on_fakes(claude: anthropic.Anthropic) -> None:
    config: Any = {"format": {"type": "json_schema", "schema": SCHEMA}}
    said = claude.messages.create(model=BASE, messages=HI, max_tokens=99, output_config=config)
    jsonschema.validate(json.loads("".join(getattr(block, "text", "") for block in said.content)), SCHEMA)
    with pytest.raises(anthropic.BadRequestError, match=r"output_config.effort"):
        claude.messages.create(model=BASE, messages=HI, max_tokens=99, output_config={"effort": "low"})


def test_logprobs_are_those_of_what_the_grammar_allows_on_fakes(client: openai.OpenAI) -> None:
    choice: Any = {"structured_outputs": {"choice": ["left", "lost"]}}
    said = client.chat.completions.create(
        model=BASE, messages=HI, extra_body=choice, logprobs=True, top_logprobs=5, temperature=0.7
    )
    assert said.choices[0].logprobs is not None
    entries = said.choices[0].logprobs.content or []
    assert [entry.token for entry in entries] == [*(said.choices[0].message.content or ""), "\0"]
    assert [len(entry.top_logprobs) for entry in entries] == [1, 2, 1, 1, 1]
    assert sum(math.exp(top.logprob) for top in entries[1].top_logprobs) == pytest.approx(1, abs=1e-6)
    assert [entry.logprob for entry in entries if len(entry.top_logprobs) == 1] == pytest.approx([0] * 4, abs=1e-6)


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("response_format.json_schema.json_schema.schema", {"response_format": {"type": "json_schema"}}),
        ("response_format", {"response_format": {"type": "grammar"}}),
        ("structured_outputs", {"structured_outputs": {"regex": "a", "choice": ["a"]}}),
        ("structured_outputs", {"structured_outputs": {}}),
        ("structured_outputs.choice", {"structured_outputs": {"choice": []}}),
        ("structured_outputs.json: not JSON", {"structured_outputs": {"json": "{"}}),
        ("structured_outputs.whitespace_pattern", {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}),
        ("structured_outputs: not together", {"structured_outputs": {"regex": "a"}, "response_format": ASKED}),
        ("structured_outputs.regex: 65537 characters", {"structured_outputs": {"regex": "a" * 65537}}),
        ("structured_outputs.regex: character 1 is NUL", {"structured_outputs": {"regex": "a\0"}}),
        ("structured_outputs.regex: the fake knows", {"structured_outputs": {"regex": "a"}}),
        ("guided_json", {"guided_json": SCHEMA}),
    ],
)
def test_what_is_no_grammar_is_refused_by_its_name_streamed_or_not_on_fakes(
    client: openai.OpenAI, field: str, given: Any
) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match=field.replace(".json_schema.json_schema.", ".*")):
            client.chat.completions.create(model=BASE, messages=HI, stream=stream, extra_body=given)


def test_a_deeply_nested_schema_is_refused_with_its_field_on_fakes(client: openai.OpenAI) -> None:
    schema: Any = {"type": "integer"}
    for _ in range(80):
        schema = {"anyOf": [schema]}
    given: Any = {"type": "json_schema", "json_schema": {"name": "deep", "schema": schema}}
    with pytest.raises(openai.BadRequestError, match=r"response_format.json_schema.schema: .* more than 64 deep"):
        client.chat.completions.create(model=BASE, messages=HI, response_format=given)


def test_a_server_without_grammars_refuses_them_by_name_on_fakes(tmp_path: Any) -> None:
    options = replace(BackendOptions(data_dir=tmp_path), grammars="never")
    served = InProcessBackend([ModelSource(BASE, BASE)], options, load=load_fake).serve_in_thread()
    try:
        with openai.OpenAI(base_url=f"{served.url}/v1", api_key=served.api_key, max_retries=0) as client:
            with pytest.raises(openai.BadRequestError, match=r"response_format.*: this server .* --grammars never"):
                client.chat.completions.create(model=BASE, messages=HI, response_format=ASKED)
            assert client.chat.completions.create(model=BASE, messages=HI).choices
    finally:
        served.close()
