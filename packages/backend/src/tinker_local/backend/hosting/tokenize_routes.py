"""The token ids of a prompt, and the text of ids, as vLLM's server gives them."""

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from tinker_local.backend.hosting.openai_answers import prompt_fields
from tinker_local.backend.hosting.openai_bodies import DetokenizeBody, TokenizeBody
from tinker_local.backend.hosting.openai_routes import Texts, chat_prompt, conversation_limits, model_of
from tinker_local.backend.http.access import Backend
from tinker_local.backend.http.bodies import BODY_BYTES, parse
from tinker_local.backend.http.sampling_routes import body_limits
from tinker_local.backend.rendering.text import TextCodec
from tinker_local.backend.threads import RENDERING

router = APIRouter(tags=["openai"])


@router.post("/tokenize")
async def tokenize(request: Request, backend: Backend, texts: Texts) -> dict[str, Any]:
    """What the prompt of chat completions or completions would be."""
    body = await parse(request, TokenizeBody, *conversation_limits(backend))
    named = await model_of(request, texts, body.model)
    with texts.accepted(named, request.scope[BODY_BYTES]):
        if body.prompt is None:
            prompt, _ = await chat_prompt(texts, named, body)
        else:
            prompt = await texts.text_prompt(named, body.prompt, "prompt")
        read = prompt_fields(await texts.read(named, prompt))
        tokens = read.pop("prompt_token_ids")
        strings = await RENDERING.run(_strings, named.text, tokens) if body.return_token_strs else None
    most = named.base.max_context_length
    return {"count": len(tokens), "max_model_len": most, "tokens": tokens, "token_strs": strings, **read}


def _strings(text: TextCodec, tokens: Sequence[int]) -> list[str]:
    return [text.token(token) for token in tokens]


@router.post("/detokenize")
async def detokenize(request: Request, backend: Backend, texts: Texts) -> dict[str, str]:
    """The text of token ids, with special tokens."""
    body = await parse(request, DetokenizeBody, *body_limits(backend))
    named = await model_of(request, texts, body.model)
    with texts.accepted(named, request.scope[BODY_BYTES]):
        return {"prompt": await RENDERING.run(named.text.decode_all, body.tokens)}
