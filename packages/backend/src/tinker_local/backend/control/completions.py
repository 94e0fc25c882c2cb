"""Samples for callers that name a model and send text, as the clients of OpenAI's and Anthropic's APIs do.

They have no session, so each owner has one that is made when it is needed. Everything else is as for other samples.
"""

import asyncio
import itertools
import json
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from tinker_local.backend.control.callers import Caller
from tinker_local.backend.control.sampling_sessions import BesidesRequest, Sampling, SamplingSession
from tinker_local.backend.control.sessions import Sessions
from tinker_local.backend.rendering.grammar import Grammar
from tinker_local.backend.rendering.text import ChatMessage, TemplateValue, TextCodec
from tinker_local.backend.rendering.tools import OfferedTools, ReplyForm, Tool, ToolFormat
from tinker_local.backend.sampling.sampler import DrawnTokens
from tinker_local.backend.scheduling.operations import Operation, Operations
from tinker_local.backend.threads import RENDERING
from tinker_local.types import (
    CreateSamplingSessionRequest,
    CreateSessionRequest,
    GoneError,
    InvalidRequestError,
    ModelInput,
    NotFoundError,
    SampleOutput,
    SampleRequest,
    SamplingParams,
    UnsupportedError,
)
from tinker_local.types.errors import brief

SESSION_NAME = "OpenAI and Anthropic endpoints"
"""The display name of an owner's session."""

AT_ONCE = 64
"""Pieces of an answer that are made into text before the event loop goes on with others."""

CHARACTERS_OF_A_POSITION = 32
"""A text with more characters for each position of the context cannot fit, and is not encoded to see it."""


def parse_model(name: str) -> tuple[str | None, str | None]:
    """Base model and checkpoint that `name` means: a base model, a `tinker://` path, or `BASE;PATH`."""
    base, separator, path = name.partition(";")
    if separator and not (base and path.startswith("tinker://")):
        raise InvalidRequestError(f"model: {brief(name)} is not BASE_MODEL;tinker://RUN/sampler_weights/NAME")
    if separator:
        return base, path
    return (None, name) if name.startswith("tinker://") else (name, None)


@dataclass(slots=True, eq=False)
class _OwnersSession:
    """The session of an owner, its sampling session for each model's name, and the numbers to come."""

    session_id: str
    samplers: dict[str, str] = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=itertools.count)


class Named:
    """The model that a request names, with its sampling session. `first`: its owner has not named it before, since the
    server started or the session ended."""

    def __init__(self, session: SamplingSession, name: str, *, first: bool) -> None:
        self.session = session
        self.name = name
        self.base = session.base
        self.first = first

    @property
    def text(self) -> TextCodec:
        """UnsupportedError if the base model has none."""
        if self.base.engines.text is None:
            raise UnsupportedError(f"model: {self.base.names[0]!r} was loaded without a tokenizer, which this needs")
        return self.base.engines.text


@dataclass(frozen=True, slots=True)
class Drawing:
    """Tokens of sequence `tokens.sample` for prompt `prompt` of a request."""

    prompt: int
    tokens: DrawnTokens


class Answer:
    """The samples of one request, an operation for each prompt. Iterate for the tokens as they are drawn, if it is
    streamed, and await `outputs` for all of them. `close` it in any case: what still runs is cancelled."""

    def __init__(self, operations: Operations) -> None:
        self.operations: list[Operation[SampleOutput]] = []
        self._all = operations
        self._loop = asyncio.get_running_loop()
        self._drawn: deque[Drawing] = deque()
        self._news = asyncio.Event()
        self._told = False

    def take(self, prompt: int, tokens: DrawnTokens) -> None:
        """Tokens from any thread. The event loop is woken once for all that come before it looks."""
        self._drawn.append(Drawing(prompt, tokens))
        if not self._told and not self._loop.is_closed():
            self._told = True
            self._loop.call_soon_threadsafe(self._news.set)

    async def drawings(self) -> AsyncIterator[list[Drawing]]:
        """All tokens, up to `AT_ONCE` pieces at a time. Raises the error of a sample that failed."""
        for operation in self.operations:
            operation.when_done(lambda _: self._news.set())
        while True:
            ended = all(operation.done for operation in self.operations)
            failed = any(operation.failed for operation in self.operations)
            self._told = False
            self._news.clear()
            if found := [self._drawn.popleft() for _ in range(min(AT_ONCE, len(self._drawn)))]:
                yield found
                if self._drawn:
                    await asyncio.sleep(0)
                    continue
            if failed:
                await self.outputs()
            if ended:
                return
            if not found:
                await self._news.wait()

    async def outputs(self) -> list[SampleOutput]:
        """The result for each prompt; if one fails, raises its error."""
        waiting = [asyncio.ensure_future(_result(operation)) for operation in self.operations]
        try:
            return list(await asyncio.gather(*waiting))
        finally:
            for one in waiting:
                one.cancel()

    def prompt_tokens(self) -> int:
        """Positions of all prompts; 0 for one that is not rendered yet."""
        return sum((operation.timeline.facts or {}).get("prompt_tokens", 0) for operation in self.operations)

    def close(self) -> None:
        """Cancel what runs, and forget the rest: no client asks for it again."""
        for operation in self.operations:
            if not operation.done:
                operation.cancel(GoneError("the client left"))
            self._all.forget(operation.request_id)


async def _result(operation: Operation[SampleOutput]) -> SampleOutput:
    return await operation


class Completions:
    """Answers requests that name a model. `seq` numbers come from one counter for each owner."""

    def __init__(self, sessions: Sessions, sampling: Sampling, operations: Operations) -> None:
        self._sessions = sessions
        self._sampling = sampling
        self._operations = operations
        self._owners: dict[str, _OwnersSession] = {}
        self._opening = asyncio.Lock()

    async def named(self, caller: Caller, name: str, *, read_as_public: bool = False) -> Named:
        """The model called `name`. Who may read its checkpoint is decided before; `read_as_public`: see
        `Sampling.create_session`."""
        own = self._owners.get(caller.owner)
        if own is not None and name in own.samplers:
            try:
                return Named(await self._sampling.get(own.samplers[name]), name, first=False)
            except (GoneError, NotFoundError):  # its checkpoint was saved again, or its session was finished
                own.samplers.pop(name, None)
        async with self._opening:
            session, first = await self._open(caller, name, read_as_public)
            return Named(await self._sampling.get(session), name, first=first)

    async def _open(self, caller: Caller, name: str, read_as_public: bool) -> tuple[str, bool]:
        """The id of the sampling session of `name`, and whether it is new."""
        base, path = parse_model(name)
        own = self._owners.get(caller.owner)
        if own is None or not self._sessions.is_live(own.session_id):
            session = CreateSessionRequest(display_name=SESSION_NAME)
            own = self._owners[caller.owner] = _OwnersSession(
                await self._sessions.create(session, caller=caller, must_record=False)
            )
        if first := name not in own.samplers:
            try:
                own.samplers[name] = await self._sampling.create_session(
                    CreateSamplingSessionRequest(
                        session_id=own.session_id,
                        sampling_session_seq_id=next(own.numbers),
                        base_model=base,
                        model_path=path,
                    ),
                    read_as_public=read_as_public,
                    must_record=False,
                )
            except InvalidRequestError as error:
                raise _about_model(error, name) from None
        return own.samplers[name], first

    async def chat_prompt(
        self,
        named: Named,
        messages: Sequence[ChatMessage],
        variables: Mapping[str, TemplateValue],
        *,
        go_on: bool = False,
        tools: Sequence[Tool] = (),
        control_tokens: Collection[str] = (),
    ) -> ModelInput:
        """A conversation as the model reads it. `control_tokens`: see `as_tokens` of `TextCodec.chat`."""
        texts = [part for message in messages for part in message.parts if isinstance(part, str)]
        texts += [call.arguments for message in messages for call in message.calls]
        functions = [tool.as_function() for tool in tools]
        _check_length(texts, named, "messages")
        _check_length([json.dumps(function) for function in functions], named, "tools")
        chat = partial(named.text.chat, go_on=go_on, functions=functions, as_tokens=control_tokens)
        return await RENDERING.run(chat, messages, variables)

    async def form(self, named: Named, offered: OfferedTools) -> ReplyForm:
        """How the replies to an offer of tools are sampled and read."""
        return await RENDERING.run(_tool_format(named).form, offered)

    async def text_prompt(self, named: Named, text: str) -> ModelInput:
        """A text as the model reads it."""
        _check_length((text,), named, "prompt")
        return await RENDERING.run(named.text.prompt, text)

    async def count_tokens(self, named: Named, prompt: ModelInput) -> int:
        """Positions of a prompt, with those of its images."""
        return await self._sampling.count_tokens(named.session, prompt)

    async def sample(
        self,
        named: Named,
        prompts: Sequence[ModelInput],
        params: SamplingParams,
        *,
        num_samples: int,
        likeliest: int,
        streamed: bool,
        grammar: Grammar | None = None,
    ) -> Answer:
        """Begin to sample `num_samples` sequences for each prompt. If one is refused, none is sampled."""
        if grammar is not None and named.base.engines.no_grammars:
            raise UnsupportedError(f"{grammar.field}: {named.base.engines.no_grammars}")
        answer = Answer(self._operations)
        own = self._owners[named.session.owner]
        try:
            for index, prompt in enumerate(prompts):
                request = SampleRequest(
                    sampling_session_id=named.session.record.sampling_session_id,
                    seq_id=next(own.numbers),
                    prompt=prompt,
                    num_samples=num_samples,
                    sampling_params=params,
                    topk_sample_logprobs=likeliest,
                )
                drawn: Callable[[DrawnTokens], None] | None = partial(answer.take, index) if streamed else None
                answer.operations.append(await self._sampling.sample(request, BesidesRequest(drawn, grammar)))
        except BaseException:
            answer.close()
            raise
        return answer


def _tool_format(named: Named) -> ToolFormat:
    """UnsupportedError if the model's form of calls is not known."""
    engines = named.base.engines
    if why := engines.no_grammars:
        raise UnsupportedError(f"tools: {why}")
    if isinstance(engines.tools, str):
        raise UnsupportedError(f"tools: {engines.tools}")
    return engines.tools


def _about_model(error: InvalidRequestError, name: str) -> InvalidRequestError | NotFoundError:
    """In the words of these APIs, whose field is `model`; a name that is not served is unknown, as theirs are."""
    field, _, reason = str(error).partition(": ")
    if field not in ("base_model", "model_path"):
        return error
    if "is not served here" in reason:
        return NotFoundError(f"model: {reason}")
    return InvalidRequestError(f"model: {reason}")


def _check_length(texts: Iterator[str] | Sequence[str], named: Named, field: str) -> None:
    most = CHARACTERS_OF_A_POSITION * named.base.max_context_length
    if (characters := sum(map(len, texts))) > most:
        raise InvalidRequestError(
            f"{field}: {characters} characters cannot fit the context of {named.base.max_context_length} tokens; "
            f"at most {most} are taken"
        )
