"""Operations: what was submitted, its stages in time, what it waits for, and results that clients may still read."""

import asyncio
import logging
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, Generic, Literal, ParamSpec, TypeVar, cast

from tinker_local.backend.sampling.sampler import EngineTimes
from tinker_local.backend.scheduling.result_memory import HeldResult, KeptResults, ResultMemory
from tinker_local.backend.threads import DISK, ENCODING
from tinker_local.types import ApiError, GoneError, InternalError, InvalidRequestError
from tinker_local.types.errors import Category

log = logging.getLogger(__name__)

T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R")


def model_id_in(session_id: str, model_seq_id: int) -> str:
    """The id of a training run and of its model. The SDK computes the same id."""
    return f"{session_id}:train:{model_seq_id}"


def sampling_id_in(session_id: str, seq_id: int) -> str:
    """The id of a sampling session."""
    return f"{session_id}:sample:{seq_id}"


def request_id_of(owner: str, seq_id: int | str) -> str:
    """The request id of operation `seq_id` of a model or sampling session."""
    return f"{owner}:{seq_id}"


def sequence_ids(request_id: str, count: int) -> list[str]:
    """The ids of the sequences of a sample."""
    return [f"{request_id}:{index}" for index in range(count)]


def owner_of(request_id: str) -> str:
    """The model or sampling session that a request id belongs to."""
    return request_id.rpartition(":")[0]


def session_of(owner: str) -> str:
    """The session that a model or sampling session belongs to."""
    return owner.rsplit(":", 2)[0]


OperationKind = Literal[
    "create_model",
    "load_weights",
    "forward_backward",
    "forward",
    "optim_step",
    "save_weights",
    "save_weights_for_sampler",
    "save_weights_external",
    "sample",
]


Stage = Literal[
    "waiting",
    "fetching",
    "preparing",
    "waking",
    "queued",
    "running",
    "prefill",
    "decode",
    "finishing",
    "reading",
    "writing",
    "loading",
]
"""`waiting`: for others, for a thread, or for a place in the sampler. `fetching`: images that a prompt names.
`preparing`: decoding, rendering and checking. `waking`: until the sampler has its memory back. `queued`: in the
sampler, until the first sequence has its place on the device. `running`: in the trainer, or in the sampler from then
on; when a sample has ended, `prefill` and `decode` instead, before and after the first token. `finishing`: results
become public types. `reading`, `writing`: a checkpoint. `loading`: a version into the sampler, and seeing that it is
right."""

WAITING: frozenset[Stage] = frozenset({"waiting", "waking", "queued"})
RUNNING: frozenset[Stage] = frozenset({"running", "prefill", "decode"})


LONGEST_ERROR = 500
"""Characters of an error that are kept."""


clock = time.monotonic_ns

NANO = 10**9
"""Nanoseconds of a second."""

LEAST = 0.001
"""Seconds. A part of the time within the sampler that takes less does not become a stage."""


@dataclass(slots=True, eq=False)
class Timeline:
    """One operation in time; every time is of `clock`, nanoseconds.

    Attributes
    ----------
    stages: each stage and when it began; it ends when the next begins, the last one with the operation.
    ended: 0 as long as it has not.
    outcome: `ok`, or the category of the error.
    facts: counts that are known of it: datums, tokens, images, ...
    """

    request_id: str
    kind: str
    stages: list[tuple[Stage, int]] = field(default_factory=lambda: [("waiting", clock())])
    ended: int = 0
    outcome: str = ""
    error: str = ""
    facts: dict[str, int] | None = None

    def enter(self, stage: Stage) -> None:
        """Enter `stage` now; from any thread, one at a time."""
        self.stages.append((stage, clock()))

    def during(self, stage: Stage, function: Callable[P, R]) -> Callable[P, R]:
        """Wrap `function`, which runs in a thread: the operation is in `stage` meanwhile and waits afterwards."""

        def called(*args: P.args, **kwargs: P.kwargs) -> R:
            self.enter(stage)
            try:
                return function(*args, **kwargs)
            finally:
                self.enter("waiting")

        return called

    def sampled(self, times: EngineTimes) -> None:
        """Tell apart what was within the sampler, from when the sample was `queued` there."""
        names = [stage for stage, _ in self.stages]
        if "queued" not in names or "running" not in names[names.index("queued") :]:
            return
        handed = names.index("queued")
        begun = names.index("running", handed)
        (_, at), (_, runs) = self.stages[handed], self.stages[begun]
        found: list[tuple[Stage, int]] = []
        parts: tuple[tuple[Stage, float], ...] = (("waking", times.waking), ("loading", times.loading))
        for stage, seconds in parts:
            if seconds >= LEAST:
                found.append((stage, at))
                at = min(at + round(seconds * NANO), runs)
        found += [("queued", at), ("prefill", runs), ("decode", min(runs + round(times.prefill * NANO), clock()))]
        self.stages = [*self.stages[:handed], *found, *self.stages[begun + 1 :]]
        self.note(preemptions=times.preemptions, replica=times.replica)

    def seconds_to(self, stage: Stage) -> float | None:
        """From the begin to that of `stage`; None if it was not entered."""
        return next(((at - self.stages[0][1]) / NANO for name, at in self.stages if name == stage), None)

    def note(self, **facts: int) -> None:
        """Add to `facts`."""
        self.facts = facts if self.facts is None else {**self.facts, **facts}

    def end(self, error: ApiError | None = None) -> None:
        """End it; of an error only the text is kept."""
        self.outcome = "ok" if error is None else error.category
        if error is not None:
            self.error = str(error)[:LONGEST_ERROR].encode("utf-8", "replace").decode("utf-8")
        self.ended = clock()  # last, as a trace may be written meanwhile


def stages(timeline: Timeline, ended: int) -> Iterator[tuple[Stage, int, int]]:
    """Each stage that took time, with its begin and end; the end is 0 if it has not ended."""
    begun = list(timeline.stages)
    if ended:  # a thread may continue after a cancellation
        begun = [(stage, min(at, ended)) for stage, at in begun]
    for (stage, at), (_, until) in pairwise(begun):
        if until > at:
            yield stage, at, until
    stage, at = begun[-1]
    if not ended or ended > at:
        yield stage, at, ended


@dataclass(frozen=True, slots=True)
class WireForm(Generic[T]):
    """How a result becomes the bytes that a client reads, and a result again. Called in threads."""

    encode: Callable[[T], bytes]
    decode: Callable[[bytes], T]


class Operation(Generic[T]):
    """One submitted operation. Await it for its result; cancelling one waiter does not affect others.

    Attributes
    ----------
    request_id: what a client polls with.
    owner: who owns its session; empty if that is unknown.
    num_sequences: of a sample, how many were requested.
    failures: counts errors by category; None until the base model is known.
    timeline: when it was in which stage.
    size: bytes of its result, if they are many.
    form: of its result, if that is more than a few names and numbers.
    file: where the encoded result is, if it is not in memory.
    on_failure_read: called whenever a client reads the error that it ended with.
    """

    def __init__(self, request_id: str, kind: OperationKind, num_sequences: int = 0) -> None:
        self.request_id = request_id
        self.kind = kind
        self.owner = ""
        self.num_sequences = num_sequences
        self.finished_at: float | None = None
        self.failures: Counter[Category] | None = None
        self.timeline = Timeline(request_id, kind)
        self.size = 0
        self.form: WireForm[T] | None = None
        self.file: Path | None = None
        self.on_failure_read: Callable[[], None] = lambda: None
        self._result: T | None = None
        self._future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def __await__(self) -> Generator[Any, None, T]:
        return self._read().__await__()

    async def _read(self) -> T:
        await self._end()
        if self.file is None:
            return cast(T, self._result)
        assert self.form is not None
        return await ENCODING.run(self.form.decode, await self.encoded())

    async def encoded(self) -> bytes:
        """Wait for the result, as the bytes of its `form`."""
        await self._end()
        if self.file is not None:
            return await DISK.run(self.file.read_bytes)
        assert self.form is not None
        return await ENCODING.run(self.form.encode, cast(T, self._result))

    async def _end(self) -> None:
        try:
            await asyncio.shield(self._future)
        except ApiError:
            self.on_failure_read()
            raise

    def put_into(self, file: Path) -> None:
        """Free the memory of the result, which is in `file`."""
        self.file = file
        self._result = None

    @property
    def sequence_ids(self) -> list[str]:
        """Of a sample: the id of each sequence."""
        return sequence_ids(self.request_id, self.num_sequences)

    @property
    def done(self) -> bool:
        return self._future.done()

    @property
    def error(self) -> BaseException | None:
        """What it ended with, if that is an error."""
        return self._future.exception() if self._future.done() else None

    @property
    def failed(self) -> bool:
        """Whether it ended with an error."""
        return self.error is not None

    def when_done(self, note: Callable[["Operation[T]"], None]) -> None:
        """Call `note` on the event loop when the operation has ended, or soon if it has."""
        self._future.add_done_callback(lambda _: note(self))

    def succeed(self, result: T, size: int = 0, form: WireForm[T] | None = None) -> None:
        """Set the result, of `size` bytes; a no-op on an operation that is done."""
        if not self._future.done():
            self._result, self.size, self.form = result, size, form
            self.finished_at = time.monotonic()
            self.timeline.end()
            self._future.set_result(None)
            self._wake.set()

    def fail(self, error: ApiError) -> None:
        """Set the error; a no-op on an operation that is done."""
        if not self._future.done():
            self.finished_at = time.monotonic()
            self.timeline.end(error)
            self._future.set_exception(without_frames(error))
            self._future.exception()  # mark it as retrieved
            if self.failures is not None:
                self.failures[error.category] += 1
            self._wake.set()

    def fail_from(self, error: Exception) -> None:
        """`fail` with what a client may see of `error`; logs an unexpected one."""
        if not isinstance(error, ApiError):
            log.error("%s failed", self.request_id, exc_info=error)
        self.fail(as_api_error(error))

    def run_as(self, task: asyncio.Task[None]) -> None:
        """Set the task that `cancel` stops."""
        self._task = task

    def cancel(self, reason: ApiError) -> None:
        """Fail the operation and stop the task that works on it."""
        self.fail(reason)
        if self._task is not None:
            self._task.cancel()

    async def wait(self, timeout: float) -> bool:
        """Wait until it is done, at most `timeout` seconds and not after `stop_waiting`; whether it is done."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._wake.wait()
        return self._future.done()

    def stop_waiting(self) -> None:
        """End every `wait`, whether the operation is done or not."""
        self._wake.set()


def without_frames(error: ApiError) -> ApiError:
    """`error` without where it was raised and from what: these hold what was sent, up to half a gigabyte, and an error
    is kept for as long as a result."""
    error.__traceback__ = error.__cause__ = error.__context__ = None
    return error


def reworded(error: ApiError, message: str) -> ApiError:
    """`error` with another message."""
    found = type(error).__new__(type(error), message)
    found.__dict__.update(error.__dict__)
    return found


def as_api_error(error: BaseException) -> ApiError:
    """`error` itself if it is meant for clients, else an InternalError that names its type."""
    if isinstance(error, ApiError):
        return error
    return InternalError(f"{type(error).__name__}: {error}")


OPERATION_BYTES = 4096
"""Counted for an operation, besides its result."""

OBJECT_BYTES = 2048
"""Counted for a sequence or a tensor of a result, besides the values."""

LARGE_BYTES = 8192
"""Smaller results are not worth a file."""


class Operations:
    """All operations by request id. A result can be read for `retention` seconds, and again, because the SDK asks once
    more if its connection breaks.

    Results of at most `session_bytes` are kept for a session, and of `all_bytes` for all. Beyond that a new one drops
    older ones of its session; or of the session that has most, of the owner that has most. Large ones are in `memory`.
    `recorder` keeps the timeline of each operation whose base model is known.
    """

    def __init__(self, retention: float, session_bytes: float, all_bytes: float, memory: ResultMemory) -> None:
        self._retention = retention
        self._session_bytes, self._all_bytes = session_bytes, all_bytes
        self.memory = memory
        self.recorder = TraceRecorder()
        self.on_end: Callable[[Operation[Any]], None] = lambda operation: None
        """Called with each operation that has ended."""
        self.kept_bytes = 0
        self._by_id: OrderedDict[str, Operation[Any]] = OrderedDict()
        self._kept: dict[str, KeptResults] = {}

    def add(self, operation: Operation[Any]) -> None:
        self._by_id[operation.request_id] = operation
        operation.when_done(self._keep)
        if operation.failures is not None:
            self.recorder.record(operation.timeline)

    def get(self, request_id: str) -> Operation[Any] | None:
        return self._by_id.get(request_id)

    def _keep(self, operation: Operation[Any]) -> None:
        """Count the result of an operation that has ended, and drop older results if all together are too large."""
        self.on_end(operation)
        if self._by_id.get(operation.request_id) is not operation:
            return
        own = self._kept.setdefault(session_of(owner_of(operation.request_id)), KeptResults(operation.owner))
        own.unread[operation.request_id] = size = OPERATION_BYTES + operation.size
        own.size += size
        self.kept_bytes += size
        if operation.form is not None and operation.size >= LARGE_BYTES:
            held = HeldResult(operation.size, operation.encoded, operation.put_into)
            self.memory.add(operation.request_id, held)
        while own.size > self._session_bytes and own.oldest() != operation.request_id:
            self._drop(own.oldest())
        while self.kept_bytes > self._all_bytes and len(self._by_id) > 1:
            self._drop(self._largest().oldest())

    def _largest(self) -> KeptResults:
        """What the session has that has most, of the owner that has most."""
        of_owners: Counter[str] = Counter()
        for kept in self._kept.values():
            of_owners[kept.owner] += kept.size
        owner = max(of_owners, key=of_owners.__getitem__)
        return max((kept for kept in self._kept.values() if kept.owner == owner), key=lambda kept: kept.size)

    def was_read(self, operation: Operation[Any]) -> None:
        """A client got the result: it is dropped before those that were not read."""
        own = self._kept.get(session_of(owner_of(operation.request_id)))
        if own is not None and (size := own.unread.pop(operation.request_id, None)) is not None:
            own.read[operation.request_id] = size

    def _drop(self, request_id: str) -> None:
        """Forget an operation that has ended."""
        del self._by_id[request_id]
        self.memory.remove(request_id)
        session_id = session_of(owner_of(request_id))
        if (own := self._kept.get(session_id)) is not None:
            size = own.unread.pop(request_id, 0) + own.read.pop(request_id, 0)
            own.size -= size
            self.kept_bytes -= size
            if not own.size:
                del self._kept[session_id]

    def repeated(self, request_id: str, kind: OperationKind) -> Operation[Any] | None:
        """The operation that a client submits again; InvalidRequestError if its id belongs to another kind."""
        known = self._by_id.get(request_id)
        if known is not None and known.kind != kind:
            raise InvalidRequestError(f"seq_id: {request_id} is a {known.kind} already, it cannot be a {kind}")
        return known

    def cancel(self, request_id: str) -> None:
        """Stop a sample and free what it holds; ignores unknown ids and finished operations."""
        operation = self._by_id.get(request_id)
        if operation is not None and operation.kind == "sample":
            operation.cancel(GoneError("the request was cancelled"))

    def forget(self, request_id: str) -> None:
        """Drop the result of a finished operation; ignores others and unknown ids."""
        operation = self._by_id.get(request_id)
        if operation is not None and operation.done:
            self._drop(request_id)

    def unfinished(self) -> list[Operation[Any]]:
        return [operation for operation in self._by_id.values() if not operation.done]

    def forget_old(self) -> None:
        """Drop the results whose retention has ended."""
        limit = time.monotonic() - self._retention
        old = [o.request_id for o in self._by_id.values() if o.finished_at is not None and o.finished_at < limit]
        for request_id in old:
            self._drop(request_id)

    def __len__(self) -> int:
        return len(self._by_id)


# The timelines of a session -------------------------------------------------------------------------------------------


MOST_TIMELINES = 65536
"""Timelines kept for all sessions together: about 64 MiB, at a kilobyte each (up to three with a long error)."""

MOST_OF_A_SESSION = MOST_TIMELINES // 4
"""Timelines kept for one session, so that a busy one does not drop all of the others'."""


@dataclass(slots=True, eq=False)
class SessionTimelines:
    """The newest requests of one session, in the order of their arrival.

    `since`: when the first of them arrived, dropped ones included. `recorded`: how many have arrived since then.
    """

    timelines: deque[Timeline] = field(default_factory=deque)
    since: datetime = field(default_factory=lambda: datetime.now(UTC))
    recorded: int = 0

    @property
    def dropped(self) -> int:
        """How many of the oldest have been dropped."""
        return self.recorded - len(self.timelines)


class TraceRecorder:
    """Keeps the newest `MOST_OF_A_SESSION` timelines of each session and the newest `MOST_TIMELINES` of all.

    Beyond that, each new one drops the oldest of its session, or of all.
    """

    def __init__(self) -> None:
        self._sessions: dict[str, SessionTimelines] = {}
        self._arrivals: OrderedDict[int, Timeline] = OrderedDict()  # by `id`, the oldest first

    def record(self, timeline: Timeline) -> None:
        """Keep a timeline that has just begun; its request id begins with the id of an existing session."""
        session_id = session_of(owner_of(timeline.request_id))
        session = self._sessions.get(session_id)
        if session is None:
            session = self._sessions[session_id] = SessionTimelines()
        session.timelines.append(timeline)
        session.recorded += 1
        self._arrivals[id(timeline)] = timeline
        if len(session.timelines) > MOST_OF_A_SESSION:
            self._drop_oldest(session_id)
        elif len(self._arrivals) > MOST_TIMELINES:
            self._drop_oldest(session_of(owner_of(next(iter(self._arrivals.values())).request_id)))

    def _drop_oldest(self, session_id: str) -> None:
        session = self._sessions[session_id]
        del self._arrivals[id(session.timelines.popleft())]
        if not session.timelines:
            del self._sessions[session_id]

    def of(self, session_id: str) -> SessionTimelines | None:
        """The timelines of a session; None if there are none."""
        return self._sessions.get(session_id)

    def __len__(self) -> int:
        """The number of timelines of all sessions."""
        return len(self._arrivals)


# What an operation waits for ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class QueueState:
    """The wire's two fields; `reason` is what the SDK shows its user."""

    state: Literal["active", "paused_capacity"]
    reason: str | None = None


ACTIVE = QueueState("active")


def training_state(session_id: str, running: Collection[str], queued: Iterable[tuple[str, int]]) -> QueueState:
    """The state of a command of `session_id` that has not run.

    `running`: the session of each command in the trainer. `queued`: sessions and how many commands they have queued.
    Sessions take turns, so not all of these come first. While its session runs another command, it is active.
    """
    if not running or session_id in running:
        return ACTIVE
    others = [session for session in running if session != session_id]
    counted = [(session, count) for session, count in queued if session != session_id and count]
    requests = len(others) + sum(count for _, count in counted)
    return paused("the trainer is busy with", requests, len({*others, *(session for session, _ in counted)}))


def memory_state(session_id: str, running: Collection[str]) -> QueueState:
    """State of a sample that waits while the trainer uses the sampler's memory."""
    others = [session for session in running if session != session_id]
    return paused("the trainer is using the sampler's memory for", len(others), len(set(others))) if others else ACTIVE


def paused(why: str, requests: int, sessions: int) -> QueueState:
    """The state of a request that waits because of so many others."""
    return QueueState(
        "paused_capacity",
        f"{why} {requests} {'request' if requests == 1 else 'requests'} of {sessions} other "
        f"{'session' if sessions == 1 else 'sessions'}",
    )
