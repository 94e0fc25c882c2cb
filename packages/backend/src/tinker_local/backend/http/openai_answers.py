"""The answers of OpenAI's API: texts, logprobs and usage of samples, whole or as they are drawn."""

import codecs
import json
import math
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tinker_local.backend.control.completions import Answer, Named
from tinker_local.backend.http.event_stream import event
from tinker_local.backend.http.openai_bodies import Body, ChatBody
from tinker_local.backend.rendering.text import TextCodec
from tinker_local.backend.rendering.tools import Reply, ReplyForm, ReplyPiece
from tinker_local.backend.sampling.sampler import DrawnTokens
from tinker_local.types import SampledSequence, SampleOutput

MAX_CELLS = 2**19
"""Logprobs in an answer that is not streamed: each takes some hundred bytes of JSON."""

DONE = b"data: [DONE]\n\n"

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Asked:
    """What decides how an answer looks. `likeliest` None: no logprobs. `form`: of replies to an offer of tools."""

    chat: bool
    name: str
    stops: tuple[str, ...]
    num_samples: int
    likeliest: int | None
    with_usage: bool
    form: ReplyForm | None = None
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def of(cls, body: Body, form: ReplyForm | None) -> "Asked":
        """By a request."""
        if isinstance(body, ChatBody):
            likeliest = (body.top_logprobs or 0) if body.logprobs else None
        else:
            likeliest = getattr(body, "logprobs", None)
        with_usage = bool(body.stream_options and body.stream_options.include_usage)
        return cls(isinstance(body, ChatBody), body.model, body.stops, body.n or 1, likeliest, with_usage, form)

    def head(self, *, chunk: bool) -> Json:
        """What every answer has."""
        kind = "text_completion" if not self.chat else "chat.completion.chunk" if chunk else "chat.completion"
        prefix = "chatcmpl" if self.chat else "cmpl"
        return {"id": f"{prefix}-{self.id}", "object": kind, "created": self.created, "model": self.name}


class Choice:
    """One sequence of an answer, taken at once or in pieces. `tokens`: how many there are."""

    def __init__(self, asked: Asked, text: TextCodec, index: int) -> None:
        self._asked = asked
        self._text = text
        self._reply = Reply(text, asked.stops, asked.form)
        self._offset = 0
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self.index = index
        self.tokens = 0
        self.begun = False

    def add(self, drawn: DrawnTokens, *, whole: bool = False) -> tuple[ReplyPiece, Json | None]:
        """What more tokens give, or the `whole` sequence, and their logprobs."""
        self.tokens += len(drawn.tokens)
        take = self._reply.whole if whole else self._reply.add
        return take(drawn.tokens, drawn.stop_reason), self._logprobs(
            drawn
        ) if self._asked.likeliest is not None else None

    def reason(self, drawn: DrawnTokens) -> str | None:
        """`finish_reason`."""
        if drawn.stop_reason == "stop" and self._reply.called:
            return "tool_calls"
        return "stop" if self._reply.stopped is not None and drawn.stop_reason else drawn.stop_reason

    def _logprobs(self, drawn: DrawnTokens) -> Json:
        likeliest = drawn.likeliest or ((),) * len(drawn.tokens)
        # Those that a grammar does not allow have -inf, which JSON has no number for.
        likeliest = tuple(tuple(other for other in others if other[1] > -math.inf) for others in likeliest)
        rows = list(zip(drawn.tokens, drawn.logprobs, likeliest, strict=True))
        if self._asked.chat:
            return {
                "content": [
                    {**self._entry(token, logprob), "top_logprobs": [self._entry(*other) for other in others]}
                    for token, logprob, others in rows
                ]
            }
        texts = [self._written(token) for token in drawn.tokens]
        offsets = [self._offset_of(self._text.token_bytes(token)) for token in drawn.tokens]
        top = [
            {self._written(other): value for other, value in others} | {one: logprob}
            for one, (_, logprob, others) in zip(texts, rows, strict=True)
        ]
        return {
            "tokens": texts,
            "token_logprobs": list(drawn.logprobs),
            "top_logprobs": top if self._asked.likeliest else None,
            "text_offset": offsets,
        }

    def _offset_of(self, parts: bytes) -> int:
        """In which character of the text the bytes of the next token begin."""
        if parts and not 0x80 <= parts[0] < 0xC0:  # what a character lacks before it will never come
            self._offset += len(self._utf8.decode(b"", final=True))
        found = self._offset
        self._offset += len(self._utf8.decode(parts))
        return found

    def _entry(self, token: int, logprob: float) -> Json:
        return {
            "token": self._text.token(token),
            "logprob": logprob,
            "bytes": list(self._text.token_bytes(token)),
        }

    def _written(self, token: int) -> str:
        """The text of a token, or as OpenAI writes one that is a part of a character: `bytes:\\xe4\\xbd`."""
        parts = self._text.token_bytes(token)
        try:
            return parts.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in parts)


def whole(sequence: SampledSequence) -> DrawnTokens:
    """A whole sequence as if it had been drawn at once."""
    logprobs = () if sequence.logprobs is None else tuple(sequence.logprobs.tolist())
    likeliest: tuple[tuple[tuple[int, float], ...], ...] = ()
    if (topk := sequence.topk_logprobs) is not None:
        rows = zip(topk.token_ids.tolist(), topk.logprobs.tolist(), strict=True)
        likeliest = tuple(tuple(zip(ids, values, strict=True)) for ids, values in rows)
    return DrawnTokens(0, tuple(sequence.tokens.tolist()), logprobs, likeliest, sequence.stop_reason)


def usage(prompt_tokens: int, outputs: Sequence[SampleOutput]) -> Json:
    """Counts of all prompts and sequences."""
    sampled = sum(sequence.tokens.size for output in outputs for sequence in output.sequences)
    cached = sum(output.prompt_cache_hit_tokens for output in outputs)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": sampled,
        "total_tokens": prompt_tokens + sampled,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def _message(piece: ReplyPiece) -> Json:
    """The assistant's message."""
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in piece.calls
    ]
    text = None if calls and not piece.text else piece.text
    return {"role": "assistant", "content": text, "refusal": None} | ({"tool_calls": calls} if calls else {})


def _deltas(piece: ReplyPiece) -> Json:
    """The calls of a piece of a stream."""
    calls = []
    for call in piece.calls:
        function = {"arguments": call.arguments} | ({} if call.name is None else {"name": call.name})
        begin = {} if call.id is None else {"id": call.id, "type": "function"}
        calls.append({"index": call.index, **begin, "function": function})
    return {"tool_calls": calls} if calls else {}


def whole_answer(asked: Asked, named: Named, prompt_tokens: int, outputs: Sequence[SampleOutput]) -> bytes:
    """The JSON of the answer to a request that is not streamed. Call it in a thread: it may take seconds, in which
    others run (so not `json.dumps`, which keeps the GIL)."""
    choices: list[Json] = []
    for sequence in (sequence for output in outputs for sequence in output.sequences):
        choice, drawn = Choice(asked, named.text, len(choices)), whole(sequence)
        piece, logprobs = choice.add(drawn, whole=True)
        content = {"message": _message(piece)} if asked.chat else {"text": piece.text}
        choices.append({"index": choice.index, **content, "logprobs": logprobs, "finish_reason": choice.reason(drawn)})
    answer = {**asked.head(chunk=False), "choices": choices, "usage": usage(prompt_tokens, outputs)}
    return "".join(json.JSONEncoder(separators=(",", ":")).iterencode(answer)).encode("utf-8", "replace")


async def events(asked: Asked, named: Named, answer: Answer) -> AsyncIterator[bytes]:
    """The events of a request that is streamed; one piece for all tokens that are there."""
    choices: dict[int, Choice] = {}
    head = asked.head(chunk=True) | ({"usage": None} if asked.with_usage else {})

    def chunk(index: int, content: Mapping[str, Any], logprobs: Json | None, reason: str | None) -> bytes:
        given = {"delta": content} if asked.chat else content
        return event({**head, "choices": [{"index": index, **given, "logprobs": logprobs, "finish_reason": reason}]})

    async for drawings in answer.drawings():
        parts: list[bytes] = []
        for drawing in drawings:
            index = drawing.prompt * asked.num_samples + drawing.tokens.sample
            choice = choices.setdefault(index, Choice(asked, named.text, index))
            piece, logprobs = choice.add(drawing.tokens)
            reason = choice.reason(drawing.tokens)
            if asked.chat and not choice.begun:
                parts.append(chunk(index, {"role": "assistant", "content": ""}, None, None))
            choice.begun = True
            if piece.text or piece.calls or logprobs is not None or (reason and not asked.chat):
                end = None if asked.chat else reason
                text = {"content" if asked.chat else "text": piece.text} if piece.text or not piece.calls else {}
                parts.append(chunk(index, text | _deltas(piece), logprobs, end))
            if asked.chat and reason:
                parts.append(chunk(index, {}, None, reason))
        if parts:
            yield b"".join(parts)
    if asked.with_usage:
        counted = usage(answer.prompt_tokens(), await answer.outputs())
        yield event({**head, "choices": [], "usage": counted})
    yield DONE
