"""Structural tags of xgrammar, with grammars of ours for the JSON schemas in them."""

from collections.abc import Mapping
from typing import Any

from tinker_local.backend.rendering.structured.json_schema import NOTES, SchemaError, grammar_of

MOST_BLANKS = 65
"""In a row, between the parts of a tag that is not JSON on its outside."""

IF_POSSIBLE = "x-tinker-local-if-possible"
"""A keyword of ours: the schema is followed if it can be, and otherwise the text is any object."""

_PLAIN = frozenset({"type", "properties", "required", "items", "enum", "const", "additionalProperties", "anyOf"})
"""Keywords that xgrammar's own converter is trusted with, in parameters of calls that are written in XML."""

_KINDS: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "null": (type(None),),
    "array": (list,),
    "object": (dict,),
}


def tag_of(value: Any) -> Any:
    """A structural tag that says the same with grammars; SchemaError for a schema that cannot be followed."""
    if isinstance(value, dict) and "structures" in value:  # the older form
        if not isinstance(value["structures"], list) or not all(isinstance(one, dict) for one in value["structures"]):
            raise SchemaError("", "structures", "has to be a list of objects")
        tags = [
            {"type": "tag", "begin": one.get("begin"), "end": one.get("end"),
             "content": {"type": "json_schema", "json_schema": one.get("schema")}}
            for one in value["structures"]
        ]  # fmt: skip
        value = {
            "type": "structural_tag",
            "format": {"type": "triggered_tags", "triggers": value.get("triggers"), "tags": tags},
        }
    return _replaced(value, "")


def _replaced(value: Any, place: str) -> Any:
    if isinstance(value, list):
        return [_replaced(part, f"{place}/{at}") for at, part in enumerate(value)]
    if not isinstance(value, dict):
        return value
    if value.get("type") == "json_schema" and "json_schema" in value:
        return _content(value, f"{place}/json_schema")
    return {name: _replaced(part, f"{place}/{name}") for name, part in value.items()}


def _content(value: Mapping[str, Any], place: str) -> dict[str, Any]:
    for keyword in ("any_order", "excludes"):
        if value.get(keyword):
            raise SchemaError(f"#{place}", keyword, "cannot be followed")
    schema = value["json_schema"]
    if isinstance(schema, dict) and IF_POSSIBLE in schema:
        followed = {name: part for name, part in schema.items() if name != IF_POSSIBLE}
        try:
            return _content({**value, "json_schema": followed}, place)
        except SchemaError:
            return _content({**value, "json_schema": {"type": "object"}}, place)
    if value.get("style", "json") == "json":
        try:
            return {"type": "grammar", "grammar": grammar_of(schema)}
        except SchemaError as error:
            raise SchemaError(
                f"#{place}", error.keyword, f"{error.reason} ({error.place or '#'} of the schema)"
            ) from None
    _check_plain(schema, place)
    return {**value, "max_whitespace_cnt": MOST_BLANKS}


def _check_plain(schema: Any, place: str) -> None:
    """SchemaError for what calls in XML do not follow."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise SchemaError(f"#{place}", "schema", "has to be an object, true or false")
    for keyword in schema:
        if keyword not in _PLAIN and keyword not in NOTES and not keyword.startswith("x-"):
            raise SchemaError(f"#{place}", keyword, "cannot be followed in calls that are written in XML")
    asserting = schema.keys() - NOTES
    for one, others in (("enum", asserting - {"enum", "type"}), ("const", asserting - {"const", "type"}),
                        ("anyOf", asserting - {"anyOf"})):  # fmt: skip
        if one in schema and others:
            raise SchemaError(f"#{place}", one, f"cannot be followed beside {', '.join(sorted(others))} in XML")
    for option in [*schema.get("enum", ()), *([schema["const"]] if "const" in schema else [])]:
        kind = schema.get("type", "string")
        kinds = _KINDS.get(kind, ()) if isinstance(kind, str) else ()
        if not isinstance(option, kinds) or isinstance(option, bool) != (kind == "boolean"):
            raise SchemaError(f"#{place}", "type", "cannot be followed beside this enum or const in XML")
    missing = set(schema.get("required", ())) - set(schema.get("properties", {}))
    if missing:
        raise SchemaError(f"#{place}", "required", f"names {sorted(missing)[0][:80]!r}, which properties lacks")
    further = schema.get("additionalProperties", False)
    if further is not False and schema.get("properties"):
        raise SchemaError(f"#{place}", "additionalProperties", "cannot be followed beside properties in XML")
    parts = [(name, schema["properties"][name], "properties") for name in schema.get("properties", {})]
    parts += [(str(at), one, "anyOf") for at, one in enumerate(schema.get("anyOf", ()))]
    for name, part, keyword in parts:
        _check_plain(part, f"{place}/{keyword}/{name}")
    for keyword in ("items", "additionalProperties"):
        if keyword in schema:
            _check_plain(schema[keyword], f"{place}/{keyword}")
