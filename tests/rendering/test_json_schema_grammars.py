"""JSON schemas as grammars: which texts they allow, and what is refused at which place."""

import datetime
import enum
import json
import random
import typing
import uuid
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pydantic
import pytest
import xgrammar  # type: ignore[import-not-found]
from tinker_local.backend.rendering.structured.json_schema import SchemaError, grammar_of
from tinker_local.backend.rendering.structured.structural_tags import IF_POSSIBLE, tag_of

from tests.fuzz.random_schemas import Walker

END = 256
VOCABULARY = xgrammar.TokenizerInfo([bytes([byte]) for byte in range(END)] + [b"</s>"], stop_token_ids=[END])
COMPILER = xgrammar.GrammarCompiler(VOCABULARY, max_threads=1, cache_enabled=False)
WALKER = Walker(VOCABULARY, END)


def compiled(schema: Any, **options: Any) -> Any:
    return COMPILER.compile_grammar(grammar_of(schema, **options))


def allows(schema: Any, *texts: str) -> list[bool]:
    grammar = compiled(schema)
    return [WALKER.accepts(grammar, text) for text in texts]


def follows(schema: Any, count: int = 6) -> None:
    grammar, rng = compiled(schema), random.Random(1)
    texts = [WALKER.text(grammar, rng, 3000) for _ in range(count)]
    assert any(text is not None for text in texts)
    for text in texts:
        if text is not None:
            jsonschema.validate(json.loads(text), schema)


DRAFT_7 = "http://json-schema.org/draft-07/schema#"
OBJECT: Any = {"type": "object", "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "string", "maxLength": 3},
         ['"a\\n\\u00e9"', '"\\ud83d\\ude00日b"', '""'], ['"abcd"', '"\n"', '"\\ud83d"']),
        ({"type": "string", "minLength": 2}, ['"ab"', '"\\\\\\""'], ['"a"', '"\\n"', '"a\tb"']),
        ({"type": "string", "pattern": '^["\\\\]+$'}, ['"\\"\\\\"'], ['"""', '"\\"', '""']),
        ({"type": "string", "pattern": "b"}, ['"abc"', '"b"'], ['"ac"']),
        ({"type": "string", "pattern": "^a|b$"}, ['"ax"', '"xb"'], ['"xa"']),
        ({"type": "string", "pattern": r"^[a-z]\w*$", "maxLength": 3}, ['"a_1"', '"a"'], ['"a_12"', '"1a"']),
        ({"type": "string", "pattern": r"^[^\d]$"}, ['"a"', '"é"'], ['"1"', '"\u0661"']),
        ({**OBJECT, "properties": {"a": {"const": 1}}, "required": ["a"]}, ['{"a":1}', '{\n    "a": 1\n}'], ["{}"]),
        ({"type": "object", "properties": {"a": {"const": 1}}, "required": ["b"]},
         ['{"a":1,"b":null}', '{"b":[2]}'], ["{}", '{"a":1}']),
        ({"allOf": [{"properties": {"a": {"type": "integer"}}, "required": ["a"]}], "type": "object",
          "properties": {"b": {"type": "null"}}, "required": ["b"]}, ['{"b":null,"a":1}'], ['{"b":null}', '{"a":1}']),
        ({"$defs": {"d": {"type": "string"}}, "$ref": "#/$defs/d", "maxLength": 1}, ['"a"'], ['"ab"', "1"]),
        ({"type": "string", "enum": ["a", 1, None]}, ['"a"'], ["1", "null"]),
        ({"enum": [1, 2, 3], "minimum": 2, "not": {"const": 3}}, ["2"], ["1", "3"]),
        ({"type": "object", "additionalProperties": {"type": "integer"}, "properties": {"ab": {"type": "null"}}},
         ['{"ab":null,"a":1,"abc":2}', '{"b":1}'], ['{"ab":1}', '{"\\u0061b":1}']),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 1.5}, ["0.001", "1.5", "1"], ["0", "0.0", "1.6", "1e0"]),
        ({"type": "integer", "minimum": -12, "exclusiveMaximum": 105},
         ["-12", "104", "0"], ["-13", "105", "-0", "1.0"]),
        ({"type": "array", "prefixItems": [{"type": "null"}], "items": {"type": "boolean"}, "maxItems": 2},
         ["[]", "[null]", "[null, true]"], ["[true]", "[null,true,true]"]),
        ({"oneOf": [{"type": "object", "properties": {"k": {"const": "x"}}}, {"type": "object",
          "properties": {"k": {"const": "y"}}}]}, ['{"k":"x"}', '{"k":"y"}'], ["{}", '{"k":"z"}']),
        ({"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}, ['"1.50"', '"-.5"'], ['"."', '"a"']),
        ({"type": "string", "format": "uri", "minLength": 1, "maxLength": 2083}, ['"https://a.org/b?c=d"'], ['"a b"']),
        ({"type": "string", "format": "date"}, ['"2024-02-29"', '"2023-12-31"'], ['"2023-02-29"', '"2023-04-31"']),
        ({**OBJECT, "properties": {"a": {}, "b": {}}, "minProperties": 1, "maxProperties": 1}, ['{"a":1}', '{"b":1}'],
         ["{}", '{"a":1,"b":1}']),
        ({"type": "object", "patternProperties": {"^x": {"type": "null"}}, "additionalProperties": False},
         ['{"x1":null}', "{}"], ['{"y":null}']),
        ({"type": "object", "propertyNames": {"enum": ["p", "q"]}, "additionalProperties": {"type": "null"}},
         ['{"p":null,"q":null}'], ['{"r":null}', '{"p":1}']),
        ({"$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}}, "$ref": "#/$defs/n"},
         ["[[],[[]]]"], ["[1]"]),
    ],
)  # fmt: skip
def test_a_keyword_is_followed(schema: Any, right: list[str], wrong: list[str]) -> None:
    assert allows(schema, *right) == [True] * len(right)
    assert allows(schema, *wrong) == [False] * len(wrong)
    for text in right:
        jsonschema.validate(json.loads(text), schema)
    follows(schema)


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"properties": {"a": {"not": {"type": "null"}}}}, "not at #/properties/a: "),
        ({"if": {"type": "string"}, "then": {"maxLength": 1}}, "if at #: "),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired at #: "),
        ({"items": {"type": "object", "dependentSchemas": {"a": {}}}}, "dependentSchemas at #/items: "),
        ({"$defs": {"x~/": {"type": "array", "contains": {}}}, "$ref": "#/$defs/x~0~1"},
         "contains at #/\\$defs/x~0~1: "),
        ({"type": "array", "uniqueItems": True}, "uniqueItems at #: "),
        ({"type": "number", "multipleOf": 0.1}, "multipleOf at #: "),
        ({"type": "string", "pattern": "(?=a)b"}, "pattern at #: .*\\(\\?= is not followed"),
        ({"type": "string", "pattern": r"(a)\1"}, "pattern at #: "),
        ({"type": "string", "pattern": "a", "minLength": 3}, "minLength at #: "),
        ({"type": "string", "format": "iban"}, "format at #: 'iban'"),
        ({"allOf": [{"type": "string", "pattern": "a"}, {"pattern": "b"}]}, "pattern at #/allOf/0 and #/allOf/1"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf at #: options 0 and 1 may overlap"),
        ({"anyOf": [{"type": "colour"}]}, "type at #/anyOf/0: there is no type 'colour'"),
        ({"type": "string", "minLength": "3"}, "minLength at #: has to be an integer"),
        ({"type": "object", "minProperties": 2}, "minProperties at #: "),
        ({"$ref": "#/$defs/none"}, "\\$ref at #: there is nothing"),
        ({"$ref": "#"}, "\\$ref at #: refers to itself"),
        ({"$ref": "https://example.org/s"}, "\\$ref at #: "),
        ({"type": "string", "maxLength": 1, "minLength": 2}, "no value fulfils it"),
        ({"properties": {"a": {"unevaluatedProperties": False}}}, "unevaluatedProperties at #/properties/a: "),
        ({"type": "object", "dependencies": {"a": ["b"]}}, "dependencies at #: "),
        ({"$schema": DRAFT_7, "items": {"prefixItems": [{}]}}, "prefixItems at #/items"),
        ({"$schema": DRAFT_7, "items": {"$ref": "#", "maxItems": 1}}, "ref at #/items"),
        ({"type": "number", "minimum": 3, "exclusiveMinimum": True}, "exclusiveMinimum at #: "),
    ],
)  # fmt: skip
def test_what_cannot_be_followed_is_refused_at_its_place(schema: Any, reason: str) -> None:
    with pytest.raises(SchemaError, match=reason):
        grammar_of(schema)


class Colour(enum.Enum):
    RED = "red"
    GREEN = "green"


class Cat(pydantic.BaseModel):
    kind: typing.Literal["cat"] = "cat"
    age: int = pydantic.Field(ge=0, le=30)


class Dog(pydantic.BaseModel):
    kind: typing.Literal["dog"]
    name: str = pydantic.Field(min_length=1, max_length=10, pattern=r'^[a-z"\\]+$')


class Everything(pydantic.BaseModel):
    """What pydantic writes for fields that people use."""

    pet: typing.Annotated[Cat | Dog, pydantic.Field(discriminator="kind")]
    when: datetime.datetime
    day: datetime.date
    at: datetime.time
    lasts: datetime.timedelta
    identity: uuid.UUID
    url: pydantic.AnyUrl
    share: float = pydantic.Field(gt=-1.5, lt=2.25)
    count: pydantic.PositiveInt
    note: str | None = None
    scores: list[float] = pydantic.Field(max_length=3)
    pair: tuple[int, str]
    by_name: dict[str, int]
    by_colour: dict[typing.Literal["p", "q"], int]
    colour: Colour
    parts: list["Everything"] = []


def test_what_pydantic_writes_is_followed_and_validates_again() -> None:
    grammar, rng = compiled(Everything.model_json_schema()), random.Random(3)
    texts = [WALKER.text(grammar, rng, 3000) for _ in range(8)]
    found = [text for text in texts if text is not None]
    assert found
    for text in found:
        Everything.model_validate_json(text)
    value = Everything(
        pet=Cat(age=3), when=datetime.datetime(2024, 2, 29, 1, 2, 3, tzinfo=datetime.UTC),
        day=datetime.date(2024, 2, 29),
        at=datetime.time(1, 2, 3, tzinfo=datetime.UTC), lasts=datetime.timedelta(days=1), identity=uuid.UUID(int=7),
        url=pydantic.AnyUrl("https://example.org/a?b=c"), share=0.25, count=3,
        scores=[1.5], pair=(1, "a"), by_name={"x": 1}, by_colour={"p": 1}, colour=Colour.RED,
    )  # fmt: skip
    assert WALKER.accepts(grammar, value.model_dump_json())
    assert WALKER.accepts(grammar, value.model_dump_json(indent=4))


OPENAIS: Any = {
    "type": "object",
    "properties": {
        "steps": {"type": "array", "items": {"$ref": "#/$defs/step"}},
        "final_answer": {"type": ["string", "null"]},
        "linked": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
        "unit": {"type": "string", "description": "of the temperature", "enum": ["celsius", "fahrenheit"]},
    },
    "$defs": {
        "step": {
            "type": "object",
            "properties": {"explanation": {"type": "string"}, "output": {"type": "string"}},
            "required": ["explanation", "output"],
            "additionalProperties": False,
        }
    },
    "required": ["steps", "final_answer", "linked", "unit"],
    "additionalProperties": False,
}
ANSWER: Any = {
    "steps": [{"explanation": "a\n", "output": 'b"'}],
    "final_answer": None,
    "linked": None,
    "unit": "celsius",
}


def test_blanks_are_bound_and_pretty_json_is_within() -> None:
    grammar = compiled(OPENAIS)
    deep = ANSWER | {"linked": ANSWER | {"linked": ANSWER}}
    for value in (ANSWER, deep):
        for options in ({}, {"indent": 2}, {"indent": 4}, {"indent": "\t"}, {"separators": (",", ":")}):
            assert WALKER.accepts(grammar, json.dumps(value, ensure_ascii=False, **options))  # type: ignore[arg-type]
    assert not WALKER.accepts(grammar, json.dumps(ANSWER).replace("{", "{\n\n", 1))
    assert not WALKER.accepts(grammar, json.dumps(ANSWER).replace("{", "{" + "\n" + " " * 65, 1))
    flat = {"type": "object", "properties": {"a": {"type": "null"}}, "additionalProperties": False}
    assert allows(flat, '{\n        "a": null\n}', '{\n         "a": null\n}') == [True, False]
    assert allows({"type": "object"}, json.dumps({"a": [{"b": [1, {}]}]}, indent=4)) == [True]
    tight = compiled(OPENAIS, compact=True)
    assert WALKER.accepts(tight, json.dumps(ANSWER, separators=(",", ":")))
    assert not WALKER.accepts(tight, json.dumps(ANSWER))


def test_schemas_in_structural_tags_are_followed_the_same_way() -> None:
    schema: Any = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 2}}, "required": ["a", "b"]}
    tag = {"type": "tag", "begin": "<f>", "content": {"type": "json_schema", "json_schema": schema}, "end": "</f>"}
    older: Any = {"structures": [{"begin": "<f>", "schema": schema, "end": "</f>"}], "triggers": ["<f>"]}
    for value in ({"type": "structural_tag", "format": tag}, older):
        grammar = COMPILER.compile_structural_tag(json.dumps(tag_of(value)))
        assert WALKER.accepts(grammar, '<f>{"a":"\\n","b":1}</f>')
        assert not WALKER.accepts(grammar, '<f>{"a":"\n","b":1}</f>')
        assert not WALKER.accepts(grammar, '<f>{"a":"\\n"}</f>')
    further: Any
    for further, accepted in (({}, False), ({"not": {}}, True)):
        wished = {**OBJECT, **further, IF_POSSIBLE: True}
        content = {"type": "json_schema", "json_schema": wished}
        loose = tag_of({"type": "structural_tag", "format": {**tag, "content": content}})
        assert WALKER.accepts(COMPILER.compile_structural_tag(json.dumps(loose)), '<f>{"c":1}</f>') == accepted
    bad = {
        **tag,
        "content": {"type": "json_schema", "json_schema": {"type": "object", "properties": {"a": {"not": {}}}}},
    }
    with pytest.raises(SchemaError, match=r"not at #/format/content/json_schema: .*#/properties/a"):
        tag_of({"type": "structural_tag", "format": bad})
    xml = {"type": "json_schema", "style": "qwen_xml", "json_schema": {**OBJECT, "properties": {"a": {"pattern": "b"}}}}
    with pytest.raises(SchemaError, match=r"pattern at #/format/content/json_schema/properties/a: .* XML"):
        tag_of({"type": "structural_tag", "format": {**tag, "content": xml}})
