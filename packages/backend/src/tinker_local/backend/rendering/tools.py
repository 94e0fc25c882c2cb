"""Tools: what a conversation offers to a model, and how the model's reply is read for calls of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tinker_local.backend.rendering.grammar import Grammar
from tinker_local.backend.rendering.text import TextCodec, TextSoFar


@dataclass(frozen=True, slots=True, eq=False)
class Tool:
    """`parameters`: a JSON schema; None: no arguments. `strict`: calls must follow it."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    strict: bool = False

    def as_function(self) -> dict[str, Any]:
        """As chat templates take it, in OpenAI's form."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        function["parameters"] = {"type": "object", "properties": {}} if self.parameters is None else self.parameters
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True, eq=False)
class OfferedTools:
    """`must`: the reply has a call. `only`: the name of the tool that it has to call. `several`: it may have more than
    one call. `answer`: what a reply without a call spells."""

    tools: tuple[Tool, ...]
    must: bool = False
    only: str | None = None
    several: bool = True
    answer: Grammar | None = None


@dataclass(frozen=True, slots=True)
class CallPiece:
    """The next piece of the call number `index` of a reply. The first one of a call has its id and name. `arguments`:
    JSON, or a part of it."""

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class ReplyPiece:
    """The next piece of a reply: text, and what belongs to calls."""

    text: str
    calls: tuple[CallPiece, ...] = ()


class ReplyReader(Protocol):
    """Reads one reply. What is not a call is text."""

    def add(self, text: str, tokens: Sequence[int], *, last: bool, cut: bool = False) -> ReplyPiece:
        """What more of the text and of the tokens gives. `last`: whether they are the end of the answer; `cut`: and
        whether `max_tokens` ended it, where a call that has begun is not complete.

        All pieces together are the same however the reply is divided.
        """


@dataclass(frozen=True, slots=True, eq=False)
class ReplyForm:
    """How replies to one offer look. `grammar`: what they must spell; None: anything. `special`: their text is read
    with special tokens. `reader` makes one for each reply."""

    grammar: Grammar | None
    special: bool
    reader: Callable[[], ReplyReader]


class ToolFormat(Protocol):
    """How a model writes calls of tools. Worker threads call it, several at once."""

    def form(self, offered: OfferedTools) -> ReplyForm:
        """UnsupportedError for what this format cannot do, InvalidRequestError for tools that it cannot read."""


class Reply:
    """One sequence as text and calls. It ends before the first of `stops`. `called`: there was a call."""

    def __init__(
        self, codec: TextCodec, stops: Sequence[str], form: ReplyForm | None, before: Sequence[int] = ()
    ) -> None:
        """`before`: tokens that it follows, as part of one text."""
        self._codec = codec
        self._special = form is not None and form.special
        self._so_far = TextSoFar(codec.decode_all if self._special else codec.decode, stops, before)
        self._reader = None if form is None else form.reader()
        self.called = False

    @property
    def stopped(self) -> str | None:
        """Which of `stops` ended it."""
        return self._so_far.stopped

    def whole(self, tokens: Sequence[int], reason: str | None) -> ReplyPiece:
        """All of it; `reason`: why it ended."""
        return self.add(tokens, reason or "stop")

    def add(self, tokens: Sequence[int], reason: str | None) -> ReplyPiece:
        """Take more tokens; what can be shown now. `reason`: why it has ended, None while it goes on."""
        last = reason is not None
        text = self._so_far.add(self._read(tokens, reason), last=last)
        if self._reader is None:
            return ReplyPiece(text)
        piece = self._reader.add(text, tokens, last=last, cut=reason == "length")
        self.called = self.called or bool(piece.calls)
        return piece

    def _read(self, tokens: Sequence[int], reason: str | None) -> Sequence[int]:
        """Without the special token that ends a sequence."""
        ends = self._special and reason == "stop" and tokens and not self._codec.decode(tokens[-1:])
        return tokens[:-1] if ends else tokens
