"""What the fake sampler spells under a `Grammar`: one of a few texts."""

import itertools
import json
from collections.abc import Iterator, Mapping
from typing import Any

from tinker_local.backend.fakes.fake_model import EOS_ID
from tinker_local.backend.rendering.grammar import Grammar
from tinker_local.types import InvalidRequestError

FEW = 4
"""Values of a schema that are tried, out of those that it has."""

_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "string": ("a", "b", ""),
    "integer": (0, 7, -12),
    "number": (0, 1.5, -2),
    "boolean": (True, False),
    "null": (None,),
}


def texts_of(grammar: Grammar) -> tuple[str, ...]:
    """Texts that `grammar` allows; InvalidRequestError for a kind that the fake does not know."""
    if grammar.kind == "choice":
        return tuple(json.loads(grammar.text))
    if grammar.kind != "json":
        raise InvalidRequestError(f"{grammar.field}: the fake knows JSON schemas and choices, not {grammar.kind!r}")
    schema = json.loads(grammar.text)
    return tuple(json.dumps(value) for value in few_values(schema, grammar.field))


def next_tokens(texts: tuple[str, ...], so_far: str) -> list[int]:
    """The tokens that may follow `so_far`, which begins one of `texts`."""
    longer = {ord(text[len(so_far)]) for text in texts if text.startswith(so_far) and len(text) > len(so_far)}
    return sorted(longer | ({EOS_ID} if so_far in texts or not longer else set()))


def few_values(schema: Any, field: str) -> list[Any]:
    """Up to `FEW` values of a JSON schema."""
    return list(itertools.islice(_values(schema, field), FEW))


def _values(schema: Any, field: str) -> Iterator[Any]:
    match schema:
        case True:
            yield {}
        case {"const": value}:
            yield value
        case {"enum": list(values)}:
            yield from values
        case {"anyOf": list(parts)}:
            for part in parts:
                yield from _values(part, field)
        case {"type": "array"}:
            items = few_values(schema.get("items", True), field)
            yield [items[0]] * max(1, schema.get("minItems", 1))
        case {"type": "object"}:
            properties = schema.get("properties", {})
            parts = [few_values(properties[name], field) for name in properties]
            for chosen in itertools.product(*parts):
                yield dict(zip(properties, chosen, strict=True))
        case {"type": str(kind)} if kind in _PLAIN:
            yield from _PLAIN[kind]
        case _:
            raise InvalidRequestError(f"{field}: the fake knows no schema {json.dumps(schema)[:100]}")
