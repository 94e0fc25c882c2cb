"""`VLLMTools`: how a model writes calls of tools, by vLLM's parsers and structural tags."""

import json
import logging
import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tinker_local.backend.rendering.grammar import Grammar
from tinker_local.backend.rendering.structured.structural_tags import IF_POSSIBLE
from tinker_local.backend.rendering.tools import CallPiece, OfferedTools, ReplyForm, ReplyPiece
from tinker_local.backend.vllm_engine.build_engine import prepare_environment, process_state_kept
from tinker_local.types import InvalidRequestError, UnsupportedError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Marks:
    """What calls begin with in replies. `end`: what each one ends with."""

    begins: tuple[str, ...]
    end: str

    def first(self, text: str) -> int:
        """Where the first of them is in `text`, or may be when it goes on."""
        whole = [at for mark in self.begins if (at := text.find(mark)) >= 0]
        lengths = (length for mark in self.begins for length in range(1, len(mark)) if text.endswith(mark[:length]))
        return min([*whole, len(text) - max(lengths, default=0)])

    def last(self, text: str) -> int:
        """Where the last of them is in `text`; its end without one."""
        return max((at for mark in self.begins if (at := text.rfind(mark)) >= 0), default=len(text))


_MARKS = {
    "hermes": _Marks(("<tool_call>",), "</tool_call>"),
    "qwen3_coder": _Marks(("<tool_call>", "<function="), "</function>"),
    "mistral": _Marks(("[TOOL_CALLS]",), "}"),
    "llama3_json": _Marks(("<|python_tag|>", "{"), "}"),
}
"""By parser. Replies to others are shown when they have ended."""

_KINDS = ("json", "regex", "choice", "grammar", "structural_tag")


class VLLMTools:
    """Implements `rendering.tools.ToolFormat` with the parser `name` of vLLM, without an engine.

    Calls that are asked for, arguments of strict tools and the number of calls are enforced by a grammar, which vLLM
    writes in the model's own format where it knows that, and otherwise as JSON.
    """

    def __init__(self, name: str, model: str) -> None:
        self._name = name
        self._model = model
        self._loading = threading.Lock()
        self._parsers: list[Any] = []

    def load(self) -> None:
        """Import vLLM's parsers, which takes seconds the first time. ValueError for one that vLLM does not have, or
        that cannot work with the model's tokenizer."""
        with self._loading:
            if not self._parsers:
                self._load()

    def _load(self) -> None:
        from transformers import AutoTokenizer

        name = self._name
        prepare_environment()
        with process_state_kept():
            from vllm.parser import ParserManager
            from vllm.tool_parsers import ToolParserManager

            # They log a traceback for each call that a model writes wrong.
            logging.getLogger("vllm.tool_parsers").setLevel(logging.CRITICAL)
            if name not in (known := ToolParserManager.list_registered()):
                raise ValueError(f"vLLM has no tool parser {name!r}; it has {', '.join(sorted(known))}")
            self._tokenizer = AutoTokenizer.from_pretrained(self._model)
            try:
                # The second names and closes each call's envelope: what else may be answered needs that.
                self._parsers = [
                    ParserManager.get_parser(
                        name, enable_auto_tools=True, tokenizer=self._tokenizer, tool_strict_level=level
                    )
                    for level in ("auto", "function")
                ]
            except (TypeError, ImportError) as error:
                raise ValueError(f"the tool parser {name!r} does not suit this model: {error}") from error

    def form(self, offered: OfferedTools) -> ReplyForm:
        """See `ToolFormat`."""
        try:
            self.load()
        except ValueError as error:
            raise UnsupportedError(f"tools: {error}") from error
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        made = self._parsers[offered.answer is not None]
        fields: dict[str, Any] = {
            "messages": [{"role": "user", "content": ""}],
            "tools": [tool.as_function() for tool in offered.tools],
        }
        fields |= {"tool_choice": _choice(offered), "parallel_tool_calls": offered.several}
        if offered.answer is not None:
            text = offered.answer.text
            value = json.loads(text) if offered.answer.kind == "choice" else text
            fields["structured_outputs"] = {offered.answer.kind: value}
        try:
            tools = ChatCompletionRequest.model_validate(fields).tools
            asked = ChatCompletionRequest.model_validate({**fields, "tools": _enforced(offered)})
            asked = made(self._tokenizer, asked.tools).adjust_request(asked)
        except ValueError as error:  # pydantic's and vLLM's own
            raise InvalidRequestError(f"tools: {_first(error)}") from None
        grammar = _grammar(asked.structured_outputs, "tools")
        self._check(offered, grammar)
        # The schemas tell a reader the types of arguments.
        asked = asked.model_copy(update={"tools": tools})
        marks = None if offered.must or offered.only is not None else _MARKS.get(self._name)
        parser = partial(made, self._tokenizer, tools)
        return ReplyForm(grammar, not asked.skip_special_tokens, lambda: _Reader(parser, asked, marks))

    def _check(self, offered: OfferedTools, grammar: Grammar | None) -> None:
        """UnsupportedError for what was asked for and would be ignored."""
        asks = {
            "tool_choice": offered.must or offered.only is not None,
            "parallel_tool_calls": not offered.several,
            "tools.strict": any(tool.strict for tool in offered.tools),
        }
        for field, asked in asks.items():
            if asked and grammar is None:
                raise UnsupportedError(f"{field}: vLLM's tool parser {self._name!r} cannot enforce it")
        if offered.answer is not None and (grammar is None or grammar.kind != "structural_tag"):
            raise UnsupportedError(f"{offered.answer.field}: not together with tools, for the parser {self._name!r}")


class _Reader:
    """Implements `ReplyReader` with a parser of vLLM, which reads the reply once, when it has ended. Its own reading
    piece by piece gives other calls and other text than that. Until then, text is shown up to where a call may begin.
    """

    def __init__(self, parser: Any, request: Any, marks: _Marks | None) -> None:
        """`marks`: None where text cannot be told from calls before the end."""
        self._parser = parser
        self._request = request
        self._marks = marks
        self._text = ""
        self._tokens: list[int] = []
        self._shown = 0

    def add(self, text: str, tokens: Sequence[int], *, last: bool, cut: bool = False) -> ReplyPiece:
        """See `ReplyReader`."""
        self._text += text
        self._tokens += tokens
        found = self._whole(cut) if last else ReplyPiece(self._before_calls(self._text).rstrip())
        new = found.text[self._shown :]
        self._shown += len(new)
        return ReplyPiece(new, found.calls)

    def _before_calls(self, text: str) -> str:
        """What is text however the reply goes on."""
        return "" if self._marks is None else text[: self._marks.first(text)]

    def _whole(self, cut: bool) -> ReplyPiece:
        """The text begins with `_before_calls`, but for blanks before a call."""
        text, calls = self._text, self._parsed(self._text)
        begun = self._marks.last(text) if self._marks is not None else 0
        if cut and calls and not self._complete(text[begun:], calls[-1]):
            # What it wrote is shown as text, never as a call.
            before = text[:begun]
            calls = self._parsed(before)
            return ReplyPiece(self._without_calls(before, calls) + text[begun:], _pieces(calls))
        return ReplyPiece(self._without_calls(text, calls), _pieces(calls))

    def _complete(self, written: str, call: Any) -> bool:
        """Whether a reply that was cut off has the end of its last call, which it wrote as `written`."""
        if self._marks is not None and self._marks.end not in written:
            return False
        try:
            return isinstance(json.loads(call.arguments), dict)
        except ValueError:
            return False

    def _parsed(self, text: str) -> Sequence[Any]:
        """The calls that vLLM finds."""
        self._content = text
        try:
            _, content, calls = self._parser().parse(
                text, self._request, enable_auto_tools=True, model_output_token_ids=self._tokens
            )
        except Exception:  # models write anything
            log.exception("vLLM's tool parser failed; the reply is taken for text")
            return ()
        self._content = content or ""
        return calls or ()

    def _without_calls(self, text: str, calls: Sequence[Any]) -> str:
        """`text` without `calls`, which were parsed from it last. A parser may leave out calls that were cut off, which
        can be the whole reply; and blanks."""
        if not calls:
            return text
        before = self._before_calls(text).rstrip()
        behind = self._content.strip().removeprefix(before.strip())
        return before + behind


def _pieces(calls: Sequence[Any]) -> tuple[CallPiece, ...]:
    return tuple(CallPiece(index, call.arguments, call.id or _new_id(), call.name) for index, call in enumerate(calls))


def _new_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _enforced(offered: OfferedTools) -> list[dict[str, Any]]:
    """The tools for the grammar, if there is to be one: the arguments of one that is not strict are any object, where
    vLLM would allow any JSON, and follow its schema if they can and it is the only one that may be called, and has to
    be."""
    functions = [tool.as_function() for tool in offered.tools]
    called = offered.must or offered.only is not None or not offered.several
    named = offered.only or (offered.tools[0].name if offered.must and len(offered.tools) == 1 else None)
    if called or offered.answer is not None or any(tool.strict for tool in offered.tools):
        for tool, function in zip(offered.tools, functions, strict=True):
            wished = {IF_POSSIBLE: True, **(tool.parameters or {})} if tool.name == named else {}
            loose = {"parameters": {"type": "object", **wished}}
            function["function"] |= {"strict": True} | ({} if tool.strict else loose)
    return functions


def _choice(offered: OfferedTools) -> Any:
    if offered.only is not None:
        return {"type": "function", "function": {"name": offered.only}}
    return "required" if offered.must else "auto"


def _grammar(params: Any, field: str) -> Grammar | None:
    """Of vLLM's StructuredOutputsParams."""
    if params is None:
        return None
    (kind,) = [kind for kind in _KINDS if getattr(params, kind) is not None]
    value = getattr(params, kind)
    return Grammar(kind, value, field) if isinstance(value, str) else Grammar.of_json(kind, value, field)  # type: ignore[arg-type]


def _first(error: ValueError) -> str:
    """The reason in the first error of pydantic, or the whole message of another one."""
    errors = getattr(error, "errors", None)
    return str(error) if errors is None else str(errors()[0]["msg"])
