"""`Grammar`: what a sample must spell, and what bounds it before an engine sees it."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tinker_local.types import InvalidRequestError

GrammarKind = Literal["json", "regex", "choice", "grammar", "structural_tag"]

SWITCHED_OFF = "this server was started with --grammars never"

MAX_CHARACTERS = 2**16
"""Of a grammar. Engines take up to seconds to compile one of this length."""

MAX_WRITTEN = 8 * MAX_CHARACTERS
"""Of JSON text, which may have blanks and escapes that the grammar does not."""

MAX_NESTING = 64
"""Objects and arrays within each other in a JSON schema or a structural tag."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """What all tokens of a sample together must spell; EOS ends it where the grammar does.

    `text`: a JSON schema, a regular expression, a JSON list of the texts of which it is one, a grammar in EBNF or Lark,
    or one of xgrammar's structural tags, by `kind`. `field`: of the request that asks for it, to name it in errors.
    `compact`: JSON has no blanks between its tokens.
    """

    kind: GrammarKind
    text: str
    field: str
    compact: bool = False

    @classmethod
    def of_json(cls, kind: GrammarKind, value: Any, field: str, *, compact: bool = False) -> "Grammar":
        """With `value` as JSON; InvalidRequestError if it is nested too deeply or refers to another document."""
        check_nesting(value, field)
        _check_references(value, field)
        return cls(kind, json.dumps(value, ensure_ascii=False, separators=(",", ":")), field, compact)

    @classmethod
    def of_json_text(cls, kind: GrammarKind, text: str, field: str, *, compact: bool = False) -> "Grammar":
        """The same of JSON text; InvalidRequestError if it is none."""
        if len(text) > MAX_WRITTEN:
            raise InvalidRequestError(f"{field}: {len(text)} characters, the limit is {MAX_WRITTEN}")
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InvalidRequestError(f"{field}: not JSON: {error}") from None
        return cls.of_json(kind, value, field, compact=compact)

    def __post_init__(self) -> None:
        if len(self.text) > MAX_CHARACTERS:
            raise InvalidRequestError(f"{self.field}: {len(self.text)} characters, the limit is {MAX_CHARACTERS}")
        if "\0" in self.text:
            raise InvalidRequestError(f"{self.field}: character {self.text.index(chr(0))} is NUL")


def check_nesting(value: Any, field: str, most: int = MAX_CHARACTERS) -> None:
    """InvalidRequestError if `value` has objects or arrays in each other, more than `MAX_NESTING` deep, or as JSON more
    than `most` characters for certain: it is looked at no further then."""
    level: Sequence[Any] = (value,)
    characters = 0
    for _ in range(MAX_NESTING + 1):
        within = [one for one in level if isinstance(one, dict | list)]
        characters += sum(len(one) for one in level if isinstance(one, str)) + sum(map(len, within))
        if characters <= most:
            characters += sum(len(name) for one in within if isinstance(one, dict) for name in one)
        if characters > most:
            raise InvalidRequestError(f"{field}: {characters} characters or more, the limit is {most}")
        if not within:
            return
        level = [part for one in within for part in (one.values() if isinstance(one, dict) else one)]
    raise InvalidRequestError(f"{field}: objects and arrays are nested more than {MAX_NESTING} deep")


def _check_references(value: Any, field: str) -> None:
    """InvalidRequestError for a `$ref` to another document. xgrammar would allow any value there."""
    if isinstance(value, dict):
        reference = value.get("$ref")
        if isinstance(reference, str) and not reference.startswith("#"):
            raise InvalidRequestError(
                f"{field}: $ref {reference[:200]!r} has to begin with '#': no other document is read"
            )
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_references(part, field)
