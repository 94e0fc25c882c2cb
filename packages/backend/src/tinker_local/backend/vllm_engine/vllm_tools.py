"""`VLLMTools`: how a model writes calls of tools, by vLLM's parsers and structural tags."""

import json
import logging
import secrets
import threading
from collections.abc import Sequence
from typing import Any

from tinker_local.backend.rendering.grammar import Grammar
from tinker_local.backend.rendering.tools import CallPiece, OfferedTools, ReplyForm, ReplyPiece
from tinker_local.backend.vllm_engine.build_engine import prepare_environment, process_state_kept
from tinker_local.types import InvalidRequestError, UnsupportedError

log = logging.getLogger(__name__)

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
            except TypeError as error:
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
        return ReplyForm(grammar, not asked.skip_special_tokens, lambda: _Reader(made(self._tokenizer, tools), asked))

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
    """Implements `ReplyReader` with a parser of vLLM."""

    def __init__(self, parser: Any, request: Any) -> None:
        self._parser = parser
        self._request = request
        self._taken = self._shown = ""
        self._called = False

    def whole(self, text: str, tokens: Sequence[int]) -> ReplyPiece:
        """See `ReplyReader`."""
        try:
            _, content, calls = self._parser.parse(
                text, self._request, enable_auto_tools=True, model_output_token_ids=tokens
            )
        except Exception:  # models write anything
            log.exception("vLLM's tool parser failed; the reply is taken for text")
            return ReplyPiece(text)
        pieces = [
            CallPiece(index, call.arguments, call.id or _new_id(), call.name) for index, call in enumerate(calls or ())
        ]
        # A parser may drop calls that were cut off, which can be the whole reply.
        return ReplyPiece(content or ("" if pieces else text), tuple(pieces))

    def add(self, text: str, tokens: Sequence[int], *, last: bool) -> ReplyPiece:
        """See `ReplyReader`."""
        piece = self._parsed(text, tokens, last)
        self._taken += text
        self._shown += piece.text
        self._called = self._called or bool(piece.calls)
        if last and not self._called and self._taken.startswith(self._shown):
            # A parser holds back text that may be the start of a call. Some never return it if the reply ends there.
            return ReplyPiece(piece.text + self._taken[len(self._shown) :])
        return piece

    def _parsed(self, text: str, tokens: Sequence[int], last: bool) -> ReplyPiece:
        try:
            delta = self._parser.parse_delta(text, list(tokens), self._request, prompt_token_ids=[], finished=last)
        except Exception:
            log.exception("vLLM's tool parser failed; a piece of the reply is taken for text")
            return ReplyPiece(text)
        if delta is None:
            return ReplyPiece("")
        return ReplyPiece(delta.content or "", tuple(_piece(call) for call in delta.tool_calls or ()))


def _piece(call: Any) -> CallPiece:
    function = call.function
    name = None if function is None else function.name
    arguments = "" if function is None else function.arguments or ""
    return CallPiece(call.index, arguments, None if name is None else call.id or _new_id(), name)


def _new_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _enforced(offered: OfferedTools) -> list[dict[str, Any]]:
    """The tools for the grammar, if there is to be one: the arguments of one that is not strict are any object, where
    vLLM would allow any JSON."""
    functions = [tool.as_function() for tool in offered.tools]
    called = offered.must or offered.only is not None or not offered.several
    if called or offered.answer is not None or any(tool.strict for tool in offered.tools):
        for tool, function in zip(offered.tools, functions, strict=True):
            function["function"] |= {"strict": True} | ({} if tool.strict else {"parameters": {"type": "object"}})
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
