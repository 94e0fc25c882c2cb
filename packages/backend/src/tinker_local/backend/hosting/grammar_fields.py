"""Fields of OpenAI's and Anthropic's APIs that ask for structured output, as grammars."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator
from tinker_local.backend.hosting.endpoint_fields import Label, Unsupported, only
from tinker_local.backend.rendering.grammar import Grammar
from tinker_local.types import Frozen
from tinker_local.types.base import TupleOf

AN_OBJECT = {"type": "object"}


class TextFormat(Frozen):
    type: Literal["text"]

    def grammar(self, field: str) -> None:
        """None: any text."""


class JsonObjectFormat(Frozen):
    type: Literal["json_object"]

    def grammar(self, field: str) -> Grammar:
        """Any object."""
        return Grammar.of_json("json", AN_OBJECT, field)


class JsonSchema(Frozen):
    """`strict` false asks for less than is done."""

    json_schema: dict[str, Any] = Field(alias="schema")
    name: Label = None
    description: Label = None
    strict: bool | None = None


class JsonSchemaFormat(Frozen):
    type: Literal["json_schema"]
    json_schema: JsonSchema

    def grammar(self, field: str) -> Grammar:
        """A value of the schema."""
        return Grammar.of_json("json", self.json_schema.json_schema, f"{field}.json_schema.schema")


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class OutputFormat(Frozen):
    """Anthropic's."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")

    def grammar(self, field: str) -> Grammar:
        """A value of the schema."""
        return Grammar.of_json("json", self.json_schema, f"{field}.schema")


class OutputConfig(Frozen):
    """Anthropic's."""

    format: OutputFormat | None = None
    effort: Unsupported = None
    task_budget: Unsupported = None


class StructuredOutputs(Frozen):
    """vLLM's: one of the first six."""

    json_schema: dict[str, Any] | str | None = Field(None, alias="json")
    json_object: Literal[True] | None = None
    regex: str | None = None
    choice: Annotated[TupleOf[str], Field(min_length=1)] | None = None
    grammar_text: Annotated[str, Field(min_length=1)] | None = Field(None, alias="grammar")
    structural_tag: Annotated[str, Field(min_length=1)] | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: Annotated[Any, only(False)] = None
    whitespace_pattern: Unsupported = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        names = ("json_schema", "json_object", "regex", "choice", "grammar_text", "structural_tag")
        if sum(getattr(self, name) is not None for name in names) != 1:
            raise ValueError("give one of json, json_object, regex, choice, grammar and structural_tag")
        return self

    def grammar(self, field: str) -> Grammar:
        """The one that is given."""
        if self.choice is not None:
            return Grammar.of_json("choice", list(self.choice), f"{field}.choice")
        if self.regex is not None:
            return Grammar("regex", self.regex, f"{field}.regex")
        if self.grammar_text is not None:
            return Grammar("grammar", self.grammar_text, f"{field}.grammar")
        if self.structural_tag is not None:
            return Grammar.of_json_text("structural_tag", self.structural_tag, f"{field}.structural_tag")
        compact = bool(self.disable_any_whitespace)
        if isinstance(self.json_schema, str):
            return Grammar.of_json_text("json", self.json_schema, f"{field}.json", compact=compact)
        schema = AN_OBJECT if self.json_schema is None else self.json_schema
        return Grammar.of_json("json", schema, f"{field}.json", compact=compact)
