"""Writes the tables of docs/operations.md from the code: .venv/bin/python scripts/operations_tables.py"""

import ast
import inspect
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from tinker_local.backend import options
from tinker_local.backend.control import sessions, training_commands
from tinker_local.backend.http import bodies, connections, sampling_routes
from tinker_local.backend.http.metrics_routes import EXPORTED, OF_OWNERS, OWNER_LABELS
from tinker_local.backend.http.server_metrics import SERVER_METRICS
from tinker_local.backend.options import BackendOptions, CommandOption
from tinker_local.backend.rendering import decoding
from tinker_local.backend.sampling import sampler
from tinker_local.backend.scheduling import sample_turns
from tinker_local.types import codec, requests_and_results

PAGE = Path(__file__).parent.parent / "docs" / "operations.md"
END = "<!-- end -->\n"
KINDS = {CounterMetricFamily: "counter", GaugeMetricFamily: "gauge", HistogramMetricFamily: "histogram"}


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
    for one in SERVER_METRICS:
        kind = KINDS[one.family]
        name = f"{one.name}_total" if kind == "counter" else one.name
        lines.append(f"| `{name}` | {kind} | {', '.join(f'`{label}`' for label in one.labels)} | {one.help} |")
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


LIMITS: dict[str, tuple[float, ...]] = {
    "bytes of a request line with its headers": (connections.MAX_HEAD_BYTES,),
    "headers of a request": (connections.MAX_HEADERS,),
    "seconds in which a head must come": (connections.HEAD_SECONDS,),
    "seconds in which a body must come, with one more for each so many bytes": (
        connections.BODY_SECONDS,
        connections.BODY_BYTES_A_SECOND,
    ),
    "seconds for which an answer may wait for a client that does not read; so many bytes that are read give one back": (
        connections.READ_SECONDS,
        connections.READ_BYTES_A_SECOND,
    ),
    "connections; fewer if fewer files may be open": (connections.MAX_CONNECTIONS,),
    "requests of a connection that wait for the answer to an earlier one": (connections.MAX_PIPELINED,),
    "bytes of bodies that come or wait to be parsed; an owner may have as many as are left": (bodies.MAX_BODY_BYTES,),
    "bytes of a forward_backward, as sent and as unpacked": (bodies.MAX_GRADIENT_BYTES,),
    "datums of a forward_backward": (codec.MAX_DATUMS,),
    "chunks, tensors and spans of a forward_backward": (codec.MAX_PARTS,),
    "bytes of a forward_backward besides its data": (codec.MAX_OTHER_BYTES,),
    "cells of its tensors when dense": (training_commands.MAX_CELLS,),
    "seconds of a thread to prepare a forward_backward": (training_commands.MAX_PREPARATION_SECONDS,),
    "bytes of images in a request for samples, besides what the context length allows": (bodies.MAX_IMAGE_BYTES,),
    "JSON values in a request for samples, for each position of the context length, and besides": (
        sampling_routes.VALUES_PER_POSITION,
        bodies.MAX_JSON_VALUES,
    ),
    "bytes and values of any other JSON": (bodies.MAX_JSON_BYTES, bodies.MAX_JSON_VALUES),
    "characters of an id": (requests_and_results.LONGEST_ID,),
    "pixels of images in flight; a larger one goes alone": (decoding.MAX_PIXELS,),
    "scans of a JPEG": (decoding.MAX_SCANS,),
    "positions of prompts that a sampler (or each replica) has not read, when another session waits": (
        sample_turns.PROMPTS_AHEAD,
    ),
    "sequences beyond those that run at once, for sessions that have none": (sampler.RESERVED,),
    "silent sessions that end at one time": (sessions.MOST_ENDING,),
}
"""What is bounded without an option, and by how much."""


def limits() -> str:
    """One line for each of `LIMITS`."""
    lines = ["| at most | |", "| ---: | --- |"]
    lines += [f"| {', '.join(f'{most:,.12g}' for most in given)} | {what} |" for what, given in LIMITS.items()]
    return "\n".join(lines) + "\n"


def page(text: str) -> str:
    """`text` with the tables of now."""
    for name, table in (("options", settings), ("limits", limits), ("metrics", metrics)):
        begin = f"<!-- {name}: scripts/operations_tables.py -->\n"
        before, found, rest = text.partition(begin)
        _, end, after = rest.partition(END)
        if not (found and end):
            raise ValueError(f"{PAGE}: no place for the table of {name}")
        text = f"{before}{begin}{table()}{END}{after}"
    return text


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
