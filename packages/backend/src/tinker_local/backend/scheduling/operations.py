"""Operations: what was submitted, when it was in which stage, and results that clients may still read."""

import asyncio
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, ParamSpec, TypeVar

from tinker_local.types import ApiError, InternalError, InvalidRequestError
from tinker_local.types.errors import Category

log = logging.getLogger(__name__)

T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R")

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


Stage = Literal["waiting", "fetching", "preparing", "running", "finishing", "reading", "writing", "loading"]
"""`waiting`: for others, for a thread, or for a place on the device. `fetching`: images that a prompt names.
`preparing`: decoding, rendering and checking. `running`: in the trainer, or in the sampler from when a first sequence
has its place there. `finishing`: results become public types. `reading`, `writing`: a checkpoint. `loading`: a version
into the sampler, and seeing that it is right."""

LONGEST_ERROR = 500
"""Characters of an error that are kept."""

clock = time.monotonic_ns


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

    def note(self, **facts: int) -> None:
        """Add to `facts`."""
        self.facts = facts if self.facts is None else {**self.facts, **facts}

    def end(self, error: ApiError | None = None) -> None:
        """End it; of an error only the text is kept."""
        self.outcome = "ok" if error is None else error.category
        if error is not None:
            self.error = str(error)[:LONGEST_ERROR].encode("utf-8", "replace").decode("utf-8")
        self.ended = clock()  # last, as a trace may be written meanwhile


class Operation(Generic[T]):
    """One submitted operation. Await it for its result; cancelling one waiter does not affect others.

    Attributes
    ----------
    request_id: what a client polls with.
    sequence_ids: of a sample, one per requested sequence.
    failures: counts errors by category; None until the base model is known.
    timeline: when it was in which stage.
    """

    def __init__(self, request_id: str, kind: OperationKind, sequence_ids: tuple[str, ...] = ()) -> None:
        self.request_id = request_id
        self.kind = kind
        self.sequence_ids = sequence_ids
        self.finished_at: float | None = None
        self.failures: Counter[Category] | None = None
        self.timeline = Timeline(request_id, kind)
        self._future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def __await__(self) -> Generator[Any, None, T]:
        return asyncio.shield(self._future).__await__()

    @property
    def done(self) -> bool:
        return self._future.done()

    @property
    def failed(self) -> bool:
        """Whether it ended with an error."""
        return self._future.done() and self._future.exception() is not None

    def when_done(self, note: Callable[["Operation[T]"], None]) -> None:
        """Call `note` on the event loop when the operation has ended, or soon if it has."""
        self._future.add_done_callback(lambda _: note(self))

    def succeed(self, result: T) -> None:
        """Set the result; a no-op on an operation that is done."""
        if not self._future.done():
            self.finished_at = time.monotonic()
            self.timeline.end()
            self._future.set_result(result)
            self._wake.set()

    def fail(self, error: ApiError) -> None:
        """Set the error; a no-op on an operation that is done."""
        if not self._future.done():
            self.finished_at = time.monotonic()
            self.timeline.end(error)
            self._future.set_exception(error)
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


def as_api_error(error: BaseException) -> ApiError:
    """`error` itself if it is meant for clients, else an InternalError that names its type."""
    if isinstance(error, ApiError):
        return error
    return InternalError(f"{type(error).__name__}: {error}")


class Operations:
    """All operations by request id. A result can be read for `retention` seconds.

    `record` gets the timeline of each operation whose base model is known.
    """

    def __init__(self, retention: float, record: Callable[[Timeline], None] = lambda _: None) -> None:
        self._retention = retention
        self._record = record
        self._by_id: OrderedDict[str, Operation[Any]] = OrderedDict()

    def add(self, operation: Operation[Any]) -> None:
        self._by_id[operation.request_id] = operation
        if operation.failures is not None:
            self._record(operation.timeline)

    def get(self, request_id: str) -> Operation[Any] | None:
        return self._by_id.get(request_id)

    def repeated(self, request_id: str, kind: OperationKind) -> Operation[Any] | None:
        """The operation that a client submits again; InvalidRequestError if its id belongs to another kind."""
        known = self._by_id.get(request_id)
        if known is not None and known.kind != kind:
            raise InvalidRequestError(f"seq_id: {request_id} is a {known.kind} already, it cannot be a {kind}")
        return known

    def forget(self, request_id: str) -> None:
        """Drop the result of a finished operation; ignores others and unknown ids."""
        operation = self._by_id.get(request_id)
        if operation is not None and operation.done:
            self._by_id.pop(request_id)

    def unfinished(self) -> list[Operation[Any]]:
        return [operation for operation in self._by_id.values() if not operation.done]

    def forget_old(self) -> None:
        """Drop the results whose retention has ended."""
        limit = time.monotonic() - self._retention
        old = [o.request_id for o in self._by_id.values() if o.finished_at is not None and o.finished_at < limit]
        for request_id in old:
            del self._by_id[request_id]

    def __len__(self) -> int:
        return len(self._by_id)
