"""A prompt that continues exactly the tokens of an earlier one, where a conversation continues it.

A template's own rendering of an earlier reply may have other tokens than were sampled. So the prompt is what the model
saw, what it sampled, and what the template writes behind the reply. That last part is found without knowing the
template: two renderings that differ in the reply alone end in it.
"""

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from tinker_local.backend.rendering.text import ChatMessage, TemplateValue, TextCodec
from tinker_local.types import Chunk, EncodedTextChunk, ImageChunk, InvalidRequestError, ModelInput

Item = int | Chunk
"""A token, or a picture."""


@dataclass(frozen=True, slots=True)
class Rendering:
    """How one request is rendered: the arguments of `TextCodec.chat` besides the messages."""

    codec: TextCodec
    variables: Mapping[str, TemplateValue]
    functions: Sequence[Mapping[str, Any]]
    how: Mapping[str, Any]

    def items(self, messages: Sequence[ChatMessage], **changed: Any) -> list[Item]:
        """The tokens and pictures of a conversation."""
        how = {**self.how, **changed}
        return items_of(self.codec.chat(messages, self.variables, functions=self.functions, **how))


def items_of(given: ModelInput) -> list[Item]:
    """All tokens and pictures, in order."""
    found: list[Item] = []
    for chunk in given.chunks:
        found += map(int, chunk.tokens) if isinstance(chunk, EncodedTextChunk) else [chunk]
    return found


def input_of(items: Sequence[Item]) -> ModelInput:
    """The input of these tokens and pictures, tokens between two pictures as one chunk."""
    chunks: list[Chunk] = []
    tokens: list[int] = []
    for item in [*items, None]:
        if isinstance(item, int):
            tokens.append(item)
            continue
        if tokens:
            chunks.append(EncodedTextChunk(tokens=np.asarray(tokens, np.int32)))
            tokens = []
        if item is not None:
            chunks.append(item)
    return ModelInput(chunks=tuple(chunks))


def picture_name(chunk: Chunk) -> str:
    """The SHA-256 of a picture's bytes, by which recorded sessions know it."""
    assert isinstance(chunk, ImageChunk)
    return hashlib.sha256(chunk.data).hexdigest()


def continued(
    rendering: Rendering,
    messages: Sequence[ChatMessage],
    reply: int,
    prompt: Sequence[Item],
    sampled: Sequence[int],
    *,
    even_rewritten: bool = False,
) -> list[Item] | None:
    """`prompt`, `sampled` and what the template writes behind message number `reply`, which is what was sampled then.

    None if the template writes what comes before otherwise than it did then, as templates that drop earlier thoughts
    do: the model would read something else. `even_rewritten`: then, too. None as well if the end of the reply cannot be
    found in the template's text.
    """
    whole = rendering.items(messages)
    behind = _behind(rendering, messages, reply, whole)
    if behind is None:
        return None
    said = messages[reply]
    if not even_rewritten:
        before = _text(rendering.codec, rendering.items(messages[:reply], go_on=False))
        middle = _text(rendering.codec, whole[: len(whole) - len(behind)])
        written = "".join(part for part in said.parts if isinstance(part, str))
        if not middle.startswith(before):
            return None
        shown = _squeezed(middle[len(before) :])
        if not (_squeezed(written) in shown if said.calls else shown.endswith(_squeezed(written))):
            return None
    if sampled and behind and behind[0] == sampled[-1] and rendering.codec.is_special(sampled[-1]):
        behind = behind[1:]
    return [*prompt, *sampled, *behind]


def _behind(
    rendering: Rendering, messages: Sequence[ChatMessage], reply: int, whole: Sequence[Item]
) -> list[Item] | None:
    """What the template writes behind a reply, from its end of turn on."""
    said = messages[reply]

    def tail(one: ChatMessage, other: ChatMessage) -> list[Item]:
        first, second = (rendering.items([*messages[:reply], each, *messages[reply + 1 :]]) for each in (one, other))
        return _common_end(first, second)

    try:
        found = tail(*(replace(said, parts=(text,), calls=()) for text in ("0", "1")))
        if found and _ends(whole, found):
            return found
    except InvalidRequestError:  # a template that takes results of tools only behind calls
        pass
    if not said.calls:
        return None
    *before, last = said.calls
    made = (json.dumps({"value": number}) for number in (0, 1))
    found = tail(*(replace(said, calls=(*before, replace(last, arguments=text))) for text in made))
    # Text that closes the call was sampled; its end of turn is the first special token behind it.
    special = (at for at, item in enumerate(found) if isinstance(item, int) and rendering.codec.is_special(item))
    at = next(special, None)
    return found[at:] if at is not None and _ends(whole, found[at:]) else None


def _common_end(first: Sequence[Item], second: Sequence[Item]) -> list[Item]:
    pairs = zip(reversed(first), reversed(second), strict=False)
    length = sum(1 for _ in itertools.takewhile(lambda pair: _equal(*pair), pairs))
    return [*first[len(first) - length :]]


def _ends(whole: Sequence[Item], end: Sequence[Item]) -> bool:
    return len(end) <= len(whole) and all(map(_equal, whole[len(whole) - len(end) :], end))


def _equal(one: Item, other: Item) -> bool:
    return one is other or one == other


def _text(codec: TextCodec, items: Sequence[Item]) -> str:
    """Tokens as text, and pictures by their bytes."""
    parts: list[str] = []
    tokens: list[int] = []
    for item in [*items, None]:
        if isinstance(item, int):
            tokens.append(item)
            continue
        parts.append(codec.decode_all(tokens) if tokens else "")
        tokens = []
        if item is not None:
            parts.append(f"\0{picture_name(item)}\0")
    return "".join(parts)


def _squeezed(text: str) -> str:
    """Without white space, which templates change."""
    return "".join(text.split())
