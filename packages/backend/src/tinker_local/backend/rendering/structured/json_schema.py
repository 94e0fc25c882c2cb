"""A JSON schema as a grammar: every text of it is JSON of the schema, or a keyword is refused at its place.

xgrammar's own converter ignores much of what a schema says. Here a place of the output is described by the schemas that
all have to hold there (a conjunction of places of the document); `allOf`, `$ref` and keywords beside them only add to
it, and `anyOf` and `oneOf` divide it. Values of `enum` and `const` are checked one by one, by `jsonschema`.

Less than the schema allows may be said where that costs little: properties come in the schema's order, those that it
does not name only where it speaks of them, numbers have at most 30 digits, formats are those that every parser takes.
"""

import functools
import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tinker_local.backend.rendering.structured.ebnf import (
    EMPTY,
    NOTHING,
    Concatenated,
    Either,
    Expression,
    OneOf,
    Repeat,
    Rule,
    Text,
    chars,
    common,
    complement,
    each_of,
    either,
    optional,
    repeat,
    seq,
    write,
)
from tinker_local.backend.rendering.structured.formats import ANY_NUMBER, ANY_TEXT, FORMATS, INTEGERS
from tinker_local.backend.rendering.structured.numbers import Bound, exact, numbers
from tinker_local.backend.rendering.structured.patterns import ANY, Pattern, PatternError

MOST_BRANCHES = 256
"""Combinations of `anyOf` and `oneOf` at one place."""

MOST_RULES = 20_000

INDENT = 8
"""Blanks at the beginning of a line for each level of objects and arrays, at most."""

MOST_INDENT = 64
"""Of a schema without a bound on its levels."""

_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
NOTES = frozenset(
    {
        *("title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly"),
        *("$comment", "$schema", "$defs", "definitions", "$anchor", "$vocabulary", "discriminator"),
        *("contentEncoding", "contentMediaType", "contentSchema"),
    }
)
"""Keywords that refuse no value."""

_REFUSED = (
    *("not", "if", "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties"),
    *("unevaluatedItems", "$recursiveRef", "$dynamicRef", "extends", "disallow", "divisibleBy", "contains"),
)
"""Keywords that are followed for values of `enum` and `const` alone, unless they allow everything."""

_OF_TYPE = {
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "format"),
    "array": ("items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems", "contains",
              "unevaluatedItems"),
    "object": ("properties", "patternProperties", "additionalProperties", "propertyNames", "required", "minProperties",
               "maxProperties", "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties"),
}  # fmt: skip

_NOWHERE = "nowhere"
"""The place of a schema that no value fulfils."""

Node = tuple[str, ...]
"""Places in the document, as JSON pointers: the schemas that all hold for a value."""


class SchemaError(ValueError):
    """A keyword that cannot be followed, and its place."""

    def __init__(self, place: str, keyword: str, reason: str) -> None:
        super().__init__(f"{keyword} at {place or '#'}: {reason}")
        self.place = place
        self.keyword = keyword
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Branch:
    """One way to fulfil a node, without references, `allOf`, `anyOf` and `oneOf`. `needs`: names of properties that
    tell it from other options of a `oneOf`."""

    places: frozenset[str] = frozenset()
    needs: frozenset[str] = frozenset()

    def and_(self, other: "Branch") -> "Branch":
        """Both at once."""
        return Branch(self.places | other.places, self.needs | other.needs)


def grammar_of(schema: Any, *, compact: bool = False) -> str:
    """EBNF, of which each text is JSON of `schema`; SchemaError. `compact`: no blanks between JSON's tokens.
    Otherwise one blank, or a line break and as many as pretty-printed JSON has."""
    try:
        json.dumps(schema, ensure_ascii=False).encode()
        return _Writer(schema, compact).grammar()
    except UnicodeEncodeError:
        raise SchemaError("", "schema", "it has half of a surrogate pair") from None
    except RecursionError:
        raise SchemaError("", "schema", "it is nested too deeply") from None


class _Writer:
    def __init__(self, schema: Any, compact: bool) -> None:
        self._schema = schema
        self._compact = compact
        named = schema.get("$schema") if isinstance(schema, dict) else None
        self._older = isinstance(named, str) and "2020-12" not in named
        self._names: dict[Node, str] = {}
        self._todo: list[Node] = []
        self._rules: dict[str, Expression] = {}
        self._children: dict[Node, set[Node]] = {}
        self._same: dict[Expression, str] = {}
        self._objects = itertools.count()
        self._order = {place: at for at, place in enumerate(_places(schema))}
        self._branches = functools.cache(self._branches_once)

    def grammar(self) -> str:
        """See `grammar_of`."""
        root: Node = ("",)
        name = self._name(root)
        while self._todo:
            node = self._todo.pop()
            self._rules[self._names[node]] = self._value(node)
            if len(self._rules) > MOST_RULES:
                raise SchemaError("", "$ref", "the schemas have too many combinations")
        self._rules |= self._common(root)
        written = write(self._rules, name)
        if written is None:
            raise SchemaError("", "schema", "no value fulfils it, of those that can be written")
        return written

    # Places -----------------------------------------------------------------------------------------------------------

    def _at(self, place: str) -> Any:
        if place == _NOWHERE:
            return False
        value = self._schema
        for part in place.split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            value = value[int(part)] if isinstance(value, list) else value[part]
        return value

    def _target(self, place: str, reference: Any) -> str:
        """The place that a `$ref` at `place` names."""
        if not isinstance(reference, str) or not re.fullmatch(r"#(/[^#]*)?", reference):
            raise SchemaError(f"#{place}", "$ref", f"{str(reference)[:200]!r} is not a JSON pointer into this schema")
        from urllib.parse import unquote

        target = unquote(reference[1:])
        try:
            found = self._at(target)
        except (LookupError, ValueError, TypeError):
            raise SchemaError(f"#{place}", "$ref", f"there is nothing at {reference[:200]!r}") from None
        if not isinstance(found, dict | bool):
            raise SchemaError(f"#{place}", "$ref", f"there is no schema at {reference[:200]!r}")
        return target

    def _name(self, node: Node) -> str:
        if node not in self._names:
            self._names[node] = f"v{len(self._names)}"
            self._todo.append(node)
        return self._names[node]

    def _node(self, places: Iterable[str]) -> Node:
        """Places of schemas that refuse something, in the order of the document."""
        kept = {place for place in places if self._at(place) is not True and self._at(place) != {}}
        return tuple(sorted(kept, key=lambda place: self._order.get(place, 0)))

    # Branches ---------------------------------------------------------------------------------------------------------

    def _branches_once(self, node: Node) -> tuple[Branch, ...]:
        found = [Branch()]
        for place in node:
            found = self._product(place, found, self._branches_at(place, ()))
        return tuple(found)

    def _product(self, place: str, left: Sequence[Branch], right: Sequence[Branch]) -> list[Branch]:
        if len(left) * len(right) > MOST_BRANCHES:
            raise SchemaError(f"#{place}", "anyOf", f"more than {MOST_BRANCHES} combinations")
        return list(dict.fromkeys(one.and_(other) for one in left for other in right))

    def _branches_at(self, place: str, above: tuple[str, ...]) -> list[Branch]:
        schema = self._at(place)
        if schema is True:
            return [Branch()]
        if schema is False:
            return []
        if not isinstance(schema, dict):
            raise SchemaError(f"#{place}", "schema", "has to be an object, true or false")
        if place in above:
            raise SchemaError(f"#{place}", "$ref", "refers to itself")
        above = (*above, place)
        if self._older and "prefixItems" in schema:
            raise SchemaError(f"#{place}", "prefixItems", "is not a keyword of this $schema")
        if self._older and "$ref" in schema and schema.keys() - NOTES - {"$ref", "$id"}:
            raise SchemaError(f"#{place}", "$ref", "this $schema ignores what is beside it; put both into an allOf")
        found = [Branch(frozenset({place}))]
        if "$ref" in schema:
            found = self._product(place, found, self._branches_at(self._target(place, schema["$ref"]), above))
        for keyword in ("allOf", "anyOf", "oneOf"):
            if keyword not in schema:
                continue
            options = schema[keyword]
            if not isinstance(options, list) or not options:
                raise SchemaError(f"#{place}", keyword, "has to be a list of schemas")
            places = [f"{place}/{keyword}/{index}" for index in range(len(options))]
            ways = [self._branches_at(each, above) for each in places]
            if keyword == "allOf":
                for way in ways:
                    found = self._product(place, found, way)
                continue
            if keyword == "oneOf":
                ways = self._apart(place, places, found, ways)
                found = list(dict.fromkeys(itertools.chain(*ways)))
                continue
            found = self._product(place, found, list(dict.fromkeys(itertools.chain(*ways))))
        return found

    def _apart(
        self, place: str, places: Sequence[str], beside: Sequence[Branch], ways: Sequence[Sequence[Branch]]
    ) -> list[list[Branch]]:
        """The options of a `oneOf` together with what is beside it, so that a value of one is of no other."""
        kept: list[list[Branch]] = [self._product(place, beside, way) for way in ways]
        for one, other in itertools.combinations(range(len(kept)), 2):
            for (at, first), (to, second) in itertools.product(enumerate(kept[one]), enumerate(kept[other])):
                needs = self._told_apart(first, places[one], second, places[other])
                if needs is None:
                    raise SchemaError(
                        f"#{place}", "oneOf", f"options {one} and {other} may overlap; write anyOf, or give both a "
                        "property with a different const"
                    )  # fmt: skip
                kept[one][at] = kept[one][at].and_(Branch(needs=needs[0]))
                kept[other][to] = kept[other][to].and_(Branch(needs=needs[1]))
        return kept

    def _told_apart(
        self, first: Branch, place: str, second: Branch, other: str
    ) -> tuple[frozenset[str], frozenset[str]] | None:
        """The properties that each of two branches needs, so that no value is of both; None if that is not seen."""
        nothing: tuple[frozenset[str], frozenset[str]] = (frozenset(), frozenset())
        ours, theirs = self._finite(first), self._finite(second)
        if ours is not None and theirs is not None:
            return nothing  # each value is checked against the whole
        if ours is not None and not any(self._valid(value, (other,)) for value in ours if self._valid(value, (place,))):
            return nothing
        if theirs is not None and not any(
            self._valid(value, (place,)) for value in theirs if self._valid(value, (other,))
        ):
            return nothing
        if ours is not None or theirs is not None:
            return None
        shared = self._types(first) & self._types(second)
        if not shared:
            return nothing
        if shared != {"object"}:
            return None
        one, two = self._object_parts(first), self._object_parts(second)
        for mine, yours in ((one, two), (two, one)):
            for name in mine.required:
                if not self._possible(yours.node_of(name)):
                    return nothing
        for name in one.declared:
            if name not in two.declared:
                continue
            mine_, yours_ = self._finite_node(one.node_of(name)), self._finite_node(two.node_of(name))
            if mine_ is None or yours_ is None:
                continue
            if not {_key(value) for value in mine_} & {_key(value) for value in yours_}:
                return frozenset({name}), frozenset({name})
        return None

    def _possible(self, node: Node) -> bool:
        """False if no value fulfils it at a glance."""
        return any(self._types(branch) for branch in self._branches(node))

    def _finite_node(self, node: Node) -> list[Any] | None:
        """All values of a node, if each of its branches names them."""
        found: list[Any] = []
        for branch in self._branches(node):
            values = self._finite(branch)
            if values is None:
                return None
            found += values
        return [value for value in found if self._valid(value, node)]

    # Assertions -------------------------------------------------------------------------------------------------------

    def _finite(self, branch: Branch) -> list[Any] | None:
        """The values of `enum` or `const`, if a schema of the branch has them."""
        for place in self._sorted(branch):
            schema = self._at(place)
            if "const" in schema:
                return [schema["const"]]
            if "enum" in schema:
                if not isinstance(schema["enum"], list):
                    raise SchemaError(f"#{place}", "enum", "has to be a list")
                return list(schema["enum"])
        return None

    def _sorted(self, branch: Branch) -> list[str]:
        return sorted(branch.places, key=lambda place: self._order.get(place, 0))

    def _valid(self, value: Any, node: Node) -> bool:
        import jsonschema  # type: ignore[import-untyped]

        kind = jsonschema.validators.validator_for(self._schema, default=jsonschema.Draft202012Validator)
        try:
            return all(kind(self._schema).evolve(schema=self._at(place)).is_valid(value) for place in node)
        except Exception as error:  # of several types, if it is not a schema
            raise SchemaError(f"#{node[0]}", "enum", f"cannot be checked: {type(error).__name__}") from None

    def _types(self, branch: Branch) -> frozenset[str]:
        """null, boolean, number, string, array and object."""
        kept = frozenset({*_TYPES} - {"integer"})
        for place in branch.places:
            named = self._named(place)
            if named is not None:
                kept &= frozenset("number" if one == "integer" else one for one in named)
        return kept

    def _named(self, place: str) -> list[str] | None:
        schema = self._at(place)
        if "type" not in schema:
            return None
        named = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        for one in named:
            if one not in _TYPES:
                raise SchemaError(f"#{place}", "type", f"there is no type {str(one)[:80]!r}")
        return list(named)

    def _check(self, branch: Branch, types: frozenset[str]) -> None:
        """SchemaError for a keyword that refuses something and cannot be followed."""
        for place in self._sorted(branch):
            schema = self._at(place)
            for keyword in _REFUSED:
                if keyword not in schema or not self._matters(keyword, types):
                    continue
                value = schema[keyword]
                if value in (True, {}) and keyword in ("unevaluatedProperties", "unevaluatedItems"):
                    continue
                if keyword == "if" and not {"then", "else"} & schema.keys():
                    continue
                if keyword == "not" and value is False:
                    continue
                if keyword in ("dependentRequired", "dependentSchemas", "dependencies") and value == {}:
                    continue
                raise SchemaError(f"#{place}", keyword, "cannot be followed")
            if "$id" in schema and place:
                raise SchemaError(f"#{place}", "$id", "cannot be followed below the root")

    def _matters(self, keyword: str, types: frozenset[str]) -> bool:
        """Whether a keyword can refuse values of `types`."""
        of = [kind for kind, keywords in _OF_TYPE.items() if keyword in keywords]
        return not of or bool(types & set(of))

    def _all(self, branch: Branch, keyword: str) -> list[tuple[str, Any]]:
        """Its values in the branch, with their places."""
        return [(place, self._at(place)[keyword]) for place in self._sorted(branch) if keyword in self._at(place)]

    def _count(self, branch: Branch, keyword: str, pick: Callable[[Iterable[int]], int]) -> int | None:
        """The strictest value of a keyword that counts."""
        found = []
        for place, value in self._all(branch, keyword):
            if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or value != int(value):
                raise SchemaError(f"#{place}", keyword, "has to be an integer of at least 0")
            found.append(int(value))
        return pick(found) if found else None

    # Values -----------------------------------------------------------------------------------------------------------

    def _value(self, node: Node) -> Expression:
        options: list[Expression] = []
        self._children[node] = set()
        for branch in self._branches(node):
            finite = self._finite(branch)
            if finite is not None:
                options += [Text(_json(value)) for value in finite if self._valid(value, node)]
                continue
            types = self._types(branch)
            self._check(branch, types)
            if "null" in types:
                options.append(Text("null"))
            if "boolean" in types:
                options.append(either(Text("true"), Text("false")))
            if "number" in types:
                options.append(self._shared(self._number(branch)))
            if "string" in types:
                options.append(self._shared(_quoted(self._string(branch))))
            if "array" in types:
                options.append(self._array(node, branch))
            if "object" in types:
                options.append(self._object(node, branch))
        return either(*options)

    def _shared(self, expression: Expression) -> Expression:
        """A rule for `expression`, the same for equal ones."""
        if expression not in self._same:
            self._same[expression] = f"s{len(self._same)}"
            self._rules[self._same[expression]] = expression
        return Rule(self._same[expression])

    def _number(self, branch: Branch) -> Expression:
        integers = False
        low: Bound | None = None
        high: Bound | None = None
        for place in self._sorted(branch):
            named, schema = self._named(place), self._at(place)
            integers |= named is not None and "integer" in named and "number" not in named
            for keyword, inner in (("minimum", True), ("exclusiveMinimum", False)):
                bound = self._bound(place, schema, keyword, allowed=inner)
                if bound is not None and (
                    low is None or (bound.value, not bound.allowed) > (low.value, not low.allowed)
                ):
                    low = bound
            for keyword, inner in (("maximum", True), ("exclusiveMaximum", False)):
                bound = self._bound(place, schema, keyword, allowed=inner)
                if bound is not None and (high is None or (bound.value, bound.allowed) < (high.value, high.allowed)):
                    high = bound
            if "multipleOf" in schema:
                if schema["multipleOf"] != 1 or isinstance(schema["multipleOf"], bool):
                    raise SchemaError(f"#{place}", "multipleOf", "cannot be followed, other than 1")
                integers = True
            kind = schema.get("format")
            if isinstance(kind, str) and kind in INTEGERS:
                least, most = (Bound(exact(bound)) for bound in INTEGERS[kind])
                integers = True
                low = least if low is None or low.value < least.value else low
                high = most if high is None or high.value > most.value else high
            elif "format" in schema and kind not in ANY_NUMBER and "string" not in self._types(branch):
                raise SchemaError(f"#{place}", "format", f"there is no format {str(kind)[:80]!r} of numbers")
        largest = 10**28
        if low is not None and low.value < -largest:
            low = None
        if high is not None and high.value > largest:
            high = None
        for bound, keyword in ((low, "minimum"), (high, "maximum")):
            if bound is not None and abs(bound.value) > largest:
                raise SchemaError(f"#{self._sorted(branch)[0]}", keyword, "numbers have at most 28 digits here")
        return numbers(low, high, integers=integers)

    def _bound(self, place: str, schema: Mapping[str, Any], keyword: str, *, allowed: bool) -> Bound | None:
        if keyword not in schema:
            return None
        value = schema[keyword]
        if isinstance(value, bool) and keyword.startswith("exclusive"):
            raise SchemaError(f"#{place}", keyword, "has to be a number, as in drafts since 6")
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise SchemaError(f"#{place}", keyword, "has to be a number")
        return Bound(exact(value), allowed)

    def _string(self, branch: Branch) -> Expression:
        """Without quotes, as JSON writes it."""
        least, most = self._count(branch, "minLength", max) or 0, self._count(branch, "maxLength", min)
        found: dict[str, tuple[str, Expression | Pattern]] = {}
        for place, text in self._all(branch, "pattern"):
            if not isinstance(text, str):
                raise SchemaError(f"#{place}", "pattern", "has to be a text")
            try:
                found[text] = (place, Pattern.of(text))
            except PatternError as error:
                raise SchemaError(f"#{place}", "pattern", str(error)) from None
        for place, kind in self._all(branch, "format"):
            if kind in ANY_TEXT or ("number" in self._types(branch) and kind in (ANY_NUMBER | INTEGERS.keys())):
                continue
            if not isinstance(kind, str) or kind not in FORMATS:
                raise SchemaError(f"#{place}", "format", f"{str(kind)[:80]!r} cannot be followed")
            found[f"format {kind}"] = (place, Pattern.of(f"^(?:{FORMATS[kind]})$"))
        if not found:
            if not least and most is None:
                return _FREE
            return NOTHING if most is not None and most < least else repeat(_CHARACTER, least, most)
        if len(found) > 1:
            places = " and ".join(dict.fromkeys(f"#{place}" for place, _ in found.values()))
            keyword = "format" if any(text.startswith("format ") for text in found) else "pattern"
            raise SchemaError(places, keyword, "several patterns or formats for one text cannot be followed together")
        ((text, (place, pattern)),) = found.items()
        assert isinstance(pattern, Pattern)
        whole = pattern.whole if not least and most is None else pattern.of_length(least, most)
        if whole is None:
            keyword = "maxLength" if most is not None else "minLength"
            beside = "format" if text.startswith("format ") else "pattern"
            raise SchemaError(
                f"#{place}", keyword, f"cannot be followed beside this {beside}; write the length into a pattern"
            )
        return _as_json(whole)

    # Arrays -----------------------------------------------------------------------------------------------------------

    def _array(self, node: Node, branch: Branch) -> Expression:
        least, most = self._count(branch, "minItems", max) or 0, self._count(branch, "maxItems", min)
        first = 0
        for place in branch.places:
            first = max(first, len(self._prefix(place)))
        for place, unique in self._all(branch, "uniqueItems"):
            if unique is not False and (most is None or most > 1):
                raise SchemaError(f"#{place}", "uniqueItems", "cannot be followed")
        if first and least <= first and not self._further_items(branch):
            most = first if most is None else min(most, first)
        if most is not None and most < least:
            return NOTHING
        comma = seq(self._small(), Text(","), self._gap())
        tail: Expression = EMPTY
        if most is None or most > first:
            item = Rule(self._child(node, self._item_node(branch, first)))
            count = None if most is None else most - first
            if first:
                tail = repeat(seq(comma, item), max(0, least - first), count)
            else:
                rest = repeat(seq(comma, item), max(0, least - 1), None if count is None else count - 1)
                tail = seq(self._gap(), item, rest, self._gap())
                return seq(Text("["), tail if least else optional(tail), Text("]"))
        for at in reversed(range(first)):
            if most is not None and at >= most:
                continue
            item = Rule(self._child(node, self._item_node(branch, at)))
            after = seq(item, tail)
            tail = seq(comma, after) if at else seq(self._gap(), after, self._gap())
            tail = tail if at < least else optional(tail)
        return seq(Text("["), tail, Text("]"))

    def _prefix(self, place: str) -> list[Any]:
        """Schemas of the first items: prefixItems, or a list in items, as before 2020."""
        schema = self._at(place)
        for keyword in ("prefixItems", "items"):
            value = schema.get(keyword)
            if keyword == "prefixItems" and keyword in schema and not isinstance(value, list):
                raise SchemaError(f"#{place}", keyword, "has to be a list of schemas")
            if isinstance(value, list):
                return value
        return []

    def _further_items(self, branch: Branch) -> bool:
        """Whether a schema is given for items after the first ones."""
        kinds = ("items", "additionalItems")
        return any(isinstance(self._at(place).get(kind), dict | bool) for place in branch.places for kind in kinds)

    def _item_node(self, branch: Branch, at: int) -> Node:
        places = []
        for place in branch.places:
            schema, prefix = self._at(place), self._prefix(place)
            listed = "prefixItems" if isinstance(schema.get("prefixItems"), list) else "items"
            if at < len(prefix):
                places.append(f"{place}/{listed}/{at}")
            elif "items" in schema and not isinstance(schema["items"], list):
                places.append(f"{place}/items")
            elif listed == "items" and prefix and "additionalItems" in schema:
                places.append(f"{place}/additionalItems")
        return self._node(places)

    def _child(self, node: Node, child: Node) -> str:
        self._children[node].add(child)
        return self._name(child)

    # Objects ----------------------------------------------------------------------------------------------------------

    def _object_parts(self, branch: Branch) -> "_Object":
        return _Object(self, branch)

    def _object(self, node: Node, branch: Branch) -> Expression:
        parts = self._object_parts(branch)
        least, most = self._count(branch, "minProperties", max) or 0, self._count(branch, "maxProperties", min)
        names, needed = parts.names(), parts.required
        for at, (place, _) in enumerate(self._all(branch, "minProperties")):
            if at == 0 and least > len(names) + 1:
                raise SchemaError(f"#{place}", "minProperties", "cannot be followed for names that are not listed")
        free = parts.free(least)
        listed = [(name, name in needed, Rule(self._child(node, parts.node_of(name)))) for name in names]
        entry: Expression = NOTHING
        if free is not None:
            key, child = free
            entry = self._entry(self._shared(key), Rule(self._child(node, child)))
        counted = least > len(needed) or most is not None
        bound = len(names) + 1 if not counted else min(max(least, most or 0), len(names) + least + 1)
        if counted and len(names) * (bound + 1) > 5000:
            raise SchemaError(f"#{self._sorted(branch)[0]}", "minProperties", "too many properties to be counted")
        entries = _States(self, f"o{next(self._objects)}", listed, entry, least, most, counted)
        return seq(Text("{"), entries.at(0, False, 0), Text("}"))

    def _entry(self, key: Expression, value: Expression) -> Expression:
        blank = EMPTY if self._compact else optional(Text(" "))
        return seq(key, blank, Text(":"), blank, value)

    # Blanks -----------------------------------------------------------------------------------------------------------

    def _gap(self) -> Expression:
        return EMPTY if self._compact else Rule("gap")

    def _small(self) -> Expression:
        return EMPTY if self._compact else optional(Text(" "))

    def _common(self, root: Node) -> dict[str, Expression]:
        """Rules that all others refer to: blanks, and texts that no other rule describes."""
        indent = min(MOST_INDENT, INDENT * self._levels(root))
        line = seq(optional(Text("\r")), Text("\n"), repeat(each_of(" \t"), 0, indent))
        return {"gap": either(EMPTY, Text(" "), line), "text": repeat(_CHARACTER)}

    def _levels(self, root: Node) -> int:
        """How deep objects and arrays may be in each other, up to a bound that recursion reaches."""
        level, deep = {root}, 0
        while level and deep * INDENT < MOST_INDENT:
            level = set().union(*(self._children.get(node, set()) for node in level))
            deep += bool(level)
        return deep


class _Object:
    """What the schemas of a branch say of properties."""

    def __init__(self, writer: _Writer, branch: Branch) -> None:
        self._writer = writer
        self._branch = branch
        self.declared: list[str] = []
        self._patterns: dict[str, str] = {}
        required = set(branch.needs)
        for place in writer._sorted(branch):
            schema = writer._at(place)
            for keyword, kind in (("properties", dict), ("patternProperties", dict), ("required", list)):
                if keyword in schema and not isinstance(schema[keyword], kind):
                    raise SchemaError(f"#{place}", keyword, f"has to be {'an object' if kind is dict else 'a list'}")
            self.declared += [name for name in schema.get("properties", {}) if name not in self.declared]
            names = schema.get("required", [])
            if not all(isinstance(name, str) for name in names):
                raise SchemaError(f"#{place}", "required", "has to be a list of texts")
            required |= set(names)
            for text in schema.get("patternProperties", {}):
                self._patterns.setdefault(text, place)
        self.declared += sorted(required - set(self.declared))
        self.required = frozenset(required)
        for text, place in self._patterns.items():
            try:
                Pattern.of(text)
            except PatternError as error:
                raise SchemaError(f"#{place}", "patternProperties", str(error)) from None
        self._name_places = [
            f"{place}/propertyNames" for place in writer._sorted(branch) if "propertyNames" in writer._at(place)
        ]

    def names(self) -> list[str]:
        """Listed names that are allowed, in order, with those of a list in `propertyNames`."""
        node = self._writer._node(self._name_places)
        names = list(self.declared)
        finite = self._writer._finite_node(node) if node else None
        if finite is not None:
            names += [name for name in finite if isinstance(name, str) and name not in names]
            names = list(dict.fromkeys(names))
        if not node:
            return names
        allowed = [name for name in names if self._writer._valid(name, node)]
        for name in self.required:
            if name not in allowed:  # no object at all
                return [name]
        return allowed

    def node_of(self, name: str) -> Node:
        """The schemas of a property."""
        places = []
        for place in self._branch.places:
            schema = self._writer._at(place)
            found = [f"{place}/properties/{_pointer(name)}"] if name in schema.get("properties", {}) else []
            found += [
                f"{place}/patternProperties/{_pointer(text)}"
                for text in schema.get("patternProperties", {})
                if re.search(text, name)
            ]
            if not found and "additionalProperties" in schema:
                found = [f"{place}/additionalProperties"]
            places += found
        node = self._writer._node(self._name_places)
        if node and not self._writer._valid(name, node):
            return (_NOWHERE,)
        return self._writer._node(places)

    def free(self, least: int) -> tuple[Expression, Node] | None:
        """Further properties, if there have to be `least` in all: the key with its quotes, and the schemas of the
        value. None: there are none."""
        writer = self._writer
        names = writer._node(self._name_places)
        places = []
        for place in writer._sorted(self._branch):
            schema = writer._at(place)
            if self._patterns and schema.get("patternProperties"):
                places += [f"{place}/patternProperties/{_pointer(text)}" for text in schema["patternProperties"]]
            elif "additionalProperties" in schema:
                places.append(f"{place}/additionalProperties")
        node = writer._node(places)
        if not (places or names) and self.declared and least <= len(self.declared):
            return None  # as if additionalProperties were false, as OpenAI's strict schemas have it
        if any(writer._at(place) is False for place in node):
            return None
        if names and writer._finite_node(names) is not None:
            return None
        if not self._patterns and not names:
            return _quoted(_other_than(self.declared)), node
        if len(self._patterns) > 1 or (self._patterns and names):
            keyword = "patternProperties" if len(self._patterns) > 1 else "propertyNames"
            place = writer._sorted(self._branch)[0]
            raise SchemaError(f"#{place}", keyword, "cannot be followed beside another rule for names")
        if names:
            for branch in writer._branches(names):
                writer._check(branch, frozenset({"string"}))
            if self.declared:
                raise SchemaError(
                    f"#{self._name_places[0]}", "propertyNames", "cannot be followed beside listed properties"
                )
            keys = [writer._string(b) for b in writer._branches(names) if "string" in writer._types(b)
                    and writer._finite(b) is None]  # fmt: skip
            return _quoted(either(*keys)), node
        ((text, place),) = self._patterns.items()
        for name in self.declared:
            if re.search(text, name):
                raise SchemaError(f"#{place}", "patternProperties", f"cannot be followed: it matches {name[:80]!r} too")
        return _quoted(_as_json(Pattern.of(text).whole)), node


class _States:
    """The entries of an object after the first `at` listed ones, for whether one was written and how many."""

    def __init__(
        self,
        writer: _Writer,
        prefix: str,
        listed: Sequence[tuple[str, bool, Expression]],
        entry: Expression,
        least: int,
        most: int | None,
        counted: bool,
    ) -> None:
        self._writer = writer
        self._prefix = prefix
        self._listed = listed
        self._entry = entry
        self._least = least
        self._most = most
        self._counted = counted

    def at(self, at: int, begun: bool, count: int) -> Expression:
        """A rule for the entries from `at` on and the blanks before the end."""
        name = f"{self._prefix}p{at}{'b' if begun else 'a'}{count}"
        if name not in self._writer._rules:
            self._writer._rules[name] = NOTHING
            self._writer._rules[name] = self._write(at, begun, count)
        return Rule(name)

    def _write(self, at: int, begun: bool, count: int) -> Expression:
        writer = self._writer
        comma = seq(writer._small(), Text(","), writer._gap()) if begun else writer._gap()
        if at == len(self._listed):
            return self._end(comma, begun, count)
        fixed: list[Expression] = []
        while at < len(self._listed):  # those that are needed, one after the other
            name, needed, value = self._listed[at]
            if not needed:
                break
            if self._most is not None and count >= self._most:
                return NOTHING
            fixed += [comma, writer._entry(Text(_json(name)), value)]
            comma, begun, at = seq(writer._small(), Text(","), writer._gap()), True, at + 1
            count += self._counted
        if fixed:
            return seq(*fixed, self.at(at, begun, count))
        name, _, value = self._listed[at]
        without = self.at(at + 1, begun, count)
        if self._most is not None and count >= self._most:
            return without
        entry = writer._entry(Text(_json(name)), value)
        return either(seq(comma, entry, self.at(at + 1, True, count + self._counted)), without)

    def _end(self, comma: Expression, begun: bool, count: int) -> Expression:
        writer = self._writer
        missing = max(0, self._least - count) if self._counted else 0
        room = None if self._most is None else self._most - count
        if missing > 1 or (room is not None and room < missing):
            return NOTHING  # keys that are not listed may be the same one twice
        after = seq(writer._small(), Text(","), writer._gap())
        more = repeat(seq(after, self._entry), 0, None if room is None else max(0, room - 1))
        some = NOTHING if room == 0 else seq(comma, self._entry, more, writer._gap())
        end = writer._gap() if begun else EMPTY
        return some if missing else either(some, end)


# Texts as JSON writes them --------------------------------------------------------------------------------------------

_HEX = chars((48, 57), (65, 70), (97, 102))
_RAW = common(ANY, complement(((0, 31), (34, 34), (92, 92))))
_SHORT = {8: "b", 9: "t", 10: "n", 12: "f", 13: "r", 34: '"', 92: "\\"}
_BY_NUMBER = either(
    seq(chars((48, 57), (65, 67), (69, 70), (97, 99), (101, 102)), repeat(_HEX, 3, 3)),
    seq(each_of("dD"), chars((48, 55)), repeat(_HEX, 2, 2)),
    seq(each_of("dD"), each_of("89abAB"), repeat(_HEX, 2, 2), Text("\\u"), each_of("dD"), each_of("cdefCDEF"),
        repeat(_HEX, 2, 2)),
)  # fmt: skip
_CHARACTER = either(_RAW, seq(Text("\\"), either(each_of('"\\/bfnrt'), seq(Text("u"), _BY_NUMBER))))
"""One of a text: as it is, or escaped; never half of a surrogate pair."""


_FREE = Rule("text")
"""Any number of them."""


def _quoted(text: Expression) -> Expression:
    return seq(Text('"'), text, Text('"'))


def _as_json(expression: Expression) -> Expression:
    """The texts of `expression`, as JSON writes them within quotes: escaped where that is needed, and nowhere else."""
    match expression:
        case Text(text):
            return seq(*(_char_as_json(chars((ord(char), ord(char)))) for char in text))
        case OneOf():
            return _char_as_json(expression)
        case Concatenated(parts):
            return seq(*(_as_json(part) for part in parts))
        case Either(options):
            return either(*(_as_json(option) for option in options))
        case Repeat(part, least, most):
            return _FREE if part == ANY and (least, most) == (0, None) else repeat(_as_json(part), least, most)
    raise AssertionError("patterns have no rules")


def _char_as_json(one: OneOf) -> Expression:
    if one == ANY:
        return _CHARACTER
    options: list[Expression] = [common(one, _RAW)]
    options += [
        Text(f"\\{_SHORT[code]}" if code in _SHORT else f"\\u{code:04x}")
        for code in (*range(32), 34, 92)
        if any(low <= code <= high for low, high in one.ranges)
    ]
    return either(*options)


def _other_than(names: Sequence[str]) -> Expression:
    """Texts that are none of `names`. None of them is written with a character by its number up to where it differs."""
    rest = _FREE
    if not names:
        return rest

    def after(prefixes: Mapping[str, None], at: int) -> Expression:
        """What may follow the first `at` characters that `prefixes` share."""
        following: dict[str, dict[str, None]] = {}
        for name in prefixes:
            if len(name) > at:
                following.setdefault(name[at], {})[name] = None
        taken = chars(*((ord(char), ord(char)) for char in following))
        options: list[Expression] = [seq(_char_as_json(common(ANY, complement(taken.ranges))), rest)]
        options += [
            seq(_char_as_json(chars((ord(char), ord(char)))), after(within, at + 1))
            for char, within in following.items()
        ]
        return either(EMPTY if not any(len(name) == at for name in prefixes) else NOTHING, *options)

    return after(dict.fromkeys(names), 0)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _key(value: Any) -> str:
    """The same for equal values: 1 and 1.0 are, and true is not."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value, sort_keys=True)


def _pointer(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _places(value: Any, place: str = "") -> Iterator[str]:
    """Pointers to all objects and arrays and what they hold, in the order of the document."""
    yield place
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, part in parts:
        yield from _places(part, f"{place}/{_pointer(str(name))}")
