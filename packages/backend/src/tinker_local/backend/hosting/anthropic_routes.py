"""Anthropic's API: messages and their tokens. `docs/endpoints.md` says what is served of it."""

import json
import secrets
from array import array
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from tinker_local.backend.control.sample_prompts import Prompt
from tinker_local.backend.hosting.anthropic_bodies import Conversation, MessagesBody
from tinker_local.backend.hosting.completions import Answer, Completions, Named
from tinker_local.backend.hosting.event_stream import event
from tinker_local.backend.hosting.openai_answers import prompt_fields, whole
from tinker_local.backend.hosting.openai_routes import Texts, conversation_limits, model_of
from tinker_local.backend.hosting.recorded_turns import answered, recording_of
from tinker_local.backend.http.access import Backend
from tinker_local.backend.http.bodies import BODY_BYTES, parse
from tinker_local.backend.rendering.tools import CallPiece, OfferedTools, Reply, ReplyForm, ReplyPiece
from tinker_local.backend.threads import ENCODING
from tinker_local.types import SampleOutput
from tinker_local.types.requests_and_results import StopReason

router = APIRouter(tags=["anthropic"])

Json = dict[str, Any]


@router.post("/messages/count_tokens")
async def count_tokens(request: Request, backend: Backend, texts: Texts) -> Json:
    body = await parse(request, Conversation, *conversation_limits(backend))
    named = await model_of(request, texts, body.model)
    with texts.accepted(named, request.scope[BODY_BYTES]):
        prompt, _ = await _asked(texts, body, named)
        return {"input_tokens": (await texts.read(named, prompt)).token_ids.size}


@router.post("/messages")
async def messages(request: Request, backend: Backend, texts: Texts) -> Response:
    body = await parse(request, MessagesBody, *conversation_limits(backend))
    named = await model_of(request, texts, body.model)
    with texts.accepted(named, request.scope[BODY_BYTES]):
        prompt, offered = await _asked(texts, body, named)
        form = None if offered is None else await texts.form(named, offered)
        recording = await recording_of(
            *(request, backend, named, body, prompt, offered, body.params()),
            variables={},
            how=_how(body),
            stops=body.stop_sequences or (),
        )
        if recording is not None:
            prompt, form = recording.prompt, recording.form_of(form, body.grammar())
    answer = await texts.sample(
        named,
        [prompt],
        body.params(),
        num_samples=1,
        likeliest=0,
        streamed=bool(body.stream),
        grammar=body.grammar() if form is None else form.grammar,
    )
    stream = _events(body, named, form, answer) if body.stream else None
    return await answered(request, answer, recording, stream, partial(_whole_message, body, named, form, answer))


async def _asked(texts: Completions, body: Conversation, named: Named) -> tuple[Prompt, OfferedTools | None]:
    """The prompt, and the tools that it offers."""
    return await texts.chat_prompt(named, body, {}, **_how(body))


def _how(body: Conversation) -> Json:
    return {"go_on": body.goes_on, "as_tokens": body.control_tokens, "no_thoughts": False}


def _message(body: MessagesBody, content: Sequence[Json], end: Json, usage: Json) -> Json:
    head = {"id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant", "model": body.model}
    return {**head, "content": content, **end, "usage": usage}


def _end(reason: StopReason | None, reply: Reply) -> Json:
    """Why a message ended."""
    if reply.stopped is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": reply.stopped}
    ended = "tool_use" if reply.called else "end_turn"
    reasons = {None: None, "stop": ended, "length": "max_tokens"}
    return {"stop_reason": reasons[reason], "stop_sequence": None}


def _usage(prompt_tokens: int, output: SampleOutput) -> Json:
    """`input_tokens` are those that were not read from the cache."""
    cached = min(output.prompt_cache_hit_tokens, prompt_tokens)
    return {
        "input_tokens": prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": output.sequences[0].tokens.size,
    }


def _whole_message(
    body: MessagesBody, named: Named, form: ReplyForm | None, answer: Answer, outputs: Sequence[SampleOutput]
) -> bytes:
    (output,) = outputs
    (sequence,) = output.sequences
    reply = Reply(named.text, body.stop_sequences or (), form)
    drawn = whole(sequence)
    piece = reply.whole(drawn.tokens, sequence.stop_reason)
    content: list[Json] = [] if piece.calls and not piece.text else [{"type": "text", "text": piece.text}]
    content += [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": _input(call.arguments)} for call in piece.calls
    ]
    message = _message(body, content, _end(sequence.stop_reason, reply), _usage(answer.prompt_tokens(), output))
    if body.return_token_ids:
        message |= prompt_fields(answer.read[0]) | {"token_ids": drawn.tokens, "logprobs": drawn.logprobs}
    return bytes(JSONResponse(message).body)


def _input(arguments: str) -> Json:
    """A call's arguments; under their own name if they are cut off, or no object."""
    try:
        found = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {"arguments": arguments}


def _streamed(call: CallPiece) -> str:
    """What a client puts together to the input of a call. Clients send it back, and it has to be an object."""
    try:
        is_whole = call.id is not None and not isinstance(json.loads(call.arguments), dict)
    except (ValueError, RecursionError):  # a part
        return call.arguments
    return json.dumps(_input(call.arguments)) if is_whole else call.arguments


class _Blocks:
    """The content blocks of a stream, one after the other. With `tools`, none begins before it has something."""

    def __init__(self, tools: bool) -> None:
        self._index = -1
        self._open: int | None = None
        """Number of the call whose block is open; -1: a text."""
        self._tools = tools

    def begin(self) -> bytes:
        """What comes with the message's start."""
        return b"" if self._tools else self._start(-1, {"type": "text", "text": ""})

    def add(self, piece: ReplyPiece) -> bytes:
        """Events of more text and calls."""
        parts = []
        if piece.text:
            if self._open != -1:
                parts.append(self.end() + self._start(-1, {"type": "text", "text": ""}))
            parts.append(self._delta({"type": "text_delta", "text": piece.text}))
        for call in piece.calls:
            if call.id is not None:
                block: Json = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
                parts.append(self.end() + self._start(call.index, block))
            if call.arguments and self._open == call.index:
                parts.append(self._delta({"type": "input_json_delta", "partial_json": _streamed(call)}))
        return b"".join(parts)

    def end(self) -> bytes:
        """The end of the open block."""
        if self._open is None:
            return b""
        self._open = None
        return _named("content_block_stop", index=self._index)

    def _start(self, number: int, block: Json) -> bytes:
        self._index += 1
        self._open = number
        return _named("content_block_start", index=self._index, content_block=block)

    def _delta(self, delta: Json) -> bytes:
        return _named("content_block_delta", index=self._index, delta=delta)


async def _events(body: MessagesBody, named: Named, form: ReplyForm | None, answer: Answer) -> AsyncIterator[bytes]:
    reply, blocks, reason = Reply(named.text, body.stop_sequences or (), form), _Blocks(form is not None), None
    tokens, logprobs = array("i"), array("d")
    begun = False
    async for drawings in answer.drawings():
        if not begun:
            usage = {"input_tokens": answer.prompt_tokens(), "output_tokens": 0}
            message = _message(body, [], _end(None, reply), usage)
            message |= prompt_fields(answer.read[0]) if body.return_token_ids else {}
            started = partial(_named, "message_start", message=message)
            yield (await ENCODING.run(started) if body.return_token_ids else started()) + blocks.begin()
            begun = True
        for drawing in drawings if body.return_token_ids else ():
            tokens.extend(drawing.tokens.tokens)
            logprobs.extend(drawing.tokens.logprobs)
        pieces = [reply.add(drawing.tokens.tokens, drawing.tokens.stop_reason) for drawing in drawings]
        reason = drawings[-1].tokens.stop_reason
        if form is None:
            pieces = [ReplyPiece("".join(piece.text for piece in pieces))]
        if shown := b"".join(map(blocks.add, pieces)):
            yield shown
    (output,) = await answer.outputs()
    usage = _usage(answer.prompt_tokens(), output)
    ids = {"token_ids": tokens.tolist(), "logprobs": logprobs.tolist()} if body.return_token_ids else {}
    ended = await ENCODING.run(partial(_named, "message_delta", delta=_end(reason, reply), usage=usage, **ids))
    yield blocks.end() + ended + _named("message_stop")


def _named(kind: str, **fields: Any) -> bytes:
    return event({"type": kind, **fields}, kind)
