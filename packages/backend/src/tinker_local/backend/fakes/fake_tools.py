"""`FakeTools`: how the fakes write calls of tools."""

import itertools
import json
import re
from collections.abc import Iterator, Sequence

from tinker_local.backend.fakes.fake_grammar import few_values, texts_of
from tinker_local.backend.rendering.grammar import Grammar
from tinker_local.backend.rendering.tools import CallPiece, OfferedTools, ReplyForm, ReplyPiece

_CALL = re.compile("<call>([^ ]+) ([^<]*)(?:(</call>)|$)")

NO_CALL = "no call"


def written_call(name: str, arguments: str) -> str:
    """A call as the fakes write it: `<call>NAME ARGUMENTS</call>`."""
    return f"<call>{name} {arguments}</call>"


class FakeTools:
    """Implements `rendering.tools.ToolFormat`. What is answered is one of a few calls, two of them if several are
    allowed, or a text if no call has to be."""

    def form(self, offered: OfferedTools) -> ReplyForm:
        """See `ToolFormat`."""
        tools = [tool for tool in offered.tools if offered.only in (None, tool.name)]
        calls = [
            written_call(tool.name, json.dumps(arguments))
            for tool in tools
            for arguments in few_values(tool.parameters or {"type": "object"}, "tools")
        ]
        texts = list(calls)
        if offered.several and offered.only is None:
            texts += ["".join(pair) for pair in itertools.pairwise(calls)]
        if not offered.must and offered.only is None:
            texts += [NO_CALL] if offered.answer is None else texts_of(offered.answer)
        return ReplyForm(Grammar.of_json("choice", texts, "tools"), False, _Reader)


class _Reader:
    """Implements `ReplyReader`. `text`: so far; `shown`: how many characters of it are shown as text."""

    def __init__(self) -> None:
        self._text = ""
        self._shown = 0
        self._sent: dict[int, int] = {}

    def add(self, text: str, tokens: Sequence[int], *, last: bool, cut: bool = False) -> ReplyPiece:
        """See `ReplyReader`."""
        self._text += text
        end = self._text.find("<")
        shown = self._text[self._shown : len(self._text) if end < 0 else end]
        self._shown += len(shown)
        return ReplyPiece(shown, tuple(self._calls()))

    def _calls(self) -> Iterator[CallPiece]:
        for index, found in enumerate(_CALL.finditer(self._text)):
            new = found[2][self._sent.get(index, 0) :]
            first = index not in self._sent
            if first or new:
                yield CallPiece(index, new, f"call_{index}" if first else None, found[1] if first else None)
            self._sent[index] = len(found[2])
