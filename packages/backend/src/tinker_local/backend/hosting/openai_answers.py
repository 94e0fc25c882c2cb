"""The answers of OpenAI's API: texts, logprobs and usage of samples, whole or as they are drawn."""

import asyncio
import codecs
import json
import math
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from tinker_local.backend.hosting.completions import Answer, Named
from tinker_local.backend.hosting.event_stream import event
from tinker_local.backend.hosting.openai_bodies import Body, ChatBody, CompletionBody
from tinker_local.backend.rendering.rendered_input import ReadPrompt
from tinker_local.backend.rendering.text import TextCodec
from tinker_local.backend.rendering.tools import Reply, ReplyForm, ReplyPiece
from tinker_local.backend.sampling.sampler import DrawnTokens, without_tokens
from tinker_local.backend.threads import ENCODING
from tinker_local.types import SampledSequence, SampleOutput, TopkLogprobs

MAX_CELLS = 2**19
"""Logprobs in an answer that is not streamed: each takes some hundred bytes of JSON."""

MAX_ECHOED = 2**20
"""Tokens of prompts in an answer, of all its choices: each takes some bytes of JSON."""

DONE = b"data: [DONE]\n\n"

Json = dict[str, Any]

Row = tuple[int, float | None, Sequence[tuple[int, float]]]
"""A token, its logprob, and the likeliest at its place."""

NO_FIELDS: Mapping[str, Any] = {}

CHANGED = 16
"""Bytes of a text that its tokenizer may have written otherwise."""

SEEN_BEFORE = 4
"""Tokens of a prompt behind which an answer is decoded."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What decides how an answer looks. `likeliest` None: no logprobs. `ids`: it has token ids, and `as_ids`: its
    logprobs name tokens by them. `echoes`: the prompts that it begins with, None for one that came as ids. `sampled`:
    whether it has what was sampled. `stop_ids`: tokens that end it, and are not in its text. `form`: of replies to an
    offer of tools."""

    chat: bool
    name: str
    stops: tuple[str, ...]
    num_samples: int
    likeliest: int | None
    with_usage: bool
    ids: bool = False
    as_ids: bool = False
    echoes: tuple[str | None, ...] = ()
    sampled: bool = True
    stop_ids: tuple[int, ...] = ()
    form: ReplyForm | None = None
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def of(cls, body: Body, form: ReplyForm | None) -> "Asked":
        """By a request."""
        asked = cls(
            isinstance(body, ChatBody),
            body.model,
            body.stops,
            body.n or 1,
            None,
            bool(body.stream_options and body.stream_options.include_usage),
            bool(body.return_token_ids),
            bool(body.return_tokens_as_token_ids),
            stop_ids=body.stop_token_ids or (),
            form=form,
        )
        if isinstance(body, ChatBody):
            return replace(asked, likeliest=(body.top_logprobs or 0) if body.logprobs else None)
        if not isinstance(body, CompletionBody):
            return asked
        echoes = tuple(prompt if isinstance(prompt, str) else None for prompt in body.prompt) if body.echo else ()
        return replace(asked, likeliest=body.logprobs, echoes=echoes, sampled=body.max_tokens != 0)

    @property
    def repeats_prompts(self) -> bool:
        """Whether each choice has its prompt."""
        return bool(self.echoes) or (self.ids and not self.chat)

    def head(self, *, chunk: bool) -> Json:
        """What every answer has."""
        kind = "text_completion" if not self.chat else "chat.completion.chunk" if chunk else "chat.completion"
        prefix = "chatcmpl" if self.chat else "cmpl"
        return {"id": f"{prefix}-{self.id}", "object": kind, "created": self.created, "model": self.name}


class Choice:
    """One sequence of an answer, taken at once or in pieces. `echo`: the text of its prompt, if it begins with that.
    `tokens`: how many there are."""

    def __init__(self, asked: Asked, text: TextCodec, index: int, read: ReadPrompt) -> None:
        self._asked = asked
        self._text = text
        # Behind the prompt, since some decoders drop the blank at the beginning of a text.
        before = [] if asked.chat else read.token_ids[-SEEN_BEFORE:].tolist()
        self._reply = Reply(text, asked.stops, asked.form, before)
        self.read = read
        self.echo = ""
        if asked.echoes:
            given = asked.echoes[index // asked.num_samples]
            self.echo = text.decode_all(read.token_ids.tolist()) if given is None else given
        self._offset = len(self.echo)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self.index = index
        self.tokens = 0
        self.begun = False

    def add(self, drawn: DrawnTokens, *, whole: bool = False) -> tuple[ReplyPiece, Json | None]:
        """What more tokens give, or the `whole` sequence, and their logprobs."""
        self.tokens += len(drawn.tokens)
        take = self._reply.whole if whole else self._reply.add
        # A token that ends the answer is not in the text, as a text that does is not.
        ends = drawn.stop_reason == "stop" and drawn.tokens and drawn.tokens[-1] in self._asked.stop_ids
        piece = take(drawn.tokens[:-1] if ends else drawn.tokens, drawn.stop_reason)
        return piece, None if self._asked.likeliest is None else self._logprobs(drawn)

    def reason(self, drawn: DrawnTokens) -> str | None:
        """`finish_reason`."""
        if drawn.stop_reason == "stop" and self._reply.called:
            return "tool_calls"
        return "stop" if self._reply.stopped is not None and drawn.stop_reason else drawn.stop_reason

    def _logprobs(self, drawn: DrawnTokens) -> Json:
        likeliest = drawn.likeliest or ((),) * len(drawn.tokens)
        # Those that a grammar does not allow have -inf, which JSON has no number for.
        likeliest = tuple(tuple(other for other in others if other[1] > -math.inf) for others in likeliest)
        rows: list[Row] = list(zip(drawn.tokens, drawn.logprobs, likeliest, strict=True))
        if self._asked.chat:
            return {
                "content": [
                    {**self._entry(token, logprob), "top_logprobs": [self._entry(*other) for other in others]}
                    for token, logprob, others in rows
                ]
            }
        return self._of_completion(rows, [self._offset_of(token) for token in drawn.tokens])

    def of_prompt(self, output: SampleOutput) -> Json:
        """The logprobs of the prompt's tokens; the first has none."""
        assert output.prompt_logprobs is not None
        tokens, logprobs = self.read.token_ids.tolist(), output.prompt_logprobs.tolist()
        likeliest = [()] * len(tokens) if (topk := output.topk_prompt_logprobs) is None else rows_of(topk)
        rows: list[Row] = list(zip(tokens, [None, *logprobs[1:]], likeliest, strict=True))
        parts = [(self._text.token_bytes(token), self._text.is_special(token)) for token in tokens]
        return self._of_completion(rows, offsets_in(self.echo, parts))

    def _of_completion(self, rows: Sequence[Row], offsets: Sequence[int]) -> Json:
        return {
            "tokens": [self._name(token) for token, _, _ in rows],
            "token_logprobs": [logprob for _, logprob, _ in rows],
            "top_logprobs": [self._top(*row) for row in rows] if self._asked.likeliest else None,
            "text_offset": offsets,
        }

    def _top(self, token: int, logprob: float | None, others: Sequence[tuple[int, float]]) -> dict[str, float] | None:
        """By text; a token whose text another one has already by its id."""
        if logprob is None:
            return None
        top = {self._name(token): logprob}
        for other, value in others:
            if other != token:
                name = self._name(other)
                top[_by_id(other) if name in top else name] = value
        return top

    def _offset_of(self, token: int) -> int:
        """In which character of the text the bytes of the next token begin."""
        parts = b"" if self._text.is_special(token) else self._text.token_bytes(token)
        if parts and not 0x80 <= parts[0] < 0xC0:  # what a character lacks before it will never come
            self._offset += len(self._utf8.decode(b"", final=True))
        found = self._offset
        self._offset += len(self._utf8.decode(parts))
        return found

    def _entry(self, token: int, logprob: float | None) -> Json:
        return {
            "token": self._name(token),
            "logprob": logprob,
            "bytes": list(self._text.token_bytes(token)),
        }

    def _name(self, token: int) -> str:
        """The text of a token, or as OpenAI writes one that is a part of a character in completions:
        `bytes:\\xe4\\xbd`."""
        if self._asked.as_ids:
            return _by_id(token)
        if self._asked.chat:
            return self._text.token(token)
        parts = self._text.token_bytes(token)
        try:
            return parts.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in parts)


def _by_id(token: int) -> str:
    """As vLLM's server writes it."""
    return f"token_id:{token}"


def offsets_in(text: str, tokens: Sequence[tuple[bytes, bool]]) -> list[int]:
    """In which character of `text` each of its tokens begins: their bytes, and whether they are special. One that a
    tokenizer adds, and does not stand in the text, has no characters. Behind what a tokenizer has changed (to NFC),
    the next one that stands within `CHANGED` bytes is right again."""
    written, at, starts = text.encode("utf-8", "replace"), 0, []
    for token, is_special in tokens:
        # Some tokenizers put a blank before a text.
        part = next((part for part in (token, token.removeprefix(b" ")) if written.startswith(part, at)), None)
        if part is None and not is_special and (later := written.find(token, at, at + CHANGED)) >= 0:
            part, at = token, later
        starts.append(at)
        at += len(part or b"")
    begins = np.cumsum([byte & 0xC0 != 0x80 for byte in written], dtype=np.int64) - 1
    return [*map(int, np.append(begins, len(text))[starts])]


def rows_of(topk: TopkLogprobs) -> list[tuple[tuple[int, float], ...]]:
    """Ids and logprobs of the likeliest at each position."""
    rows = zip(topk.token_ids.tolist(), topk.logprobs.tolist(), strict=True)
    return [tuple(zip(ids, values, strict=True)) for ids, values in rows]


def prompt_fields(read: ReadPrompt) -> Json:
    """The ids of a prompt, with those of its images' positions, and which positions are images."""
    names = ("sha256", "offset", "length")
    images = [dict(zip(names, image, strict=True)) for image in read.images]
    return {"prompt_token_ids": read.token_ids.tolist()} | ({"prompt_images": images} if images else {})


def whole(sequence: SampledSequence) -> DrawnTokens:
    """A whole sequence as if it had been drawn at once."""
    logprobs = () if sequence.logprobs is None else tuple(sequence.logprobs.tolist())
    likeliest: tuple[tuple[tuple[int, float], ...], ...] = ()
    if sequence.topk_logprobs is not None:
        likeliest = tuple(rows_of(sequence.topk_logprobs))
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


def _choice(asked: Asked, choice: Choice, drawn: DrawnTokens, output: SampleOutput) -> Json:
    """One of a whole answer."""
    piece, logprobs = choice.add(drawn, whole=True)
    if asked.echoes and logprobs is not None:
        before = choice.of_prompt(output)
        logprobs = {name: None if part is None else [*before[name], *part] for name, part in logprobs.items()}
    content = {"message": _message(piece)} if asked.chat else {"text": choice.echo + piece.text}
    found = {"index": choice.index, **content, "logprobs": logprobs, "finish_reason": choice.reason(drawn)}
    return found | ({"token_ids": list(drawn.tokens)} if asked.ids else {})


def whole_answer(asked: Asked, named: Named, answer: Answer, outputs: Sequence[SampleOutput]) -> bytes:
    """The JSON of the answer to a request that is not streamed. Call it in a thread: it may take seconds, in which
    others run (so not `json.dumps`, which keeps the GIL)."""
    if not asked.sampled:
        outputs = [without_tokens(output) for output in outputs]  # one was sampled so that the prompt is read
    choices: list[Json] = []
    for at, output in enumerate(outputs):
        prompt = prompt_fields(answer.read[at]) if asked.ids and not asked.chat else {}  # once for all samples
        for sequence in output.sequences:
            choice = Choice(asked, named.text, len(choices), answer.read[at])
            choices.append(_choice(asked, choice, whole(sequence), output) | prompt)
    found = {**asked.head(chunk=False), "choices": choices, "usage": usage(answer.prompt_tokens(), outputs)}
    if asked.ids and asked.chat:
        found |= prompt_fields(answer.read[0])
    return "".join(json.JSONEncoder(separators=(",", ":")).iterencode(found)).encode("utf-8", "replace")


async def events(asked: Asked, named: Named, answer: Answer) -> AsyncIterator[bytes]:
    """The events of a request that is streamed; one piece for all tokens that are there."""
    choices: dict[int, Choice] = {}
    head = asked.head(chunk=True) | ({"usage": None} if asked.with_usage else {})

    def chunk(
        index: int,
        content: Mapping[str, Any],
        logprobs: Json | None,
        reason: str | None,
        ids: Mapping[str, Any] = NO_FIELDS,
        prompt: Mapping[str, Any] = NO_FIELDS,
    ) -> bytes:
        given = {"delta": content} if asked.chat else content
        choice = {"index": index, **given, "logprobs": logprobs, "finish_reason": reason, **ids}
        return event({**head, "choices": [choice], **prompt})

    async for drawings in answer.drawings():
        parts: list[bytes] = []
        for drawing in drawings:
            index = drawing.prompt * asked.num_samples + drawing.tokens.sample
            read = answer.read[drawing.prompt]
            if (choice := choices.get(index)) is None:
                # In a thread where it decodes the prompt.
                made = partial(Choice, asked, named.text, index, read)
                choice = choices[index] = await ENCODING.run(made) if asked.echoes else made()
            piece, logprobs = choice.add(drawing.tokens)
            reason, tokens = choice.reason(drawing.tokens), list(drawing.tokens.tokens)
            ids: Json = {"token_ids": tokens} if asked.ids and tokens else {}
            echo = ""
            if asked.chat and not choice.begun:
                prompt = prompt_fields(read) if asked.ids and len(choices) == 1 else NO_FIELDS
                parts.append(chunk(index, {"role": "assistant", "content": ""}, None, None, prompt=prompt))
            elif not choice.begun:
                ids |= prompt_fields(read) if asked.ids else {}
                echo = choice.echo
            choice.begun = True
            if piece.text or echo or piece.calls or logprobs is not None or ids or (reason and not asked.chat):
                end = None if asked.chat else reason
                text = {"content" if asked.chat else "text": echo + piece.text} if piece.text or not piece.calls else {}
                parts.append(chunk(index, text | _deltas(piece), logprobs, end, ids))
            if "prompt_token_ids" in ids:  # each may take milliseconds, in which others wait
                await asyncio.sleep(0)
            if asked.chat and reason:
                parts.append(chunk(index, {}, None, reason))
        if parts:
            yield b"".join(parts)
    if asked.with_usage:
        counted = usage(answer.prompt_tokens(), await answer.outputs())
        yield event({**head, "choices": [], "usage": counted})
    yield DONE
