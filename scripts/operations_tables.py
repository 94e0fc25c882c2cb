"""Writes the tables of docs/operations.md from the code: .venv/bin/python scripts/operations_tables.py"""

import ast
import importlib
import inspect
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from tinker_local.backend import options
from tinker_local.backend.hosting.server_metrics import METRICS
from tinker_local.backend.options import BackendOptions, CommandOption

PAGE = Path(__file__).parent.parent / "docs" / "operations.md"
END = "<!-- end -->\n"
KINDS = {CounterMetricFamily: "counter", GaugeMetricFamily: "gauge", HistogramMetricFamily: "histogram"}


def metrics() -> str:
    """One line for each metric of `/metrics`."""
    lines = ["| metric | kind | labels | |", "| --- | --- | --- | --- |"]
    for one in METRICS:
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


LIMITS: dict[str, dict[str, str]] = {
    "connections and bodies": {
        "bytes of a request line with its headers": "http.connections.MAX_HEAD_BYTES",
        "headers of a request": "http.connections.MAX_HEADERS",
        "seconds in which a head must come": "http.connections.HEAD_SECONDS",
        "seconds in which a body must come, with one more for each so many bytes": (
            "http.connections.BODY_SECONDS http.connections.BODY_BYTES_A_SECOND"
        ),
        "seconds for which an answer may wait for a client that does not read; so many bytes that are read give one "
        "back": "http.connections.READ_SECONDS http.connections.READ_BYTES_A_SECOND",
        "bytes of answers that clients have not read, beyond 262,144 of each; an owner may have as many as are left": (
            "http.delivery.MAX_ANSWER_BYTES"
        ),
        "connections; fewer if fewer files may be open": "http.connections.MAX_CONNECTIONS",
        "requests of a connection that wait for the answer to an earlier one": "http.connections.MAX_PIPELINED",
        "bytes of bodies that come or wait to be parsed; an owner may have as many as are left": (
            "http.bodies.MAX_BODY_BYTES"
        ),
        "bytes and values of JSON that has no other limit": "http.bodies.MAX_JSON_BYTES http.bodies.MAX_JSON_VALUES",
        "bytes and values of a call that reports which results were read": (
            "http.future_routes.MAX_RETRIEVED_BYTES http.future_routes.MAX_RETRIEVED_VALUES"
        ),
        "wrong keys of an address that are answered at once; further ones wait": "hosting.keys.FREE_WRONG_KEYS",
        "answers to wrong keys that wait": "hosting.keys.MOST_DELAYED",
    },
    "recorded sessions": {
        "sessions of an owner": "control.recorded_sessions.MOST_SESSIONS",
        "bytes of a session whose owner asks for it, and of another": (
            "control.recorded_sessions.MAX_SESSION_BYTES control.recorded_sessions.SESSION_BYTES"
        ),
        "hours that a session lives if its owner asks for it, and another": (
            "control.recorded_sessions.LONGEST_LIFETIME_HOURS control.recorded_sessions.LIFETIME_HOURS"
        ),
    },
    "training": {
        "bytes of a forward_backward, as sent and as unpacked": "http.bodies.MAX_GRADIENT_BYTES",
        "times its size, or bytes whatever its size, that a zstd body may unpack to": (
            "http.bodies.MAX_RATIO http.bodies.ANY_RATIO_BYTES"
        ),
        "datums of a forward_backward": "types.codec.MAX_DATUMS",
        "chunks, tensors and spans of a forward_backward": "types.codec.MAX_PARTS",
        "fields and bytes of a forward_backward besides its data": (
            "types.codec.MAX_OTHER_FIELDS types.codec.MAX_OTHER_BYTES"
        ),
        "cells of its tensors when dense": "control.training_commands.MAX_CELLS",
        "such cells whatever was sent, and for each value that was": (
            "control.training_commands.FREE_CELLS control.training_commands.CELLS_PER_VALUE"
        ),
        "cells of one sparse tensor when dense": "types.datum.MAX_SPARSE_CELLS",
        "dimensions of a tensor": "types.wire_tensors.MAX_DIMENSIONS",
        "characters of a sequence's id in provenance": "types.datum.LONGEST_SEQUENCE_ID",
        "seconds of a thread to prepare a forward_backward": "control.training_commands.MAX_PREPARATION_SECONDS",
        "summed rank of the adapters of a micro-batch; further ones take the next": "training.run.packing.MAX_COLUMNS",
    },
    "sampling": {
        "bytes of images in a request for samples, besides what the context length allows": (
            "http.bodies.MAX_IMAGE_BYTES"
        ),
        "JSON values in a request for samples, for each position of the context length, and besides": (
            "http.sampling_routes.VALUES_PER_POSITION http.bodies.MAX_JSON_VALUES"
        ),
        "texts in `stop`, characters of all texts, or token ids": (
            "types.requests_and_results.MAX_STOPS types.requests_and_results.MAX_STOP_CHARACTERS "
            "types.requests_and_results.MAX_STOP_TOKENS"
        ),
        "cells of an answer: `len(prompt)` times k, target ids, or samples times tokens times k": (
            "sampling.prompt_scores.MAX_CELLS"
        ),
        "positions of prompts that a sampler (or each replica) has not read, when another session waits": (
            "scheduling.sample_turns.PROMPTS_AHEAD"
        ),
        "samples that have ended and that a client has not asked for, and clients of a sampling session that can ask": (
            "control.sampling_clients.MOST_UNSEEN control.sampling_clients.MOST_LOGS"
        ),
        "sequences beyond those that run at once, for sessions that have none": "sampling.sampler.RESERVED",
        "sequences of in-flight clients of a session whose weights are known": "control.token_weights.MOST_TOLD",
    },
    "images": {
        "pixels of images in flight; a larger one goes alone": "types.pictures.MAX_PIXELS",
        "scans of a JPEG": "types.pictures.MAX_SCANS",
        "bytes of an image that a prompt names, and of all of one prompt": (
            "rendering.image_assets.MAX_BYTES rendering.image_assets.MAX_PROMPT_BYTES"
        ),
        "seconds to fetch the images of a prompt": "rendering.image_assets.SECONDS",
        "redirects of an image": "rendering.image_assets.MAX_REDIRECTS",
        "prompts that read from one host, or from the folder, at once": "rendering.image_assets.MAX_PROMPTS",
        "look-ups of a host's name at once": "rendering.image_assets.MAX_LOOK_UPS",
        "prompts of an owner that name images, which are being fetched or wait to be rendered": (
            "control.sample_prompts.MAX_FETCHED"
        ),
    },
    "OpenAI's and Anthropic's APIs": {
        "characters of a model's name": "hosting.endpoint_fields.LONGEST_MODEL",
        "`logprobs` and `top_logprobs`": "hosting.openai_bodies.MAX_LIKELIEST",
        "logprobs in an answer that is not streamed": "hosting.openai_answers.MAX_CELLS",
        "tokens of prompts in an answer": "hosting.openai_answers.MAX_ECHOED",
        "bytes of tokens and logprobs that wait for the client of a stream, and for those of all; an owner may have as "
        "many as are left": "hosting.completions.MOST_WAITING hosting.completions.MOST_UNREAD",
        "JSON values of a conversation outside of its texts, and more for each position of the context": (
            "http.weighing.FREE_VALUES http.weighing.VALUES_PER_POSITION"
        ),
        "messages of a conversation with their parts and calls, and positions of the context for one more": (
            "http.weighing.FREE_PARTS http.weighing.POSITIONS_PER_PART"
        ),
        "tools of a request, and characters of the parameters of one": (
            "hosting.tool_fields.MOST_TOOLS hosting.tool_fields.MOST_SCHEMA"
        ),
        "characters of a grammar that is given as JSON text": "rendering.grammar.MAX_WRITTEN",
        "characters of a grammar, and objects within each other in a JSON schema": (
            "rendering.grammar.MAX_CHARACTERS rendering.grammar.MAX_NESTING"
        ),
        "combinations of `anyOf` and `oneOf` at one place of a JSON schema, and rules of its grammar": (
            "rendering.structured.json_schema.MOST_BRANCHES rendering.structured.json_schema.MOST_RULES"
        ),
        "repetitions that a pattern names": "rendering.structured.patterns.MOST_REPEATS",
        "blanks that begin a line of JSON, and blanks in a row where a structural tag is not JSON": (
            "rendering.structured.json_schema.MOST_INDENT rendering.structured.structural_tags.MOST_BLANKS"
        ),
        "control tokens that a request lets its texts have": "hosting.endpoint_fields.MOST_CONTROL_TOKENS",
        "newest checkpoints among which `GET models` looks for those of a sampler": "hosting.openai_routes.MOST_LISTED",
    },
    "names, sessions and checkpoints": {
        "characters of an id": "types.requests_and_results.LONGEST_ID",
        "characters of a checkpoint's name, and of a path": (
            "storage.names.MAX_NAME_LENGTH storage.names.MAX_PATH_LENGTH"
        ),
        "characters of a display name, a project, a tag and a key of metadata": "control.sessions.LONGEST_NAME",
        "characters of a value of metadata": "control.sessions.LONGEST_VALUE",
        "characters of all metadata of a session, run or checkpoint": "control.sessions.LONGEST_METADATA",
        "tags of a session, and entries of metadata": "control.sessions.MOST_ENTRIES",
        "bytes of records of sessions, metadata and curves of an owner that do not count as its storage": (
            "storage.storage_quota.FREE_BYTES"
        ),
        "characters that are kept of the detail of a `finish`": "control.sessions.LONGEST_DETAIL",
        "characters of an idempotency key": "control.checkpoints.LONGEST_KEY",
        "seconds of a TTL": "control.checkpoint_lifetime.MAX_TTL",
        "recipients of an encrypted export": "control.age_encryption.MOST_RECIPIENTS",
        "bytes of the configuration of an imported adapter": "adapters.peft_config.MAX_CONFIG_BYTES",
        "bytes of the header of an imported adapter's weights": "adapters.peft_adapters.MAX_HEADER_BYTES",
        "characters of the name of a tensor in it": "adapters.peft_adapters.LONGEST_NAME",
        "`lora_alpha` and `r` of an imported adapter, which must be less": "adapters.peft_config.MAX_ALPHA",
        "items of a page of a listing": "http.access.MOST_LISTED",
        "sessions of a page of a search": "types.session_search.MOST_FOUND",
        "silent sessions that end at one time": "control.sessions.MOST_ENDING",
        "requests of all sessions, and of one, that traces remember": (
            "scheduling.operations.MOST_TIMELINES scheduling.operations.MOST_OF_A_SESSION"
        ),
    },
    "curves and logs": {
        "numbers in a call that adds to a run's curve, and characters of each name": (
            "http.progress_routes.MOST_METRICS http.progress_routes.LONGEST_METRIC"
        ),
        "bytes of a run's curve": "storage.curves.MOST_BYTES",
        "logs that `--watch-logs` shows, and folders that it looks at": (
            "storage.watched_logs.MOST_LOGS storage.watched_logs.MOST_FOLDERS"
        ),
        "bytes of a watched log, numbers of a line, and characters of each name": (
            "storage.watched_logs.MOST_BYTES storage.watched_logs.MOST_METRICS storage.watched_logs.LONGEST_METRIC"
        ),
        "ephemeral sampler versions that are listed of a run": "http.progress_routes.MOST_EPHEMERAL",
        "lines of a log that wait for the disk": "hosting.log_files.MOST_WAITING",
        "characters of an error that is answered": "http.error_responses.LONGEST_MESSAGE",
    },
}
"""What is bounded without an option, and by how much: constants by their names below `tinker_local.backend`, or with
`types.` below `tinker_local.types`. The tests find constants that are bounds by their names and compare."""


def value_of(name: str) -> float:
    """The constant `name` of `LIMITS`."""
    module, _, constant = name.rpartition(".")
    package = "tinker_local" if module.startswith("types.") else "tinker_local.backend"
    found: float = getattr(importlib.import_module(f"{package}.{module}"), constant)
    return found


def limits() -> str:
    """One line for each of `LIMITS`, and before them for each option that is a limit."""
    lines = ["| at most | with an option or a field of `BackendOptions` |", "| ---: | --- |"]
    hints, notes = get_type_hints(BackendOptions, include_extras=True), dict(_notes())
    for each in fields(BackendOptions):
        if each.name.startswith("max_"):
            hint = hints[each.name]
            option: CommandOption = get_args(hint)[1] if get_origin(hint) is Annotated else CommandOption("")
            flag = option.flag or f"--{each.name.replace('_', '-')}" if option.help else each.name
            words = (option.help or notes[each.name]).partition(". ")[0].rstrip(".")
            lines.append(f"| {_default(each, option) or 'no limit'} | `{flag}`: {words} |")
    for section, given in LIMITS.items():
        lines += ["", f"| at most | {section} |", "| ---: | --- |"]
        for words, names in given.items():
            lines.append(f"| {', '.join(f'{value_of(name):,.12g}' for name in names.split())} | {words} |")
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
