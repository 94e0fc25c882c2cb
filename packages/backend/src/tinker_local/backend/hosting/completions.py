"""Samples for callers that name a model and send text, as the clients of OpenAI's and Anthropic's APIs do.

They have no session, so each owner has one that is made when it is needed. Everything else is as for other samples.
"""

import asyncio
import itertools
import json
import threading
from array import array
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from tinker_local.backend.control.callers import Caller
from tinker_local.backend.control.sample_prompts import Prompt
from tinker_local.backend.control.sampling_sessions import BesidesRequest, Sampling, SamplingSession
from tinker_local.backend.control.sessions import Sessions
from tinker_local.backend.rendering.grammar import Grammar
from tinker_local.backend.rendering.rendered_input import ReadPrompt, RenderedInput
from tinker_local.backend.rendering.text import ChatMessage, TemplateValue, TextCodec
from tinker_local.backend.rendering.tools import OfferedTools, ReplyForm, ToolFormat
from tinker_local.backend.sampling.sampler import DrawnTokens, Penalties
from tinker_local.backend.scheduling.operations import Operation, Operations
from tinker_local.backend.scheduling.quotas import TOPK_BYTES
from tinker_local.backend.scheduling.shared_bytes import SharedBytes
from tinker_local.backend.threads import RENDERING
from tinker_local.types import (
    ContextOverflowError,
    CreateSamplingSessionRequest,
    CreateSessionRequest,
    GoneError,
    InvalidRequestError,
    ModelInput,
    NotFoundError,
    SampleOutput,
    SampleRequest,
    SamplingParams,
    TooManyRequestsError,
    UnsupportedError,
)
from tinker_local.types.errors import brief
from tinker_local.types.requests_and_results import StopReason

SESSION_NAME = "OpenAI and Anthropic endpoints"
"""The display name of an owner's session."""

AT_ONCE = 64
"""Tokens of an answer that are made into text before the event loop goes on with others."""

MOST_WAITING = 32 * 2**20
"""Bytes of tokens and logprobs of a streamed answer that wait for a client that reads slower than they are drawn."""

MOST_UNREAD = 512 * 2**20
"""Of all streams. An owner may have as many as are left."""

FREED_TOKENS = 4096
"""Of a sequence, after which those that were given out are freed, if they are more than half."""

EVENT_BYTES = 128
"""Of a token or logprob in the events of a stream, some of which wait while the client does not read."""

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


class Conversation(Protocol):
    """A request of another API. Both take as long as it is: call them in a thread."""

    def as_chat(self) -> Sequence[ChatMessage]:
        """Its messages as templates take them."""

    def offered(self) -> OfferedTools | None:
        """The tools that the model may call; InvalidRequestError."""


class WaitingTokens:
    """Tokens of one sequence that wait for the client: 8 bytes each, and 8 for each of the likeliest beside it."""

    def __init__(self, sample: int) -> None:
        self._sample = sample
        self._tokens, self._logprobs = array("i"), array("f")
        self._ids, self._values = array("i"), array("f")
        self._reason: StopReason | None = None
        self._given = 0

    def add(self, drawn: DrawnTokens) -> None:
        """Take what comes next."""
        self._tokens.extend(drawn.tokens)
        self._logprobs.extend(drawn.logprobs)
        for row in drawn.likeliest:
            self._ids.extend(one for one, _ in row)
            self._values.extend(value for _, value in row)
        self._reason = drawn.stop_reason

    def __len__(self) -> int:
        """How many tokens wait."""
        return len(self._tokens) - self._given

    def next(self) -> DrawnTokens:
        """The next token; none if only the end is left to tell."""
        at, every = self._given, len(self._tokens)
        self._given = end = min(at + 1, every)
        width = len(self._ids) // every if every else 0  # the same for each token of a request
        row = slice(at * width, end * width)
        others = tuple(zip(self._ids[row], self._values[row], strict=True))
        found = DrawnTokens(
            self._sample,
            tuple(self._tokens[at:end]),
            tuple(self._logprobs[at:end]),
            (others,) if others else (),
            self._reason if end == every else None,
        )
        if end > FREED_TOKENS and 2 * end > every:
            del self._tokens[:end], self._logprobs[:end]
            del self._ids[: end * width], self._values[: end * width]
            self._given = 0
        return found


class Unread:
    """What waits for the clients of all streams, by owner."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.bytes = SharedBytes(MOST_UNREAD)


class Answer:
    """The samples of one request, an operation for each prompt. Iterate for the tokens as they are drawn, if it is
    streamed, and await `outputs` for all of them. `close` it in any case, when it is delivered or the client has left:
    what still runs is cancelled. Until then it counts for its owner.

    A client that does not read keeps neither the sampler nor other clients waiting: what was drawn waits for it, up to
    `MOST_WAITING` bytes and its owner's share of `unread`. Beyond that the samples are cancelled, and the stream ends
    with an error.
    """

    def __init__(self, operations: Operations, owner: str, unread: "Unread") -> None:
        self.operations: list[Operation[SampleOutput]] = []
        self.read: dict[int, ReadPrompt] = {}
        """Each prompt, before the first token of its samples."""
        self.prompts: list[Prompt] = []
        """Of each operation."""
        self.uncount: list[Callable[[], None]] = []
        """Called when this is closed."""
        self.heard: Callable[[Sequence[Drawing]], None] = lambda drawings: None
        """Called with the tokens that `drawings` gives, before it gives them."""
        self._all = operations
        self._loop = asyncio.get_running_loop()
        self._owner = owner
        self._unread = unread
        self._waiting: OrderedDict[tuple[int, int], WaitingTokens] = OrderedDict()  # by prompt and sample, in turn
        self._bytes = 0
        self._too_many = False
        self._news = asyncio.Event()
        self._told = False

    def take_prompt(self, index: int, prompt: RenderedInput) -> None:
        """Prompt number `index` as the model reads it."""
        self.read[index] = ReadPrompt.of(prompt)

    def take(self, prompt: int, tokens: DrawnTokens) -> None:
        """Tokens from any thread. The event loop is woken once for all that come before it looks."""
        with self._unread.lock:
            if self._too_many:
                return
            self._count(_bytes_of(tokens))
            if self._bytes > MOST_WAITING or self._unread.bytes.over(self._owner):
                self._too_many = True
                self._drop()
            else:
                key = prompt, tokens.sample
                if key not in self._waiting:
                    self._waiting[key] = WaitingTokens(tokens.sample)
                self._waiting[key].add(tokens)
        if (self._too_many or not self._told) and not self._loop.is_closed():
            self._told = True
            self._loop.call_soon_threadsafe(self._hear)

    def _count(self, size: int) -> None:
        """Count `size` bytes more, or less; with the lock."""
        self._bytes += size
        self._unread.bytes.take(self._owner, size)

    def _drop(self) -> None:
        """Free what waits; with the lock."""
        self._waiting.clear()
        self._count(-self._bytes)

    def _hear(self) -> None:
        if self._too_many:
            for operation in (each for each in self.operations if not each.done):
                operation.cancel(self._too_slow())
        self._news.set()

    def _too_slow(self) -> TooManyRequestsError:
        most = self._unread.bytes.most
        return TooManyRequestsError(
            "stream: the client reads more slowly than tokens are drawn. Tokens and logprobs that wait for it may have "
            f"{MOST_WAITING} bytes, and those of all streams of an owner as many as others leave of {most}: read "
            "faster, or ask for fewer samples or logprobs",
            retry_after=1.0,
        )

    def _next(self) -> list[Drawing]:
        """Up to `AT_ONCE` tokens, one of each sequence in turn."""
        found: list[Drawing] = []
        with self._unread.lock:
            while self._waiting and len(found) < AT_ONCE:
                key, waiting = self._waiting.popitem(last=False)
                drawn = waiting.next()
                if len(waiting):
                    self._waiting[key] = waiting
                self._count(-_bytes_of(drawn))
                found.append(Drawing(key[0], drawn))
        return found

    async def drawings(self) -> AsyncIterator[list[Drawing]]:
        """All tokens, up to `AT_ONCE` at a time. Raises the error of a sample that failed, or TooManyRequestsError."""
        for operation in self.operations:
            operation.when_done(lambda _: self._news.set())
        while True:
            ended = all(operation.done for operation in self.operations)
            failed = any(operation.failed for operation in self.operations)
            self._told = False
            self._news.clear()
            if self._too_many:
                raise self._too_slow()
            if found := self._next():
                self.heard(found)
                yield found
                if self._waiting:
                    await asyncio.sleep(0)
                    continue
            if failed:
                await self.outputs()
            if ended:
                return
            if not found:
                await self._news.wait()

    async def outputs(self) -> list[SampleOutput]:
        """The result for each prompt; if one fails, raises its error. Of a stream, without logprobs."""
        asked = zip(self.operations, self.prompts, strict=True)
        waiting = [asyncio.ensure_future(_result(operation, prompt)) for operation, prompt in asked]
        try:
            return list(await asyncio.gather(*waiting))
        finally:
            for one in waiting:
                one.cancel()

    def prompt_tokens(self) -> int:
        """Positions of all prompts; 0 for one that is not rendered yet."""
        return sum(read.token_ids.size for read in self.read.values())

    def forget(self) -> None:
        """Cancel what runs, and forget the rest: no client asks for it again."""
        for operation in self.operations:
            if not operation.done:
                operation.cancel(GoneError("the client left"))
            self._all.forget(operation.request_id)
        self.operations, self.prompts = [], []

    def close(self) -> None:
        """`forget`, and count these samples no more."""
        self.forget()
        with self._unread.lock:
            self._too_many = True  # an engine may give some more
            self._drop()
        for uncount in self.uncount:
            uncount()


def _bytes_of(drawn: DrawnTokens) -> int:
    """What `WaitingTokens` takes for these."""
    return TOPK_BYTES * (len(drawn.tokens) + sum(map(len, drawn.likeliest)))


async def _result(operation: Operation[SampleOutput], prompt: Prompt) -> SampleOutput:
    with prompt.named_in_errors():
        return await operation


class Completions:
    """Answers requests that name a model. `seq` numbers come from one counter for each owner."""

    def __init__(self, sessions: Sessions, sampling: Sampling, operations: Operations) -> None:
        self._sessions = sessions
        self._sampling = sampling
        self._operations = operations
        self._owners: dict[str, _OwnersSession] = {}
        self._opening = asyncio.Lock()
        self._unread = Unread()

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
            except (InvalidRequestError, NotFoundError) as error:
                raise _about_model(error, name) from None
        return own.samplers[name], first

    @contextmanager
    def accepted(self, named: Named, size: int) -> Iterator[None]:
        """Count a request of `size` bytes for its owner, from before its prompt is rendered until `sample`, which is
        called when this ends; TooManyRequestsError as there."""
        session_id, owner = named.session.record.session_id, named.session.owner
        self._sampling.in_flight.check(session_id, owner, size)
        leave = self._sampling.in_flight.enter(session_id, owner, size)
        try:
            yield
        finally:
            leave()

    async def chat_prompt(
        self, named: Named, conversation: Conversation, variables: Mapping[str, TemplateValue], **how: Any
    ) -> tuple[Prompt, OfferedTools | None]:
        """A conversation as the model reads it, and the tools that it offers. `how`: `go_on`, `as_tokens` and
        `no_thoughts` of `TextCodec.chat`."""
        return await RENDERING.run(_chat_prompt, named, conversation, variables, how)

    async def form(self, named: Named, offered: OfferedTools) -> ReplyForm:
        """How the replies to an offer of tools are sampled and read."""
        return await RENDERING.run(_tool_format(named).form, offered)

    async def text_prompt(self, named: Named, given: str | ModelInput, field: str) -> Prompt:
        """A text, or token ids, as the model reads it."""
        if not isinstance(given, str):
            return Prompt(given, field)
        _check_length((given,), named, field)
        return Prompt(await RENDERING.run(named.text.prompt, given), field)

    async def read(self, named: Named, prompt: Prompt) -> ReadPrompt:
        """A prompt as the model would read it."""
        with prompt.named_in_errors():
            return await self._sampling.read(named.session, prompt.model_input)

    async def sample(
        self,
        named: Named,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        *,
        num_samples: int,
        likeliest: int,
        streamed: bool,
        grammar: Grammar | None = None,
        penalties: Penalties | None = None,
        scored: bool = False,
    ) -> Answer:
        """Begin to sample `num_samples` sequences for each prompt. If one is refused, none is sampled. `scored`: the
        outputs have the logprobs of the prompts, with the `likeliest` at each position."""
        if grammar is not None and named.base.engines.no_grammars:
            raise UnsupportedError(f"{grammar.field}: {named.base.engines.no_grammars}")
        answer = Answer(self._operations, named.session.owner, self._unread)
        own = self._owners[named.session.owner]
        try:
            for index, prompt in enumerate(prompts):
                request = SampleRequest(
                    sampling_session_id=named.session.record.sampling_session_id,
                    seq_id=next(own.numbers),
                    prompt=prompt.model_input,
                    num_samples=num_samples,
                    sampling_params=params,
                    topk_sample_logprobs=likeliest,
                    prompt_logprobs=scored,
                    topk_prompt_logprobs=likeliest if scored else 0,
                )
                drawn: Callable[[DrawnTokens], None] | None = partial(answer.take, index) if streamed else None
                besides = BesidesRequest(
                    drawn,
                    grammar,
                    answer.uncount,
                    _event_bytes(request, streamed),
                    penalties,
                    partial(answer.take_prompt, index),
                )
                with prompt.named_in_errors():
                    answer.operations.append(await self._sampling.sample(request, besides))
                answer.prompts.append(prompt)
        except BaseException:
            answer.close()
            raise
        return answer


def _chat_prompt(
    named: Named, conversation: Conversation, variables: Mapping[str, TemplateValue], how: Mapping[str, Any]
) -> tuple[Prompt, OfferedTools | None]:
    """`Completions.chat_prompt`; blocks for as long as the conversation is."""
    offered = conversation.offered()
    messages = conversation.as_chat()
    texts = [part for message in messages for part in message.parts if isinstance(part, str)]
    texts += [call.arguments for message in messages for call in message.calls]
    functions = [] if offered is None else [tool.as_function() for tool in offered.tools]
    _check_length(texts, named, "messages")
    _check_length([json.dumps(function) for function in functions], named, "tools")
    images = tuple(field for message in messages for field in message.image_fields)
    return Prompt(named.text.chat(messages, variables, functions=functions, **how), "messages", images), offered


def _event_bytes(request: SampleRequest, streamed: bool) -> int:
    """Of the events of a stream that are being sent."""
    return EVENT_BYTES * AT_ONCE * (1 + request.topk_sample_logprobs) if streamed else 0


def _tool_format(named: Named) -> ToolFormat:
    """UnsupportedError if the model's form of calls is not known."""
    engines = named.base.engines
    if why := engines.no_grammars:
        raise UnsupportedError(f"tools: {why}")
    if isinstance(engines.tools, str):
        raise UnsupportedError(f"tools: {engines.tools}")
    return engines.tools


def _about_model(error: InvalidRequestError | NotFoundError, name: str) -> InvalidRequestError | NotFoundError:
    """In the words of these APIs, whose field is `model`; a name that is not served is unknown, as theirs are."""
    field, _, reason = str(error).partition(": ")
    if field not in ("base_model", "model_path"):
        return error
    if isinstance(error, NotFoundError) or "is not served here" in reason:
        return NotFoundError(f"model: {reason}")
    return InvalidRequestError(f"model: {reason}")


def _check_length(texts: Iterator[str] | Sequence[str], named: Named, field: str) -> None:
    limit = named.base.max_context_length
    most = CHARACTERS_OF_A_POSITION * limit
    if (characters := sum(map(len, texts))) > most:
        raise ContextOverflowError(
            f"{field}: {characters} characters cannot fit the context of {limit} tokens; at most {most} are taken",
            prompt_tokens=-(-characters // CHARACTERS_OF_A_POSITION),
            limit=limit,
        )
