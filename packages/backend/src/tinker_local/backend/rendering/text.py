"""Text to chunks and token ids to text, for clients that have no tokenizer: the `TextCodec` protocol."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tinker_local.types import Chunk, InvalidRequestError, ModelInput

CHARACTER_BYTES = 4
"""Most bytes of a character in UTF-8; a token has at least one."""

MOST_UNREAD = 16
"""Tokens that may wait for the rest of a character. A model may draw bytes that never become one."""

LONE_SURROGATE = re.compile("[\ud800-\udfff]")

Part = str | Chunk
"""A piece of a message: text, or an image."""

TemplateValue = str | int | float | bool
"""Of a variable that a request gives to a chat template."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that a model wrote. `arguments`: a JSON object as a rule, but models write anything."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, eq=False)
class ChatMessage:
    """One message of a conversation. `calls`: of the assistant. `answers`: the call that a message of the role `tool`
    answers: its id, and the tool's name if it is known. `image_fields`: what the client calls each of its images, in
    order, for errors."""

    role: str
    parts: tuple[Part, ...]
    calls: tuple[ToolCall, ...] = ()
    answers: tuple[str, str | None] | None = None
    image_fields: tuple[str, ...] = ()


class TextCodec(Protocol):
    """The tokenizer and the chat template of one base model. Worker threads call it, several at once.

    Text in messages is data: control tokens that are written in it are encoded as plain characters, so that no message
    can forge a turn, an image, a tool's result or the end of thinking. An assistant's text may have those that are not
    special, since a model writes them itself. Raises InvalidRequestError for what the template refuses.
    """

    def chat(
        self,
        messages: Sequence[ChatMessage],
        variables: Mapping[str, TemplateValue],
        *,
        go_on: bool,
        functions: Sequence[Mapping[str, Any]] = (),
        as_tokens: Collection[str] = (),
        no_thoughts: bool = False,
    ) -> ModelInput:
        """A conversation, and the beginning of the model's reply. `variables`: of the template. `go_on`: the last
        message is the beginning of the reply. `functions`: tools in OpenAI's form. `as_tokens`: control tokens that
        count as such where the text of any message has them. `no_thoughts`: the template's switch for thinking is
        off."""

    def prompt(self, text: str) -> ModelInput:
        """A text as Hugging Face's tokenizer encodes it: with the tokens that it puts first, and with special tokens
        where they are written."""

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of `tokens`, without special tokens."""

    def decode_all(self, tokens: Sequence[int]) -> str:
        """The text of `tokens`, with special tokens."""

    def token(self, token: int) -> str:
        """The text of one token, special or not; U+FFFD in place of bytes that end within a character."""

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token, special or not: those of the tokens of a text are together the text in UTF-8."""

    def is_special(self, token: int) -> bool:
        """Whether `decode` leaves it out."""


class TextSoFar:
    """The text of one sequence, whose tokens come in pieces. It ends before the first of `stops`.

    `text`: what may be shown: not the beginning of what may become a stop, nor of a character whose bytes are not all
    there. `stopped`: which of `stops` ended it.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], stops: Sequence[str], before: Sequence[int] = ()
    ) -> None:
        """`before`: tokens that it follows, which are not in it."""
        self._decode = decode
        self._stops = stops
        self._tokens = [*before]
        self._begin, self._read = 0, len(before)
        self._held = ""
        self.stopped: str | None = None

    def add(self, tokens: Sequence[int], *, last: bool) -> str:
        """Take more tokens; what can be shown now. `last`: there are no more."""
        if self.stopped is not None:
            return ""
        self._tokens += tokens
        self._held += self._new_text(last)
        if found := [(at, -len(stop), stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]:
            end, _, self.stopped = min(found)
            return self._held[:end]
        kept = 0 if last else max((_overlap(self._held, stop) for stop in self._stops), default=0)
        shown, self._held = self._held[: len(self._held) - kept], self._held[len(self._held) - kept :]
        return shown

    def _new_text(self, last: bool) -> str:
        """What follows from the tokens that were not read. A tokenizer decodes some tokens differently at the beginning
        of a text, so they are decoded behind those before."""
        before, end = self._decode(self._tokens[self._begin : self._read]), len(self._tokens)
        text = self._decode(self._tokens[self._begin :])
        if not last and (text.endswith("\ufffd") or len(text) <= len(before)):
            if end - self._read <= MOST_UNREAD:
                return ""
            end, text = self._settled(text)
        self._begin, self._read = self._read, end
        return text[len(before) :]

    def _settled(self, text: str) -> tuple[int, str]:
        """How many tokens may be read of many without text: up to the end of a character in `text`, which none of
        the tokens to come changes."""
        for end in range(len(self._tokens) - CHARACTER_BYTES, self._read, -1):
            if text.startswith(found := self._decode(self._tokens[self._begin : end])):
                return end, found
        return len(self._tokens), text


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


def check_text(text: str, where: str) -> None:
    """InvalidRequestError, which names the field `where`, for half of a surrogate pair."""
    if (lone := LONE_SURROGATE.search(text)) is not None:
        raise InvalidRequestError(
            f"{where}: character {lone.start()} is U+{ord(lone[0]):04X}, half of a surrogate pair, not text"
        )
