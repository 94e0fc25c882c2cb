"""Random JSON schemas over all keywords, and random complete texts of a grammar."""

# mypy: allow-untyped-calls

import random
from typing import Any

import numpy as np

NAMES = ("a", "b", "ab", 'q"', "b\\", "ä", "x y", "")
PATTERNS = (
    "^[a-c]+$", "a", "^a|b$", '["\\\\]', r"^\d{2,3}$", r"^\w+\s?\w*$", "^[^a-z]{1,4}$", r"^\S*$", "^(x|yz)*$", r"\D$",
    "^.$", "^(?:ab?){1,3}c$", "[\\x00-\\x1f]", r"^\W[\d_]$", "(?!a)b", r"\bx", "^[^\\d\"]$", "^$", "(^a$|^b+$)",
)  # fmt: skip
FORMATS = (
    "date",
    "date-time",
    "time",
    "email",
    "uuid",
    "ipv4",
    "ipv6",
    "uri",
    "hostname",
    "duration",
    "nonsense",
    "password",
)
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    1,
    1.0,
    2.5,
    -3,
    "",
    "a",
    "ab",
    'q"\\\n',
    [],
    [1],
    {},
    {"a": 1},
    "2020-01-01",
)


class Schemas:
    """Draws schemas; the same ones from the same `rng`."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def whole(self) -> Any:
        """A schema with definitions that its references may name."""
        schema = self.any(3)
        if isinstance(schema, dict) and self._rng.random() < 0.6:
            schema["$defs"] = {name: self.any(1) for name in ("d", "e")}
        if isinstance(schema, dict) and self._rng.random() < 0.1:
            schema["$schema"] = self._rng.choice(
                ["https://json-schema.org/draft/2020-12/schema", "http://json-schema.org/draft-07/schema#"]
            )
        return schema

    def any(self, depth: int) -> Any:
        """A schema; one that is nested no deeper than `depth`."""
        rng = self._rng
        if rng.random() < 0.06:
            return rng.choice([True, False, {}])
        schema: dict[str, Any] = {}
        if rng.random() < 0.85:
            schema["type"] = rng.choice(TYPES) if rng.random() < 0.85 else rng.sample(TYPES, 2)
        kind = schema.get("type", rng.choice(TYPES))
        for one in kind if isinstance(kind, list) else [kind]:
            schema |= self._of_type(one, depth)
        if rng.random() < 0.12:
            schema |= self._of_type(rng.choice(TYPES), depth)
        if rng.random() < 0.08:
            schema["enum"] = rng.sample(VALUES, rng.randint(1, 4))
        if rng.random() < 0.05:
            schema["const"] = rng.choice(VALUES)
        if depth and rng.random() < 0.3:
            schema |= self._applied(depth)
        if rng.random() < 0.1:
            schema["title"] = "t"
        return schema

    def _some(self, chance: float, **keywords: Any) -> dict[str, Any]:
        return {name: make() for name, make in keywords.items() if self._rng.random() < chance}

    def _of_type(self, kind: str, depth: int) -> dict[str, Any]:
        rng = self._rng
        number = lambda: rng.choice([0, 1, -2, 5, 10, 99, 0.5, -0.25, 3.75, 100.125, 1e3, -17])  # noqa: E731
        count = lambda: rng.randint(0, 3)  # noqa: E731
        below = lambda: self.any(max(0, depth - 1))  # noqa: E731
        if kind in ("integer", "number"):
            found = self._some(0.25, minimum=number, maximum=number, exclusiveMinimum=number, exclusiveMaximum=number)
            return found | self._some(0.04, multipleOf=lambda: rng.choice([1, 2, 0.5]))
        if kind == "string":
            found = self._some(0.2, minLength=count, maxLength=lambda: rng.randint(0, 8))
            return (
                found
                | self._some(0.2, pattern=lambda: rng.choice(PATTERNS))
                | self._some(0.12, format=lambda: rng.choice(FORMATS))
            )
        if kind == "array" and depth:
            found = self._some(0.5, items=below) | self._some(0.2, minItems=count, maxItems=lambda: rng.randint(0, 4))
            found |= self._some(0.2, prefixItems=lambda: [below() for _ in range(rng.randint(1, 3))])
            return found | self._some(
                0.04, uniqueItems=lambda: True, contains=below, minContains=count, unevaluatedItems=below
            )
        if kind == "object" and depth:
            names = rng.sample(NAMES, rng.randint(1, 4))
            found = self._some(0.75, properties=lambda: {name: below() for name in names})
            found |= self._some(0.4, required=lambda: rng.sample(NAMES, rng.randint(0, 2)) + names[:1])
            found |= self._some(0.4, additionalProperties=lambda: rng.choice([True, False, False, below()]))
            found |= self._some(0.12, minProperties=count, maxProperties=lambda: rng.randint(0, 4))
            found |= self._some(0.1, patternProperties=lambda: {rng.choice(PATTERNS): below()})
            found |= self._some(
                0.1,
                propertyNames=lambda: rng.choice(
                    [{"enum": ["a", "b", 3]}, {"maxLength": 2}, {"pattern": "^[a-z]+$"}, below()]
                ),
            )
            if "required" in found:
                found["required"] = list(dict.fromkeys(found["required"]))
            return found | self._some(
                0.03, dependentRequired=lambda: {"a": ["b"]}, dependentSchemas=lambda: {"a": below()},
                dependencies=lambda: {"a": ["b"]}, unevaluatedProperties=lambda: rng.choice([True, False]),
            )  # fmt: skip
        return {}

    def _applied(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        below = lambda: self.any(depth - 1)  # noqa: E731
        several = lambda: [below() for _ in range(rng.randint(1, 3))]  # noqa: E731
        keyword = rng.choice(("anyOf", "anyOf", "allOf", "oneOf", "oneOf", "not", "if", "$ref", "$ref"))
        if keyword == "$ref":
            return {"$ref": rng.choice(["#", "#/$defs/d", "#/$defs/e", "#/$defs/none"])}
        if keyword == "not":
            return {"not": below()}
        if keyword == "if":
            return {"if": below(), "then": below()}
        return {keyword: several()}


class Walker:
    """Draws complete texts of compiled grammars from what xgrammar's matcher allows at each token."""

    def __init__(self, vocabulary: Any, end: int) -> None:
        self._vocabulary = vocabulary
        self._tokens: list[bytes] = vocabulary.decoded_vocab
        self._end = end

    def text(self, compiled: Any, rng: random.Random, most: int = 600) -> bytes | None:
        """One text; None if it has no end after `most` tokens. AssertionError for a dead end."""
        import xgrammar

        matcher = xgrammar.GrammarMatcher(compiled, override_stop_tokens=[self._end])
        mask = xgrammar.allocate_token_bitmask(1, self._vocabulary.vocab_size)
        said = bytearray()
        for at in range(most):
            matcher.fill_next_token_bitmask(mask)
            bits = np.unpackbits(mask.numpy().view(np.uint8), bitorder="little")[: self._vocabulary.vocab_size]
            allowed = np.flatnonzero(bits).tolist()
            assert allowed, f"a dead end after {bytes(said)!r}"
            ends = self._end in allowed
            if ends and (len(allowed) == 1 or at > most // 3 or rng.random() < 0.5):
                return bytes(said)
            closing = [one for one in allowed if one != self._end and self._tokens[one][:1] in (b'"', b"}", b"]")]
            hurry = 0.25 if at < 60 else 0.9
            token = rng.choice(closing) if closing and rng.random() < hurry else rng.choice(allowed)
            if token == self._end:
                return bytes(said)
            assert matcher.accept_token(token)
            said += self._tokens[token]
        return None

    def accepts(self, compiled: Any, text: str) -> bool:
        """Whether `text` is one of the grammar."""
        import xgrammar

        matcher = xgrammar.GrammarMatcher(compiled, override_stop_tokens=[self._end])
        return bool(matcher.accept_string(text)) and bool(matcher.accept_token(self._end))
