"""OpenAI's API: models, chat completions, completions. `docs/endpoints.md` says what is served of it."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, cast

from fastapi import APIRouter, Depends, Request, Response
from tinker_local.backend.control.life_cycle import ControlPlane
from tinker_local.backend.control.sample_prompts import Prompt
from tinker_local.backend.hosting.completions import Completions, Named, parse_model
from tinker_local.backend.hosting.openai_answers import MAX_CELLS, MAX_ECHOED, Asked, events, whole_answer
from tinker_local.backend.hosting.openai_bodies import Body, ChatBody, ChatPrompt, CompletionBody
from tinker_local.backend.hosting.recorded_turns import Recording, answered, recording_of
from tinker_local.backend.http.access import NAMED_MODEL, Backend, ToList, caller_of, check_readable
from tinker_local.backend.http.bodies import BODY_BYTES, parse
from tinker_local.backend.http.bodies import Body as SentBody
from tinker_local.backend.http.sampling_routes import body_limits
from tinker_local.backend.http.weighing import check_conversation
from tinker_local.backend.rendering.tools import OfferedTools, ReplyForm
from tinker_local.backend.storage.names import parse_tinker_path
from tinker_local.backend.storage.records import CheckpointRecord
from tinker_local.types import InvalidRequestError, NotFoundError

router = APIRouter(tags=["openai"])

MOST_LISTED = 1000
"""Checkpoints that `GET models` looks at, the newest."""


async def _completions(request: Request) -> Completions:
    """Made with the first request: an app may be made before its backend has started."""
    state = request.app.state
    if not hasattr(state, "completions"):
        backend = cast(ControlPlane, state.backend)
        state.completions = Completions(backend.sessions, backend.sampling, backend.operations)
    return cast(Completions, state.completions)


Texts = Annotated[Completions, Depends(_completions)]


@router.get("/models")
async def models(backend: Backend, owned: ToList) -> dict[str, Any]:
    """The base models, and the caller's sampler checkpoints."""
    found = [_model(name, None) for name in backend.models.names()]
    records, _ = await backend.checkpoints.newest(MOST_LISTED, 0, owned)
    served = {*backend.models.names()}
    found += [
        _model(record.tinker_path, record)
        for record in records
        if record.kind == "sampler_weights" and record.base_model in served
    ]
    return {"object": "list", "data": found}


@router.get("/models/{name:path}")
async def model(name: str, request: Request, backend: Backend, texts: Texts) -> dict[str, Any]:
    """A model by any name that a request may give, also a version that is in memory alone. `prompt_layout`: how the
    program that trained it puts pictures into prompts, if it said so."""
    await model_of(request, texts, name)
    _, path = parse_model(name)
    if path is None:
        return _model(name, None)
    try:
        record = await backend.checkpoints.get(path)
    except NotFoundError:
        record, found = None, {**_model(name, None), "owned_by": "checkpoint"}
    else:
        found = _model(name, record)
    layout = await backend.runs.layout(parse_tinker_path(path)[0], record)
    return {**found, **({"prompt_layout": layout.as_json()} if layout.as_json() else {})}


def _model(name: str, record: CheckpointRecord | None) -> dict[str, Any]:
    created, owner = (0, "base") if record is None else (int(record.created_at.timestamp()), "checkpoint")
    return {"id": name, "object": "model", "created": created, "owned_by": owner}


@router.post("/chat/completions")
async def chat_completions(request: Request, backend: Backend, texts: Texts) -> Response:
    body = await parse(request, ChatBody, *conversation_limits(backend))
    named = await model_of(request, texts, body.model)
    with texts.accepted(named, request.scope[BODY_BYTES]):
        prompt, offered = await chat_prompt(texts, named, body)
        form = None if offered is None else await texts.form(named, offered)
        recording = await recording_of(
            *(request, backend, named, body, prompt, offered, body.params()),
            variables=body.chat_template_kwargs or {},
            how=_how(body),
            stops=body.stops,
            stop_ids=body.stop_token_ids or (),
        )
        if recording is not None:
            if body.penalties() is not None:
                raise InvalidRequestError(
                    "presence_penalty, frequency_penalty: a recorded session samples without them"
                )
            prompt, form = recording.prompt, recording.form_of(form, body.grammar())
    return await _answered(request, backend, texts, body, named, [prompt], form, recording)


async def chat_prompt(texts: Completions, named: Named, body: ChatPrompt) -> tuple[Prompt, OfferedTools | None]:
    """The prompt of a conversation, and the tools that it offers."""
    return await texts.chat_prompt(named, body, body.chat_template_kwargs or {}, **_how(body))


def _how(body: ChatPrompt) -> dict[str, Any]:
    return {"go_on": False, "as_tokens": body.control_tokens, "no_thoughts": body.reasoning_effort is not None}


def conversation_limits(backend: ControlPlane) -> tuple[int, int, Callable[[SentBody], None]]:
    """Most bytes and JSON values of a conversation, and what weighs it before it is parsed."""
    return *body_limits(backend), partial(check_conversation, context=backend.models.longest_context)


@router.post("/completions")
async def completions(request: Request, backend: Backend, texts: Texts) -> Response:
    body = await parse(request, CompletionBody, *body_limits(backend))
    named = await model_of(request, texts, body.model)
    most = backend.options.max_num_samples
    if len(body.prompt) > most:
        raise InvalidRequestError(f"prompt: {len(body.prompt)} prompts are more than this server's {most}")
    several = len(body.prompt) > 1
    with texts.accepted(named, request.scope[BODY_BYTES]):
        prompts = [
            await texts.text_prompt(named, prompt, f"prompt[{at}]" if several else "prompt")
            for at, prompt in enumerate(body.prompt)
        ]
    return await _answered(request, backend, texts, body, named, prompts)


async def model_of(request: Request, texts: Completions, name: str) -> Named:
    """The model that a request names, if its caller may read it."""
    request.scope[NAMED_MODEL] = {"model": name}
    _, path = parse_model(name)
    as_public = path is not None and await check_readable(request, "model", path, None) == "public"
    named = await texts.named(caller_of(request), name, read_as_public=as_public)
    request.scope[NAMED_MODEL]["session_id"] = named.session.record.session_id
    if not named.first:
        del request.scope[NAMED_MODEL]
    return named


async def _answered(
    request: Request,
    backend: ControlPlane,
    texts: Completions,
    body: Body,
    named: Named,
    prompts: Sequence[Prompt],
    form: ReplyForm | None = None,
    recording: Recording | None = None,
) -> Response:
    asked, most = Asked.of(body, form), backend.options.max_num_samples
    echoed = asked.num_samples * sum(prompt.model_input.length for prompt in prompts) if asked.repeats_prompts else 0
    if echoed > MAX_ECHOED:
        raise InvalidRequestError(
            f"n: {asked.num_samples} choices with {echoed // asked.num_samples} tokens of prompts are {echoed} tokens, "
            f"more than {MAX_ECHOED}; leave out echo and return_token_ids, or ask for less at a time"
        )
    if asked.likeliest is not None and not body.stream:
        tokens = body.most_tokens() or named.base.max_context_length
        echoed = echoed if asked.echoes else 0
        cells = (asked.num_samples * len(prompts) * tokens + echoed) * (1 + asked.likeliest)
        if cells > MAX_CELLS:
            raise InvalidRequestError(
                f"logprobs: {asked.num_samples * len(prompts)} choices of up to {tokens} tokens"
                f"{f' and {echoed} of prompts' if echoed else ''} with {asked.likeliest} others are {cells} logprobs, "
                f"more than {MAX_CELLS}; give {'fewer prompts or logprobs' if echoed else 'max_tokens, or stream=true'}"
            )
    if asked.num_samples * len(prompts) > most:
        raise InvalidRequestError(
            f"n: {asked.num_samples} for {len(prompts)} prompts is more than this server's {most}"
        )
    answer = await texts.sample(
        named,
        prompts,
        body.params(),
        num_samples=asked.num_samples,
        likeliest=asked.likeliest or 0,
        streamed=bool(body.stream),
        grammar=body.grammar() if form is None else form.grammar,
        penalties=body.penalties(),
        scored=bool(asked.echoes) and asked.likeliest is not None,
    )
    stream = events(asked, named, answer) if body.stream else None
    return await answered(request, answer, recording, stream, partial(whole_answer, asked, named, answer))
