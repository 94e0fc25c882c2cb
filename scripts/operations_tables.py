"""Writes the tables of docs/operations.md from the code: .venv/bin/python scripts/operations_tables.py"""

import ast
import inspect
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from prometheus_client.core import CounterMetricFamily
from tinker_local.backend import options
from tinker_local.backend.http.metrics_routes import EXPORTED, OF_OWNERS, OWNER_LABELS
from tinker_local.backend.options import BackendOptions, CommandOption

PAGE = Path(__file__).parent.parent / "docs" / "operations.md"
END = "<!-- end -->\n"


def metrics() -> str:
    """One line for each metric of `/metrics`."""
    lines = ["| metric | kind | labels | |", "| --- | --- | --- | --- |"]
    for each in EXPORTED:
        kind = "counter" if each.family is CounterMetricFamily else "gauge"
        name = f"{each.name}_total" if kind == "counter" else each.name
        labels = ", ".join(f"`{label}`" for label in ("model", each.label) if label)
        lines.append(f"| `{name}` | {kind} | {labels} | {each.help} |")
    labels = ", ".join(f"`{label}`" for label in OWNER_LABELS)
    lines += [f"| `{gauge.name}` | gauge | {labels} | {gauge.help} |" for gauge in OF_OWNERS]
    return "\n".join(lines) + "\n"


def settings() -> str:
    """One line for each field: its option of `tinker-local serve`, or its name in `BackendOptions`."""
    hints, notes = get_type_hints(BackendOptions, include_extras=True), dict(_notes())
    lines = ["| option | default | |", "| --- | --- | --- |"]
    inside = ["", "In `BackendOptions`, not on the command line:", "", "| field | default | |", "| --- | --- | --- |"]
    for each in fields(BackendOptions):
        if get_origin(hint := hints[each.name]) is Annotated:
            option: CommandOption = get_args(hint)[1]
            flag = option.flag or f"--{each.name.replace('_', '-')}"
            lines.append(f"| `{flag}` | {_default(each, option)} | {option.help} |")
        else:
            inside.append(f"| `{each.name}` | {_default(each, CommandOption(''))} | {notes.get(each.name, '')} |")
    return "\n".join([*lines, *inside]) + "\n"


def _default(each: "Field[Any]", option: CommandOption) -> str:
    if option.shown_default:
        return f"`{option.shown_default}`"
    value = each.default if each.default is not MISSING else None
    if value is None or value == ():
        return ""
    if value is False or value is True:
        return "off" if value is False else "on"
    if option.gib or (isinstance(value, int) and "bytes" in each.name):
        return f"{value / 2**30:g} GiB"
    return f"{value:,}" if isinstance(value, int) else f"{value:g}" if isinstance(value, float) else str(value)


def _notes() -> Iterator[tuple[str, str]]:
    """The docstrings of fields, on one line."""
    (tree,) = ast.parse(inspect.getsource(options.BackendOptions)).body
    assert isinstance(tree, ast.ClassDef)
    for field, note in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(note, ast.Expr) and isinstance(note.value, ast.Constant):
            assert isinstance(field.target, ast.Name)
            yield field.target.id, " ".join(str(note.value.value).split())


def page(text: str) -> str:
    """`text` with the tables of now."""
    for name, table in (("options", settings), ("metrics", metrics)):
        begin = f"<!-- {name}: scripts/operations_tables.py -->\n"
        before, found, rest = text.partition(begin)
        _, end, after = rest.partition(END)
        if not (found and end):
            raise ValueError(f"{PAGE}: no place for the table of {name}")
        text = f"{before}{begin}{table()}{END}{after}"
    return text


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
