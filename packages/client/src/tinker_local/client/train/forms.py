"""The forms of rows: OpenAI's conversations, prompts with completions, and pairs of a chosen and a rejected answer.

A row is read strictly. A field that is not known, a picture without a place or a call that is not JSON is a problem,
and all problems of a row are found, not the first alone. Nothing is rendered here.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from tinker_local.client.train.examples import Kind, Problem
from tinker_local.client.train.foreign_rows import Unclear, messages_of, spoken_turns
from tinker_local.client.train.sources import RowError, unique_object
from tinker_local.types.errors import brief

Role: TypeAlias = Literal["system", "user", "assistant", "tool"]

_ROLES: Mapping[str, Role] = {
    **{"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
}
_MESSAGE = ("role", "content", "name", "tool_calls", "tool_call_id", "weight")
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
_TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_DEEPEST = 64
"""Levels of the arguments of a call, and of the schema of a tool."""

_MISSING: Any = object()


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture of a row: a path, a URL or the bytes of a file, and the field that has it."""

    value: str | bytes
    field: str


@dataclass(frozen=True, slots=True)
class RowMessage:
    """A message. `parts`: neighbouring texts are one. `calls`: in OpenAI's form, with arguments as an object.
    `thoughts`: what the model thought before it answered. `weight`: 0 if an answer is not trained. `field`: of the
    row."""

    role: Role
    parts: tuple[str | Picture, ...]
    field: str
    calls: tuple[dict[str, Any], ...] = ()
    answers: tuple[str | None, str | None] | None = None
    """Of a tool's message: the id of the call, and the name of the tool, where the row has them."""
    thoughts: str | None = None
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Dialogue:
    """A conversation whose last message is the assistant's. `tools`: in OpenAI's form. `variables`: of the chat
    template. `given`: how many messages are the prompt, of which no answer is trained."""

    messages: tuple[RowMessage, ...]
    tools: tuple[dict[str, Any], ...] = ()
    variables: Mapping[str, Any] | None = None
    given: int = 0


@dataclass(frozen=True, slots=True)
class Written:
    """A text and how it continues, without a chat template. `fields`: what the row calls them."""

    prompt: str
    completion: str
    fields: tuple[str, str] = ("prompt", "completion")


Answered: TypeAlias = Dialogue | Written


@dataclass(frozen=True, slots=True)
class Pair:
    """Two answers to the same prompt."""

    chosen: Answered
    rejected: Answered


def kind_of(form: Answered | Pair) -> Kind:
    """What the loop makes of it."""
    return "preference" if isinstance(form, Pair) else "sft"


def parse_row(row: Mapping[str, Any], place: str) -> Answered | Pair:
    """A row in one of the forms. Raises RowError with all its problems."""
    reader = _Reader(place)
    given = {name: value for name, value in row.items() if value is not None}
    form = _form(reader, given)
    if reader.problems or form is None:
        raise RowError(*reader.problems)
    return form


class _Reader:
    """Collects the problems of one row."""

    def __init__(self, place: str) -> None:
        self._place = place
        self.problems: list[Problem] = []

    def refuse(self, field: str, reason: str) -> None:
        self.problems.append(Problem(self._place, field, reason))

    def text(self, value: Any, field: str) -> str:
        """`value` if it is a text that can be encoded, else "" and a problem."""
        if not isinstance(value, str):
            self.refuse(field, f"must be a text, not {_kind(value)}")
            return ""
        if (lone := _LONE_SURROGATE.search(value)) is not None:
            at = lone.start()
            self.refuse(field, f"character {at} is U+{ord(lone[0]):04X}, half of a surrogate pair, not text")
            return ""
        return value


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", int: "a number"}
    return names.get(type(value), "null" if value is None else type(value).__name__)


# The three forms -----------------------------------------------------------------------------------------------------

_HINTS = {
    "instruction": "output, which goes with it, is missing",
    "question": "write prompt and completion, or messages",
    "text": "write prompt and completion: a text alone does not say what to train",
}


def _form(reader: _Reader, row: Mapping[str, Any]) -> Answered | Pair | None:
    pair, completed = [name for name in ("chosen", "rejected") if name in row], "completion" in row
    if "messages" in row and len(pair) == 2 and _same(row["messages"], row["chosen"]):
        row = {name: value for name, value in row.items() if name != "messages"}  # UltraFeedback has it twice
    if "messages" in row and (pair or completed):
        other = " and ".join(pair or ["completion"])
        also = "" if pair else " (with prompt)"
        reader.refuse(
            "messages",
            f"beside {other}: it is not clear which of them to train; leave out the column messages, or {other}{also}",
        )
        return None
    if pair:
        return _pair(reader, row, pair)
    if completed or ("prompt" in row and "messages" not in row):
        return _completed(reader, row)
    if "messages" not in row:
        try:
            found = messages_of(row)
        except Unclear as error:
            reader.refuse(error.field, error.reason)
            return None
        if found is not None:
            return _conversation(reader, row, *found)
        hint = next((f"; {name}: {hint}" for name, hint in _HINTS.items() if name in row), "")
        columns = brief(", ".join(map(str, row)))
        reader.refuse("", f"has neither messages, nor prompt and completion, nor chosen and rejected ({columns}){hint}")
        return None
    if "prompt" in row and not _is_asked(row["messages"], row["prompt"]):
        reader.refuse(
            "prompt", "beside messages, and not the text of one that is the user's; leave out the column prompt"
        )
        return None
    return _conversation(reader, row, row["messages"], "messages")


def _conversation(reader: _Reader, row: Mapping[str, Any], value: Any, field: str) -> Dialogue | None:
    pictures = _Pictures(reader, row)
    messages = _messages(reader, value, field, pictures)
    pictures.check_all_used()
    return _dialogue(reader, row, messages, given=0)


def _same(one: Any, other: Any) -> bool:
    """Whether two lists of messages are equal, but for nulls."""
    if not (isinstance(one, list) and isinstance(other, list)):
        return False
    return [*map(_without_nulls, one)] == [*map(_without_nulls, other)]


def _without_nulls(message: Any) -> Any:
    if not isinstance(message, Mapping):
        return message
    return {name: value for name, value in message.items() if value is not None}


def _is_asked(messages: Any, text: Any) -> bool:
    """Whether `text` is what a user's message has, as in UltraChat's column `prompt`."""
    asked = [each for each in messages if isinstance(each, Mapping)] if isinstance(messages, list) else []
    asked = [each for each in asked if each.get("role") == "user" and isinstance(each.get("content"), str)]
    return isinstance(text, str) and text.strip() in [each["content"].strip() for each in asked]


def _completed(reader: _Reader, row: Mapping[str, Any]) -> Answered | None:
    for name in ("prompt", "completion"):
        if name not in row:
            other = "completion" if name == "prompt" else "prompt"
            reader.refuse(name, f"missing, and {other} is there; they go together")
            return None
    if isinstance(row.get("label"), bool):
        reader.refuse("label", "answers judged true or false (KTO) are not trained; keep the true ones, without label")
        return None
    if isinstance(row["prompt"], str) and isinstance(row["completion"], str):
        return _written(reader, row, row["prompt"], "completion")
    return _answered(reader, row, row["prompt"], "completion")


def _answered(reader: _Reader, row: Mapping[str, Any], prompt: Any, name: str) -> Dialogue | None:
    """`prompt` and the column `name`, at least one of which is a list of messages."""
    answer = row[name]
    if isinstance(answer, str):
        answer = [{"role": "assistant", "content": answer}]
    if isinstance(prompt, str):
        if not (isinstance(answer, list) and answer and _role(answer[0]) == "assistant"):
            reader.refuse(
                "prompt", f"is a text, so {name} must be a text, too, or a list of messages that begins with an answer"
            )
            return None
        prompt = [{"role": "user", "content": prompt}]
    if isinstance(prompt, list) and isinstance(answer, list) and _same(prompt, answer[: len(prompt)]):
        answer = answer[len(prompt) :] or answer  # a whole conversation, with the prompt once more
    pictures = _Pictures(reader, row)
    before = _messages(reader, prompt, "prompt", pictures)
    after = _messages(reader, answer, name, pictures)
    pictures.check_all_used()
    return _dialogue(reader, row, [*before, *after], given=len(before))


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, Mapping) else None


def _written(reader: _Reader, row: Mapping[str, Any], prompt: str, name: str) -> Written | None:
    for field in ("images", "image", "tools"):
        if row.get(field):
            reader.refuse(field, f"prompt and {name} are texts, which have none; write lists of messages")
    before, after = reader.text(prompt, "prompt"), reader.text(row[name], name)
    if not before:
        reader.refuse("prompt", "is empty: there is nothing to answer")
    if not after.strip():
        reader.refuse(name, "the answer is empty: nothing would be trained")
    return Written(before, after, ("prompt", name))


def _pair(reader: _Reader, row: Mapping[str, Any], found: Sequence[str]) -> Pair | None:
    if len(found) < 2:
        reader.refuse("rejected" if found == ["chosen"] else "chosen", f"missing, and {found[0]} is there")
        return None
    if row["chosen"] == row["rejected"]:
        reader.refuse("rejected", "is equal to chosen: there is nothing to prefer")
        return None
    texts = [isinstance(row[name], str) for name in ("chosen", "rejected")]
    prompt = row.get("prompt")
    if any(texts) and not all(texts):
        reader.refuse("rejected", "chosen and rejected must both be texts, or both be lists of messages")
        return None
    if all(texts) and isinstance(prompt, str):
        chosen, rejected = (_written(reader, row, prompt, name) for name in ("chosen", "rejected"))
        return Pair(chosen, rejected) if chosen and rejected else None
    if all(texts) and prompt is None:
        spoken = [spoken_turns(row[name]) for name in ("chosen", "rejected")]
        if not all(spoken):
            reader.refuse("prompt", _no_prompt(row["chosen"], row["rejected"]))
            return None
        row = {**row, **dict(zip(("chosen", "rejected"), spoken, strict=True))}
    return _pair_of_messages(reader, row, prompt)


def _no_prompt(chosen: str, rejected: str) -> str:
    same = next((at for at, (one, other) in enumerate(zip(chosen, rejected, strict=False)) if one != other), 0)
    begin = f"; both begin with the same {same} characters: move what is the prompt of them there" if same else ""
    return f"missing: write the text that chosen and rejected answer{begin}"


def _pair_of_messages(reader: _Reader, row: Mapping[str, Any], prompt: Any) -> Pair | None:
    answers = [row[name] for name in ("chosen", "rejected")]
    alone = all(isinstance(each, list) and each and _role(each[0]) == "assistant" for each in answers)
    apart = isinstance(prompt, list) or (isinstance(prompt, str) and alone)
    shared = 0 if apart else _shared(reader, row, prompt)
    sides: list[Dialogue | None] = []
    for name in ("chosen", "rejected"):
        if reader.problems:
            return None
        if apart:
            sides.append(_answered(reader, row, prompt, name))
            continue
        pictures = _Pictures(reader, row)
        messages = _messages(reader, row[name], name, pictures)
        pictures.check_all_used()
        sides.append(_dialogue(reader, row, messages, given=shared))
    if reader.problems:
        return None
    chosen, rejected = sides
    return Pair(chosen, rejected) if chosen and rejected else None


def _shared(reader: _Reader, row: Mapping[str, Any], prompt: Any) -> int:
    """How many messages `chosen` and `rejected` begin with together; they must have the prompt if it is a text."""
    lists = [row[name] if isinstance(row[name], list) else [] for name in ("chosen", "rejected")]
    same = 0
    for one, other in zip(*lists, strict=False):
        if _without_nulls(one) != _without_nulls(other):
            break
        same += 1
    users = [message.get("content") for message in lists[0][:same] if isinstance(message, Mapping)]
    if not same:
        missing = "missing, and" if prompt is None else "is a text, and"
        reader.refuse("prompt", f"{missing} chosen and rejected do not begin with the same messages")
    elif prompt is not None and prompt not in users:
        reader.refuse("prompt", "is a text that no message has with which both chosen and rejected begin")
    return same


# Messages ------------------------------------------------------------------------------------------------------------


class _Pictures:
    """The pictures of the column `images` (or `image`), for the parts {"type": "image"} of the messages in order."""

    def __init__(self, reader: _Reader, row: Mapping[str, Any]) -> None:
        self._reader = reader
        self._name = "images" if "images" in row else "image"
        value = row.get(self._name, [])
        self._all = value if isinstance(value, list) else [value]
        self._used = 0

    def next(self, field: str) -> Picture | None:
        at, self._used = self._used, self._used + 1
        if at >= len(self._all):
            reason = f"is picture number {at + 1} without a path, URL or bytes, and images has {len(self._all)}"
            self._reader.refuse(field, reason)
            return None
        where = f"{self._name}[{at}]" if self._name == "images" else "image"
        return _picture(self._reader, self._all[at], where)

    def check_all_used(self) -> None:
        if self._used < len(self._all) and not self._reader.problems:
            self._reader.refuse(
                self._name,
                f"has {len(self._all)} pictures, and {self._used} parts of messages are "
                '{"type": "image"}, which say where they are',
            )


def _messages(reader: _Reader, value: Any, field: str, pictures: _Pictures) -> list[RowMessage]:
    if not isinstance(value, list):
        reader.refuse(field, f"must be a list of messages, not {_kind(value)}")
        return []
    if not value:
        reader.refuse(field, "is empty: there is no message")
    found = [_message(reader, each, f"{field}[{at}]", pictures) for at, each in enumerate(value)]
    return [message for message in found if message is not None]


def _message(reader: _Reader, value: Any, field: str, pictures: _Pictures) -> RowMessage | None:
    if not isinstance(value, Mapping):
        reader.refuse(field, f"must be an object with role and content, not {_kind(value)}")
        return None
    given = {name: each for name, each in value.items() if each is not None}
    for name in given.keys() - {*_MESSAGE, *_THOUGHTS}:
        reader.refuse(f"{field}.{name}", f"is not known; a message has {', '.join((*_MESSAGE, _THOUGHTS[0]))}")
    role = _ROLES.get(given["role"]) if isinstance(given.get("role"), str) else None
    if role is None:
        written = brief(given["role"]) if "role" in given else "missing"
        reader.refuse(f"{field}.role", f"must be system, developer, user, assistant or tool, not {written}")
        return None
    if "content" not in given and not given.get("tool_calls"):
        reader.refuse(f"{field}.content", "missing")
        return None
    for name, owner in (("tool_calls", "assistant"), ("tool_call_id", "tool"), ("weight", "assistant")):
        if given.get(name) and role != owner:
            reader.refuse(f"{field}.{name}", f"is only for the role {owner}, and this is {role}")
    parts = _parts(reader, given.get("content", ""), f"{field}.content", pictures)
    if role == "assistant" and any(isinstance(part, Picture) for part in parts):
        reader.refuse(f"{field}.content", "an answer has a picture, and these models write text")
    return RowMessage(
        role,
        parts,
        field,
        calls=_calls(reader, given.get("tool_calls", []), f"{field}.tool_calls"),
        answers=_call_answered(reader, given, field) if role == "tool" else None,
        thoughts=_thoughts(reader, given, role, field),
        weight=_weight(reader, given.get("weight", 1), f"{field}.weight"),
    )


def _weight(reader: _Reader, value: Any, field: str) -> float:
    if isinstance(value, bool) or value not in (0, 1):
        reader.refuse(field, f"must be 0 (this answer is not trained) or 1, not {brief(value)}")
    return float(value == 1)


def _thoughts(reader: _Reader, given: Mapping[str, Any], role: Role, field: str) -> str | None:
    names = [name for name in _THOUGHTS if given.get(name)]
    if not names:
        return None
    if role != "assistant" or len(names) > 1:
        reader.refuse(f"{field}.{names[-1]}", "thoughts are of the role assistant, in one field")
    return reader.text(given[names[0]], f"{field}.{names[0]}")


def _call_answered(reader: _Reader, given: Mapping[str, Any], field: str) -> tuple[str | None, str | None]:
    found = [
        reader.text(given[name], f"{field}.{name}") if name in given else None for name in ("tool_call_id", "name")
    ]
    return found[0], found[1]


def _parts(reader: _Reader, content: Any, field: str, pictures: _Pictures) -> tuple[str | Picture, ...]:
    if isinstance(content, str):
        return (reader.text(content, field),)
    if not isinstance(content, list):
        reader.refuse(field, f"must be a text or a list of parts, not {_kind(content)}")
        return ()
    found: list[str | Picture] = []
    for at, value in enumerate(content):
        part = _part(reader, value, f"{field}[{at}]", pictures)
        if isinstance(part, str) and found and isinstance(found[-1], str):
            found[-1] += part
        elif part is not None:
            found.append(part)
    return tuple(found)


def _part(reader: _Reader, value: Any, field: str, pictures: _Pictures) -> str | Picture | None:
    if not isinstance(value, Mapping):
        reader.refuse(field, f'must be {{"type": "text", ...}} or {{"type": "image", ...}}, not {_kind(value)}')
        return None
    given = {name: each for name, each in value.items() if each is not None}
    kind = given.pop("type", None)
    if kind == "text" and given.keys() == {"text"}:
        return reader.text(given["text"], f"{field}.text")
    if kind == "image_url" and given.keys() == {"image_url"}:
        address = given["image_url"]
        if isinstance(address, Mapping):
            return _picture(reader, address.get("url"), f"{field}.image_url.url")
        return _picture(reader, address, f"{field}.image_url")
    if kind == "image" and not given:
        return pictures.next(field)
    if kind == "image" and len(given) == 1 and (name := next(iter(given))) in ("image", "path", "url", "bytes"):
        return _picture(reader, given[name], f"{field}.{name}")
    if kind in ("text", "image", "image_url"):
        reader.refuse(field, f"a part of type {kind} has these fields: {brief(', '.join(given) or 'none')}")
    else:
        reader.refuse(f"{field}.type", f"must be text, image or image_url, not {brief(kind)}")
    return None


def _picture(reader: _Reader, value: Any, field: str) -> Picture | None:
    """`value`: a path, a URL, bytes, or what `datasets` stores of an image: {"bytes": ..., "path": ...}."""
    if isinstance(value, Mapping) and value.keys() <= {"bytes", "path"}:
        value = value.get("bytes") or value.get("path")
    if isinstance(value, (str, bytes)) and value:
        return Picture(value if isinstance(value, bytes) else reader.text(value, field), field)
    reader.refuse(field, f"must be a path, a URL or the bytes of a picture, not {_kind(value)}")
    return None


# Tools ---------------------------------------------------------------------------------------------------------------


def _calls(reader: _Reader, value: Any, field: str) -> tuple[dict[str, Any], ...]:
    if not isinstance(value, list):
        reader.refuse(field, f"must be a list of calls, not {_kind(value)}")
        return ()
    found = [_call(reader, each, f"{field}[{at}]") for at, each in enumerate(value)]
    return tuple(call for call in found if call is not None)


def _call(reader: _Reader, value: Any, field: str) -> dict[str, Any] | None:
    function = value.get("function") if isinstance(value, Mapping) else None
    if not isinstance(function, Mapping) or value.get("type") not in (None, "function"):
        reader.refuse(field, 'must be {"type": "function", "function": {"name": ..., "arguments": ...}}')
        return None
    name = reader.text(function.get("name"), f"{field}.function.name")
    arguments = _arguments(reader, function.get("arguments", _MISSING), f"{field}.function.arguments")
    call: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": arguments}}
    if (given := value.get("id")) is not None:
        call = {"id": reader.text(given, f"{field}.id"), **call}
    return call


def _arguments(reader: _Reader, value: Any, field: str) -> dict[str, Any]:
    """An object, or the text of one, as templates take them."""
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value, object_pairs_hook=unique_object)
        except ValueError as error:
            reader.refuse(field, f"a text that is not JSON: {error}")
            return {}
        except RecursionError:
            reader.refuse(field, f"nested more than {_DEEPEST} levels deep")
            return {}
    elif value == "":
        value = {}
    if not isinstance(value, dict):
        kind = "missing" if value is _MISSING else f"not {_kind(value)}"
        reader.refuse(field, f"must be a JSON object, or the text of one, {kind}")
        return {}
    return value if _check_json(reader, value, field) else {}


def _check_json(reader: _Reader, value: dict[str, Any], field: str) -> bool:
    """Whether an object is JSON: not nested too deeply, with finite numbers and texts that can be encoded."""
    if _depth(value) > _DEEPEST:
        reader.refuse(field, f"nested more than {_DEEPEST} levels deep")
        return False
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, default=str)
    except ValueError:
        reader.refuse(field, "has a number that is NaN or infinite, which JSON cannot write")
        return False
    return bool(reader.text(text, field))


def _depth(value: Any) -> int:
    deepest, level = 0, [value]
    while level and deepest <= _DEEPEST:
        inner = [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, (dict, list))]
        deepest, level = deepest + bool(inner), [each for values in inner for each in values]
    return deepest


def _tools(reader: _Reader, value: Any) -> tuple[dict[str, Any], ...]:
    """Functions in OpenAI's form, as a server hands them to a template."""
    if isinstance(value, str):
        try:
            value = json.loads(value, object_pairs_hook=unique_object)
        except (ValueError, RecursionError) as error:
            reader.refuse("tools", f"a text that is not JSON: {error}")
            return ()
    if not isinstance(value, list):
        reader.refuse("tools", f"must be a list of tools, or the JSON of one, not {_kind(value)}")
        return ()
    found = [_tool(reader, each, f"tools[{at}]") for at, each in enumerate(value)]
    names = [tool["function"]["name"] for tool in found if tool is not None]
    for name in sorted({name for name in names if names.count(name) > 1}):
        reader.refuse("tools", f"{brief(name)} is there twice")
    return tuple(tool for tool in found if tool is not None)


def _tool(reader: _Reader, value: Any, field: str) -> dict[str, Any] | None:
    function = value.get("function") if isinstance(value, Mapping) and value.get("type") == "function" else None
    if not isinstance(function, Mapping):
        reader.refuse(field, 'must be {"type": "function", "function": {"name": ..., "parameters": ...}}')
        return None
    name = reader.text(function.get("name"), f"{field}.function.name")
    if name and not _TOOL_NAME.fullmatch(name):
        reader.refuse(f"{field}.function.name", f"{brief(name)} must be letters, digits, _, - and .")
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        reader.refuse(f"{field}.function.parameters", f"must be a JSON schema, not {_kind(parameters)}")
    elif parameters is not None:
        _check_json(reader, parameters, f"{field}.function.parameters")
    found: dict[str, Any] = {"name": name}
    if (description := function.get("description")) is not None:
        found["description"] = reader.text(description, f"{field}.function.description")
    found["parameters"] = {"type": "object", "properties": {}} if parameters is None else parameters
    return {"type": "function", "function": found}


# Conversations as a whole --------------------------------------------------------------------------------------------


def _dialogue(reader: _Reader, row: Mapping[str, Any], messages: Sequence[RowMessage], given: int) -> Dialogue | None:
    tools = _tools(reader, row["tools"]) if row.get("tools") else ()
    variables = row.get("chat_template_kwargs") or {}
    if not isinstance(variables, Mapping) or not all(
        isinstance(each, str | int | float | bool) for each in variables.values()
    ):
        reader.refuse("chat_template_kwargs", "must be an object of texts, numbers, true and false")
    if reader.problems:  # a message that is left out would be taken for one that is missing
        return None
    _check_order(reader, messages)
    _check_answers(reader, messages, given)
    _check_calls(reader, messages, {tool["function"]["name"] for tool in tools})
    if reader.problems:
        return None
    return Dialogue(_with_tool_names(messages), tools, dict(variables), given)


def _check_order(reader: _Reader, messages: Sequence[RowMessage]) -> None:
    before: RowMessage | None = None
    for message in messages:
        calls = before is not None and (before.role == "tool" or bool(before.calls))
        if message.role == "tool" and not calls:
            reader.refuse(message.field, "is a tool's, and no call is before it")
        if before is not None and before.calls and message.role != "tool":
            reader.refuse(
                message.field, f"follows a call, so it must be a tool's result, not of the role {message.role}"
            )
        if message.role == "assistant" and (before is None or before.role == "assistant"):
            where = "is the first message" if before is None else "follows another answer"
            reader.refuse(message.field, f"an answer {where}; a question must come before it")
        before = message


def _check_answers(reader: _Reader, messages: Sequence[RowMessage], given: int) -> None:
    if not any(message.role == "assistant" for message in messages[given:]):
        reader.refuse(messages[-1].field, "the row has no answer: no message to train is of the role assistant")
        return
    if messages[-1].role != "assistant":
        reader.refuse(messages[-1].field, f"is the last one, and must be the assistant's, not of {messages[-1].role}")
    for message in messages:
        if message.role == "assistant" and not message.calls and not "".join(map(str, message.parts)).strip():
            reader.refuse(f"{message.field}.content", "the answer is empty: it has neither text nor calls")
    if not any(message.weight for message in messages[given:] if message.role == "assistant"):
        reader.refuse(messages[-1].field, "every answer of the row has the weight 0: nothing would be trained")


def _check_calls(reader: _Reader, messages: Sequence[RowMessage], offered: set[str]) -> None:
    ids: set[str] = set()
    for message in messages:
        for at, call in enumerate(message.calls):
            field = f"{message.field}.tool_calls[{at}]"
            name = call["function"]["name"]
            if offered and name not in offered:
                reader.refuse(f"{field}.function.name", f"{brief(name)} is not one of the tools of the row")
            if call.get("id") in ids:
                reader.refuse(f"{field}.id", f"{brief(call['id'])} is the id of an earlier call")
            ids |= {call["id"]} if "id" in call else set()
        if message.answers is not None and (answered := message.answers[0]) is not None and answered not in ids:
            reader.refuse(f"{message.field}.tool_call_id", f"{brief(answered)} is not the id of a call before it")


def _with_tool_names(messages: Iterable[RowMessage]) -> tuple[RowMessage, ...]:
    """Results of tools with the names of the tools, which the calls have, as a server gives them to a template."""
    names: dict[str, str] = {}
    found = []
    for message in messages:
        names |= {call["id"]: call["function"]["name"] for call in message.calls if "id" in call}
        if message.answers is not None and message.answers[1] is None and message.answers[0] in names:
            answers = message.answers[0], names[message.answers[0]]
            message = RowMessage(message.role, message.parts, message.field, answers=answers)
        found.append(message)
    return tuple(found)
