"""Anthropic's API: messages and their tokens. `docs/endpoints.md` says what is served of it."""

import secrets
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from tinker_local.backend.control.completions import Answer, Named
from tinker_local.backend.http.access import Backend
from tinker_local.backend.http.anthropic_bodies import Conversation, MessagesBody
from tinker_local.backend.http.bodies import parse
from tinker_local.backend.http.event_stream import begun, event, unless_left
from tinker_local.backend.http.openai_answers import whole
from tinker_local.backend.http.openai_routes import model_of
from tinker_local.backend.http.sampling_routes import body_limits
from tinker_local.backend.rendering.text import TextSoFar
from tinker_local.backend.threads import ENCODING
from tinker_local.types import SampleOutput
from tinker_local.types.requests_and_results import StopReason

router = APIRouter(tags=["anthropic"])

Json = dict[str, Any]


@router.post("/messages/count_tokens")
async def count_tokens(request: Request, backend: Backend) -> Json:
    body = await parse(request, Conversation, *body_limits(backend))
    named = await model_of(request, backend, body.model)
    prompt = await backend.completions.chat_prompt(named, body.as_chat(), {}, go_on=body.goes_on)
    return {"input_tokens": await backend.completions.count_tokens(named, prompt)}


@router.post("/messages")
async def messages(request: Request, backend: Backend) -> Response:
    body = await parse(request, MessagesBody, *body_limits(backend))
    named = await model_of(request, backend, body.model)
    prompt = await backend.completions.chat_prompt(named, body.as_chat(), {}, go_on=body.goes_on)
    answer = await backend.completions.sample(
        named, [prompt], body.params(), num_samples=1, likeliest=0, streamed=bool(body.stream)
    )
    if body.stream:
        return await begun(request, _events(body, named, answer), answer.close)
    try:
        outputs = await unless_left(request, answer.outputs())
        return JSONResponse(await ENCODING.run(_whole_message, body, named, answer.prompt_tokens(), outputs))
    finally:
        answer.close()


def _message(body: MessagesBody, content: Sequence[Json], end: Json, usage: Json) -> Json:
    head = {"id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant", "model": body.model}
    return {**head, "content": content, **end, "usage": usage}


def _end(reason: StopReason | None, text: TextSoFar) -> Json:
    """Why a message ended."""
    if text.stopped is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": text.stopped}
    reasons = {None: None, "stop": "end_turn", "length": "max_tokens"}
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


def _whole_message(body: MessagesBody, named: Named, prompt_tokens: int, outputs: Sequence[SampleOutput]) -> Json:
    (output,) = outputs
    (sequence,) = output.sequences
    text = TextSoFar(named.text.decode, body.stop_sequences or ())
    content = {"type": "text", "text": text.add(whole(sequence).tokens, last=True)}
    return _message(body, [content], _end(sequence.stop_reason, text), _usage(prompt_tokens, output))


async def _events(body: MessagesBody, named: Named, answer: Answer) -> AsyncIterator[bytes]:
    text, reason = TextSoFar(named.text.decode, body.stop_sequences or ()), None
    head = b""
    async for drawings in answer.drawings():
        if not head:
            usage = {"input_tokens": answer.prompt_tokens(), "output_tokens": 0}
            started = _message(body, [], _end(None, text), usage)
            head = _named("message_start", message=started)
            yield head + _named("content_block_start", index=0, content_block={"type": "text", "text": ""})
        shown = ""
        for drawing in drawings:
            reason = drawing.tokens.stop_reason
            shown += text.add(drawing.tokens.tokens, last=reason is not None)
        if shown:
            yield _named("content_block_delta", index=0, delta={"type": "text_delta", "text": shown})
    (output,) = await answer.outputs()
    ended = _named("message_delta", delta=_end(reason, text), usage=_usage(answer.prompt_tokens(), output))
    yield _named("content_block_stop", index=0) + ended + _named("message_stop")


def _named(kind: str, **fields: Any) -> bytes:
    return event({"type": kind, **fields}, kind)
