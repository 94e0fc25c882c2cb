"""The content of messages, whichever way a client writes them: what decides whether a conversation continues another.

Two messages are equal if they have the same role, text, bytes of pictures, calls (arguments as parsed JSON, with their
ids) and the same id of the call that they answer. Neighbouring parts of text count as one, and no text as an empty one.
"""

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from tinker_local.backend.rendering.continued import picture_name
from tinker_local.backend.rendering.text import ChatMessage

Content = dict[str, Any]
"""One message as JSON: `role`, `parts` (texts, and `{"picture": SHA-256}`), `calls` and `answers` where it has them."""


def content_of(message: ChatMessage) -> Content:
    """See `Content`."""
    parts: list[Any] = []
    for is_text, run in itertools.groupby(message.parts, key=lambda part: isinstance(part, str)):
        if is_text:
            text = "".join(map(str, run))
            parts += [text] if text else []
        else:
            parts += [{"picture": picture_name(part)} for part in run if not isinstance(part, str)]
    found: Content = {"role": message.role, "parts": parts}
    if message.calls:
        found["calls"] = [
            {"id": call.id, "name": call.name, "arguments": arguments_of(call.arguments)} for call in message.calls
        ]
    if message.answers is not None:
        found["answers"] = message.answers[0]
    return found


def arguments_of(written: str) -> Any:
    """A call's arguments as JSON; under their own name unless they are an object, as Anthropic's clients send them."""
    try:
        found = json.loads(written or "{}")
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {"arguments": written}


def key_of(content: Any) -> str:
    """A name that equal contents share."""
    written = json.dumps(content, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(written.encode()).hexdigest()[:32]


def head_of(base: str, functions: Sequence[Any], variables: Mapping[str, Any], how: Mapping[str, Any]) -> str:
    """The key of all that a prompt is made of besides its messages: base model, tools, variables of the template."""
    shared = {name: sorted(value) if name == "as_tokens" else value for name, value in how.items() if name != "go_on"}
    return key_of([base, list(functions), dict(variables), shared])


def difference(one: Content, other: Content) -> str:
    """Which part of two messages differs."""
    for field, word in (("role", "role"), ("answers", "id of the call"), ("calls", "calls")):
        if one.get(field) != other.get(field):
            return word
    pictures = [[part for part in each["parts"] if not isinstance(part, str)] for each in (one, other)]
    return "pictures" if pictures[0] != pictures[1] else "text"
