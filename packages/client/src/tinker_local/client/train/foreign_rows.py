"""Rows as other programs publish them, as messages in OpenAI's form: ShareGPT's, Alpaca's and Anthropic's.

Only what has one reading is read. Where a form leaves open what a row says, as ShareGPT's does for calls of tools,
`Unclear` says how to write it.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

_SPEAKERS = {
    **{"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant"},
    "system": "system",
}
_TOOLS = ("function", "function_call", "function_response", "observation", "tool", "tool_call", "tool_response")
_PICTURE = "<image>"
"""What stands for a picture in texts of LLaVA's form, which is ShareGPT's with pictures."""

_SPOKEN = re.compile(r"(?:\A\s*|\n\n)(Human|Assistant):")
_SPOKEN_ROLES = {"Human": "user", "Assistant": "assistant"}


class Unclear(Exception):
    """A row in such a form does not say what it means; `field` and `reason`."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field, self.reason = field, reason


def messages_of(row: Mapping[str, Any]) -> tuple[list[Any], str] | None:
    """The messages of a row in ShareGPT's or Alpaca's form, and the column that has them; None for another row."""
    for name in ("conversations", "conversation"):
        if isinstance(row.get(name), list) and row[name]:
            return _sharegpt(row, name), name
    if "instruction" in row and "output" in row:
        return _alpaca(row), "instruction"
    return None


def _sharegpt(row: Mapping[str, Any], name: str) -> list[Any]:
    turns = row[name]
    if not all(isinstance(turn, Mapping) and "from" in turn for turn in turns):
        return list(turns)  # OpenAI's form in a column of this name; what is not, `forms` refuses
    pictures = row.get("images", row.get("image"))
    count = len(pictures) if isinstance(pictures, list) else int(pictures is not None)
    marked = sum(str(turn.get("value")).count(_PICTURE) for turn in turns)
    messages = [_turn(turn, f"{name}[{at}]", with_pictures=0 < count == marked) for at, turn in enumerate(turns)]
    return [*_system(row, messages), *messages]


def _turn(turn: Mapping[str, Any], field: str, *, with_pictures: bool) -> dict[str, Any]:
    speaker = turn["from"]
    role = _SPEAKERS.get(speaker) if isinstance(speaker, str) else None
    if role is None:
        tools = "; for calls of tools write messages, with tool_calls" if speaker in _TOOLS else ""
        raise Unclear(f"{field}.from", f"must be {', '.join(_SPEAKERS)}, not {speaker!r}{tools}")
    text = turn.get("value")
    if not isinstance(text, str):
        raise Unclear(f"{field}.value", "must be a text")
    content: Any = text
    if with_pictures and _PICTURE in text:
        first, *others = text.split(_PICTURE)
        parts: list[dict[str, str]] = [{"type": "text", "text": first}]
        for other in others:
            parts += [{"type": "image"}, {"type": "text", "text": other}]
        content = [part for part in parts if part.get("text") != ""]
    weight = {} if role != "assistant" else {"weight": turn.get("weight")}
    further = {key: value for key, value in turn.items() if key not in ("from", "value", "weight")}
    return {**further, "role": role, "content": content, **weight}


def _system(row: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The column `system` of both forms, unless the messages have such a prompt."""
    text = row.get("system")
    if not text or (messages and messages[0]["role"] == "system"):
        return []
    return [{"role": "system", "content": text}]


def _alpaca(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """`input` follows `instruction` behind a blank line."""
    instruction, given, output = row["instruction"], row.get("input") or "", row["output"]
    for name, value in (("instruction", instruction), ("input", given), ("output", output)):
        if not isinstance(value, str):
            raise Unclear(name, "must be a text")
    if not output.strip():
        raise Unclear("output", "the answer is empty: nothing would be trained")
    history = row.get("history") or []
    if not isinstance(history, list) or not all(isinstance(turn, list) and len(turn) == 2 for turn in history):
        raise Unclear("history", "must be a list of pairs [question, answer]")
    talk = [*history, [f"{instruction}\n\n{given}" if given.strip() else instruction, output]]
    messages = [
        {"role": role, "content": text} for turn in talk for role, text in zip(("user", "assistant"), turn, strict=True)
    ]
    return [*_system(row, messages), *messages]


def spoken_turns(text: str) -> list[dict[str, str]] | None:
    """A text as Anthropic's hh-rlhf has it, whose turns begin with "Human:" and "Assistant:" behind blank lines, as
    messages; None for another text."""
    before, *parts = _SPOKEN.split(text)
    if before or not parts or parts[0] != "Human" or parts[-2] != "Assistant":
        return None
    return [
        {"role": _SPOKEN_ROLES[name], "content": said.strip()}
        for name, said in zip(parts[::2], parts[1::2], strict=True)
    ]
