"""One request of a recorded session: its prompt continues what was sampled before, and what it samples is kept."""

import time
from array import array
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from fastapi import Request, Response
from tinker_local.backend.control.life_cycle import ControlPlane
from tinker_local.backend.control.recorded_content import Content, arguments_of, content_of, difference, head_of, key_of
from tinker_local.backend.control.recorded_sessions import Json, KnownTurn, RecordedSession
from tinker_local.backend.control.sample_prompts import Prompt
from tinker_local.backend.hosting.completions import Answer, Drawing, Named
from tinker_local.backend.hosting.event_stream import WholeAnswer, begun, unless_left
from tinker_local.backend.http.access import caller_of
from tinker_local.backend.rendering.continued import Item, Rendering, continued, input_of, picture_name
from tinker_local.backend.rendering.rendered_input import ReadPrompt
from tinker_local.backend.rendering.text import ChatMessage
from tinker_local.backend.rendering.tools import OfferedTools, Reply, ReplyForm, ReplyPiece, ReplyReader
from tinker_local.backend.threads import DISK, ENCODING, RENDERING
from tinker_local.types import ImageAssetPointerChunk, ImageChunk, InvalidRequestError, SampleOutput, SamplingParams
from tinker_local.types.requests_and_results import StopReason

RETRY = "x-stainless-retry-count"
"""The header in which OpenAI's and Anthropic's clients say how often they have sent a request before."""


class Messages(Protocol):
    """A request's conversation."""

    def as_chat(self) -> Sequence[ChatMessage]:
        """Its messages as templates take them."""


@dataclass(slots=True)
class _Sequence:
    """What was sampled for one choice."""

    tokens: "array[int]" = field(default_factory=lambda: array("i"))
    logprobs: "array[float]" = field(default_factory=lambda: array("d"))
    reason: StopReason | None = None


@dataclass(slots=True)
class _Said:
    """What the client is given of one reply: its text and its calls."""

    text: str = ""
    calls: dict[int, dict[str, str]] = field(default_factory=dict)

    def add(self, piece: ReplyPiece) -> None:
        self.text += piece.text
        for call in piece.calls:
            known = self.calls.setdefault(call.index, {"id": "", "name": "", "arguments": ""})
            known["id"] = call.id or known["id"]
            known["name"] = call.name or known["name"]
            known["arguments"] += call.arguments


class _HeardReader:
    """A reader whose pieces are kept, since the ids of calls are made in it."""

    def __init__(self, reader: ReplyReader, said: _Said) -> None:
        self._reader = reader
        self._said = said

    def add(self, text: str, tokens: Sequence[int], *, last: bool, cut: bool = False) -> ReplyPiece:
        """See `ReplyReader`."""
        piece = self._reader.add(text, tokens, last=last, cut=cut)
        self._said.add(piece)
        return piece


@dataclass(slots=True, eq=False)
class Recording:
    """`prompt`: what is sampled from. Call `form_of`, then `end` or `streamed`, or `abandon`."""

    backend: ControlPlane
    session: RecordedSession
    named: Named
    prompt: Prompt
    head: str
    contents: Sequence[Content]
    keys: tuple[str, ...]
    prefill: Content | None
    parent: KnownTurn | None
    branch: Json | None
    repeats: bool
    params: SamplingParams
    stops: Sequence[str]
    stop_ids: Sequence[int]
    forced: bool = False
    begun: float = field(default_factory=time.time)
    _form: ReplyForm | None = None
    _said: list[_Said] = field(default_factory=list)
    _sampled: dict[int, _Sequence] = field(default_factory=dict)
    _done: bool = False
    _prompt_read: ReadPrompt | None = None

    def form_of(self, form: ReplyForm | None, grammar: object) -> ReplyForm | None:
        """`form`, with readers that this hears. `grammar`: of an answer without tools."""
        self.forced = (grammar if form is None else form.grammar) is not None
        if form is None:
            return None

        def reader() -> ReplyReader:
            self._said.append(_Said())
            return _HeardReader(form.reader(), self._said[-1])

        self._form = replace(form, reader=reader)
        return self._form

    def _hear(self, drawings: Sequence[Drawing]) -> None:
        for drawing in drawings:
            sequence = self._sampled.setdefault(drawing.tokens.sample, _Sequence())
            sequence.tokens.extend(drawing.tokens.tokens)
            sequence.logprobs.extend(drawing.tokens.logprobs)
            sequence.reason = drawing.tokens.stop_reason or sequence.reason

    async def end(self, answer: Answer, outputs: Sequence[SampleOutput]) -> None:
        """Keep the turns of a whole answer, before the client has it: its next request may come at once."""
        self._prompt_read = answer.read[0]
        for index, sequence in enumerate(outputs[0].sequences):
            logprobs = [] if sequence.logprobs is None else sequence.logprobs.tolist()
            self._sampled[index] = _Sequence(
                array("i", sequence.tokens.tolist()), array("d", logprobs), sequence.stop_reason
            )
        await self._write()

    async def streamed(self, events: AsyncIterator[bytes], answer: Answer) -> AsyncIterator[bytes]:
        """`events`, the last of which waits until the turns are kept."""
        held: bytes | None = None
        answer.heard = self._hear
        try:
            async for each in events:
                if held is not None:
                    yield held
                    held = None
                if all(operation.done for operation in answer.operations):
                    held = each
                else:
                    yield each
            self._prompt_read = answer.read.get(0)
            await self._write()
        finally:
            if not self._done:
                await self.abandon()
        if held is not None:
            yield held

    async def abandon(self) -> None:
        """The client has left, or sampling failed, before the end: no reply was given."""
        if not self._done:
            self._sampled = {0: _Sequence()}
            await self._write(abandoned=True)

    async def _write(self, abandoned: bool = False) -> None:
        self._done = True
        lines: list[Json] = []
        if self.repeats:
            parents, asked = self.session.parents(), (self.head, self.keys)
            lines += [
                {"abandoned": known.turn}
                for known in self.session.turns.values()
                if (known.head, known.keys) == asked
                and known.turn not in parents
                and known.turn not in self.session.abandoned
            ]
        first, self.session.next_turn = self.session.next_turn, self.session.next_turn + len(self._sampled)
        for at, sequence in enumerate(self._sampled.values()):
            lines.append(await RENDERING.run(self._line, first + at, at, sequence, abandoned))
        pictures = {
            picture_name(chunk): chunk.data for chunk in self.prompt.model_input.chunks if isinstance(chunk, ImageChunk)
        }
        await self.backend.recorded.write(self.session, lines, pictures)

    def _line(self, turn: int, at: int, sequence: _Sequence, abandoned: bool) -> Json:
        said = self._said[at] if self._form is not None and at < len(self._said) else self._read(sequence)
        before = [] if self.prefill is None else self.prefill["parts"]
        text = "".join(part for part in before if isinstance(part, str)) + said.text
        message: Content = {"role": "assistant", "parts": [text] if text else []}
        if said.calls:
            message["calls"] = [
                {"id": call["id"], "name": call["name"], "arguments": arguments_of(call["arguments"])}
                for call in said.calls.values()
            ]
        logprobs = np.asarray(sequence.logprobs, np.float32)
        known = 0 if self.parent is None else len(self.parent.keys) + 1
        record = self.named.session.record
        return {
            "turn": turn,
            "parent": None if self.parent is None else self.parent.turn,
            "branch": self.branch,
            "model": self.named.name,
            "base_model": self.named.base.names[0],
            "version": record.model_path,
            "prompt": self._chunks(),
            "tokens": sequence.tokens.tolist(),
            "logprobs": [float(value) for value in logprobs],
            "forced": np.flatnonzero(logprobs == 0).tolist() if self.forced else [],
            "stop_reason": "abandoned" if abandoned else sequence.reason,
            "sampling_params": self.params.model_dump(mode="json"),
            "messages": list(self.contents[known:]),
            "reply": message,
            "begun": self.begun,
            "ended": time.time(),
            "head": self.head,
            "keys": list(self.keys),
            "reply_key": key_of(message),
        }

    def _chunks(self) -> list[Json]:
        """The prompt, with the number of positions of each picture."""
        read = self._prompt_read
        lengths = iter(()) if read is None else (length for _, _, length in read.images)
        return [
            {"picture": picture_name(chunk), "format": chunk.format, "expected_tokens": next(lengths, None)}
            if isinstance(chunk, ImageChunk)
            else {"tokens": chunk.tokens.tolist()}
            for chunk in self.prompt.model_input.chunks
            if not isinstance(chunk, ImageAssetPointerChunk)  # which `recording_of` refuses
        ]

    def _read(self, sequence: _Sequence) -> _Said:
        """A reply without tools, as the client is given it."""
        tokens = sequence.tokens.tolist()
        if sequence.reason == "stop" and tokens and tokens[-1] in self.stop_ids:
            tokens = tokens[:-1]
        return _Said(Reply(self.named.text, self.stops, None).whole(tokens, sequence.reason).text)


async def answered(
    request: Request,
    answer: Answer,
    recording: Recording | None,
    stream: AsyncIterator[bytes] | None,
    whole: Callable[[Sequence[SampleOutput]], bytes],
) -> Response:
    """`stream`, or else the `whole` answer of all outputs, made in a thread. What is recorded is kept before the client
    has the end of either."""
    if stream is not None:
        stream = stream if recording is None else recording.streamed(stream, answer)
        return await begun(request, stream, answer.close)
    try:
        outputs = await unless_left(request, answer.outputs())
        content = await ENCODING.run(whole, outputs)
        if recording is not None:
            await recording.end(answer, outputs)
    except BaseException:
        answer.close()
        if recording is not None:
            await recording.abandon()
        raise
    answer.forget()
    return WholeAnswer(content, answer.close)


async def recording_of(
    request: Request,
    backend: ControlPlane,
    named: Named,
    body: Messages,
    prompt: Prompt,
    offered: OfferedTools | None,
    params: SamplingParams,
    *,
    variables: Mapping[str, Any],
    how: Mapping[str, Any],
    stops: Sequence[str],
    stop_ids: Sequence[int] = (),
) -> Recording | None:
    """The recording of a request below a session's URL; None for any other. NotFoundError, StorageFullError."""
    name = request.path_params.get("recorded")
    if name is None:
        return None
    session = await backend.recorded.get(caller_of(request).owner, name)
    session.check_room()
    if prompt.model_input.names_images:
        raise InvalidRequestError("messages: a recorded session keeps bytes of images; send them as base64")
    functions = [] if offered is None else [tool.as_function() for tool in offered.tools]
    rendering = Rendering(named.text, variables, functions, how)

    def read() -> tuple[list[ChatMessage], list[Content], str]:
        messages = [*body.as_chat()]
        head = head_of(named.base.names[0], functions, variables, how)
        return messages, [content_of(message) for message in messages], head

    messages, contents, head = await RENDERING.run(read)
    goes_on = bool(how["go_on"])
    keys = tuple(map(key_of, contents))
    spoken = len(messages) - 1 if goes_on else len(messages)
    reply = max((at for at in range(spoken) if messages[at].role == "assistant"), default=None)
    parent: KnownTurn | None = None
    branch: Json | None = None
    if reply is not None:
        parent = session.found(head, keys[: reply + 1])
        if parent is not None:
            whole = await _continued(rendering, messages, reply, session, parent, prompt)
            if whole is None:
                branch = {"turn": parent.turn, "message": reply, "differs": "template"}
                parent = None
            else:
                prompt = replace(prompt, model_input=input_of(whole))
        if parent is None and branch is None:
            branch = await DISK.run(_branch, session, head, contents, keys, reply)
    retries = request.headers.get(RETRY, "0")
    prefill = contents[-1] if goes_on else None
    contents, keys = contents[:spoken], keys[:spoken]
    return Recording(
        *(backend, session, named, prompt, head, contents, keys, prefill, parent, branch),
        *(retries.isdecimal() and int(retries) > 0, params, stops, stop_ids),
    )


async def _continued(
    rendering: Rendering,
    messages: Sequence[ChatMessage],
    reply: int,
    session: RecordedSession,
    parent: KnownTurn,
    fresh: Prompt,
) -> list[Item] | None:
    line = await DISK.run(session.read, parent)
    pictures = {picture_name(each): each for each in fresh.model_input.chunks if isinstance(each, ImageChunk)}

    def make() -> list[Item] | None:
        before: list[Item] = []
        for chunk in line["prompt"]:
            before += chunk["tokens"] if "tokens" in chunk else [pictures[chunk["picture"]]]
        keep = session.settings.keep_thoughts
        return continued(rendering, messages, reply, before, line["tokens"], even_rewritten=keep)

    return await RENDERING.run(make)


def _branch(
    session: RecordedSession, head: str, contents: Sequence[Content], keys: Sequence[str], reply: int
) -> Json | None:
    """From which turn a conversation differs, in which message and in what; None if nothing of it is known."""
    if (turn := session.replies.get(keys[reply])) is not None:
        known = session.turns[turn]
    else:  # the reply itself was changed: the turn that has most of what comes before
        turns = [each for each in list(session.turns.values()) if each.turn not in session.abandoned]
        if not turns:
            return None
        known = max(turns, key=lambda each: (_shared((*each.keys, each.reply), keys), each.turn))
        if not _shared((*known.keys, known.reply), keys):
            return None
    at = _shared((*known.keys, known.reply), keys)
    if at == min(len(known.keys) + 1, len(keys)):
        if at == len(known.keys) + 1 and known.head != head:
            return {"turn": known.turn, "message": None, "differs": "tools or template variables"}
        return {"turn": known.turn, "message": at, "differs": "number of messages"}
    before = _contents(session, known)[at]
    return {"turn": known.turn, "message": at, "differs": difference(before, contents[at])}


def _contents(session: RecordedSession, known: KnownTurn) -> list[Content]:
    """All messages of a turn, with its reply."""
    line = session.read(known)
    before = [] if known.parent is None else _contents(session, session.turns[known.parent])
    return [*before, *line["messages"], line["reply"]]


def _shared(one: Sequence[str], other: Sequence[str]) -> int:
    """How many messages two conversations begin with in common."""
    return next(
        (at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), min(len(one), len(other))
    )
