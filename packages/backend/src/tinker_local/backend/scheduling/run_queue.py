"""The queue of one training run: its commands in order, which of them are prepared, and how many may be queued.

Order (`CommandLog`):

1. Commands run in `seq_id` order, from 1. A `seq_id` that was taken again is the same command (the caller dedupes).
2. A gap (a `seq_id` that never came) is skipped at once when a command arrives that is not a forward/backward and has a
   higher id: the SDK sends it only after it has submitted or given up everything before. The chunks of one
   forward/backward arrive as 2, 3, ..., 1, so a gap below a forward/backward waits, but at most `patience` seconds.
3. A skipped id is closed: `accepts` is false for it.
4. A skipped gap, like a failed forward/backward, poisons the gradient: the next optimizer step must fail.
   A forward/backward that its client sent after it had read the failure starts a new gradient, and ends that.
5. An id that was refused for now (there was no room) will be sent again: no higher command skips it before
   `REFUSED_PATIENCE` seconds after its last refusal.

Gradients (`RunQueue`): the SDK sends a large forward/backward as several requests, and nothing says which belong
together. So a failure discards the whole gradient since the last optimizer step, and says so. What was sent before the
failure was read computes no gradient any more, since the client meant it together with what failed.

Room (`Bounds`):

1. A submit beyond a bound is refused, and the client sends it again after a while, with the same `seq_id`. (The SDK
   does: HTTP 429 with Retry-After.) Only its first refusal time is stored, so the queue waits for it like a late chunk.
2. It is refused only while its training run has something that can run without it. So a bound cannot lock a run: what
   is needed to continue (the first of several chunks, which the SDK sends last; a lower `seq_id` than one that was
   taken) is always taken, and the queue of one client never keeps another's run from running.
3. A submit is not refused for longer than `PATIENCE`. The SDK gives up after five minutes of refusals, and its training
   client does not survive that; a queue of long requests may be full for longer.
4. What can never fit (a single forward_backward of more bytes than the bound of all together) fails, in its place.
"""

import asyncio
import heapq
import logging
import math
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from tinker_local.backend.rendering.rendered_input import rendered_bytes
from tinker_local.backend.scheduling.fairness import gradient_cost
from tinker_local.backend.scheduling.operations import Operation, as_api_error, reworded
from tinker_local.backend.scheduling.quotas import Quotas
from tinker_local.backend.training.trainer import TrainDatum, TrainResult, TrainWork
from tinker_local.types import ApiError, ForwardBackwardOutput, TooManyRequestsError

log = logging.getLogger(__name__)
C = TypeVar("C")


GAP_PATIENCE = 360.0
"""Seconds to wait for a missing chunk: the SDK retries a submit for five minutes."""


REFUSED_PATIENCE = 60.0
"""Seconds to wait for a refused id to be sent again: the longest pause of the SDK between two is half of it."""


MOST_REFUSED = 4096
"""Refused ids to remember; a refused client sends a few chunks at once and then waits."""


FAILURE_PAUSE, LONGEST_PAUSE = 0.5, 3.0
"""Seconds without another forward/backward of a run, and at most, before the failure of one is answered: what its
client had sent with it arrives meanwhile, and is not taken for a reaction to the failure."""


OPTIM_STEP_COST, COPY_COST = 128, 1024
"""Costs in positions through forward and backward: milliseconds on a GPU that trains about ten thousand positions a
second. An optimizer step updates an adapter; the others copy one between device and host."""


@dataclass(slots=True)
class Refusals:
    """When one id was refused, first and last."""

    first: float
    last: float


class CommandLog(Generic[C]):
    """The commands of one training run that have not run yet, in order."""

    def __init__(self, patience: float = GAP_PATIENCE) -> None:
        self.next_seq_id = 1
        self._entries: dict[int, C] = {}
        self._refused: dict[int, Refusals] = {}
        self._skip_to = 1
        self._patience = patience
        self._gap_since: float | None = None
        self._poisoned: str | None = None
        self._poisoned_in: float = 0

    def __len__(self) -> int:
        """Commands not taken yet."""
        return len(self._entries)

    def accepts(self, seq_id: int) -> bool:
        """Whether a new command with this id can still run; false if the run has passed it."""
        return seq_id >= self.next_seq_id and seq_id not in self._entries

    def add(self, seq_id: int, command: C, *, chunk: bool, now: float) -> None:
        """Take a command that `accepts` accepted. `chunk`: a forward/backward, below which gaps may still fill."""
        self._entries[seq_id] = command
        self._refused.pop(seq_id, None)
        if not chunk:
            self._skip_to = max(self._skip_to, seq_id)
        self._look_for_gap(now)

    def head(self, now: float) -> C | None:
        """The next command in order, skipping gaps that the rules say to skip; None if there is none yet."""
        if not self._entries:
            return None
        if self.next_seq_id not in self._entries:
            overdue = self._gap_since is not None and now - self._gap_since >= self._patience
            if not self._skipped(now) and not overdue:
                return None
            first = min(self._entries)
            missing = f"{self.next_seq_id}" if first == self.next_seq_id + 1 else f"{self.next_seq_id} to {first - 1}"
            self.poison(f"the request with seq_id {missing} never arrived")
            self.next_seq_id = first
            self._gap_since = None
            self._refused = {seq_id: times for seq_id, times in self._refused.items() if seq_id >= first}
        return self._entries[self.next_seq_id]

    def first(self) -> C | None:
        """The next command in order, if it is there; gaps are not skipped."""
        return self._entries.get(self.next_seq_id)

    def can_run(self, now: float) -> bool:
        """Whether there is a command that does not wait for another to arrive."""
        return bool(self._entries) and (self.next_seq_id in self._entries or self._skipped(now))

    def refuse(self, seq_id: int, now: float) -> None:
        """Note that a command was refused for now, and will be sent again."""
        if (times := self._refused.get(seq_id)) is not None:
            times.last = now
        elif len(self._refused) < MOST_REFUSED:
            self._refused[seq_id] = Refusals(now, now)

    def refused_since(self, seq_id: int) -> float | None:
        """When a command that was not taken yet was first refused; None if it never was."""
        times = self._refused.get(seq_id)
        return None if times is None else times.first

    def pop(self, now: float) -> None:
        """Remove the head, which runs now."""
        del self._entries[self.next_seq_id]
        self.next_seq_id += 1
        self._look_for_gap(now)

    def deadline(self) -> float | None:
        """When a gap at the front is to be skipped, or None if there is none."""
        if self._gap_since is None:
            return None
        deadline = self._gap_since + self._patience
        first = min(self._entries)
        return min(deadline, self._refused_until(first)) if first <= self._skip_to else deadline

    def after(self, seq_id: int) -> list[C]:
        """Commands with a higher id that have not been taken."""
        return [command for other, command in self._entries.items() if other > seq_id]

    def pending(self) -> list[C]:
        """Commands that have not been taken, in order."""
        return [self._entries[seq_id] for seq_id in sorted(self._entries)]

    def poison(self, reason: str, era: float = math.inf) -> None:
        """The gradient accumulated since the last step is not what the client expects: the next step must fail, unless
        a forward/backward of a later `era` comes before."""
        self._poisoned_in = era if self._poisoned is None else max(self._poisoned_in, era)
        self._poisoned = self._poisoned or reason

    @property
    def poisoned(self) -> bool:
        return self._poisoned is not None

    def start_anew(self, era: int) -> None:
        """A forward/backward of this era is next: forget failures of earlier ones."""
        if self._poisoned_in < era:
            self._poisoned = None

    def take_poisoned(self) -> str | None:
        """Why the gradient is poisoned, if it is; the next window starts clean."""
        reason, self._poisoned = self._poisoned, None
        return reason

    def is_closed_by_step(self, seq_id: int) -> bool:
        """Whether a command that is not a forward/backward has come with a higher id."""
        return self._skip_to > seq_id

    def _skipped(self, now: float) -> bool:
        """Whether to skip the gap at the front."""
        first = min(self._entries)
        return first <= self._skip_to and self._refused_until(first) <= now

    def _refused_until(self, first: int) -> float:
        """When the wait for refused ids below `first` ends."""
        last = (times.last for seq_id, times in self._refused.items() if seq_id < first)
        return max((when + REFUSED_PATIENCE for when in last), default=-math.inf)

    def _look_for_gap(self, now: float) -> None:
        if self._entries and self.next_seq_id not in self._entries:
            if self._gap_since is None:
                self._gap_since = now
        else:
            self._gap_since = None


@dataclass(slots=True, eq=False)
class GradientCommand:
    """A forward or forward/backward.

    Attributes
    ----------
    prepare: decodes, renders and checks the data off the event loop. Called once, when it is this command's turn, and
        then dropped with the request.
    size: bytes of the request, held until it has run.
    prepared: the task of `prepare`, once it has started.
    positions, rendered: of the data, image positions included, and bytes of their images; 0 until they are known.
    ready_at: when it was prepared.
    ran: called on the event loop with what the trainer did, when that has succeeded. What it returns, if anything,
        gives the result; else that is what the trainer gave.
    began: when its request began to arrive; None: when it is added.
    era: how many failures its client had read by then.
    queue: where it was added.
    """

    operation: Operation[ForwardBackwardOutput]
    prepare: Callable[[], Coroutine[Any, Any, TrainWork]] | None
    size: int = 0
    ran: Callable[[TrainWork, TrainResult, int], Awaitable[ForwardBackwardOutput] | None] = lambda *_: None
    prepared: asyncio.Task[TrainWork] | None = None
    positions: int = 0
    rendered: int = 0
    ready_at: float = 0.0
    began: float | None = None
    era: int = 0
    queue: "RunQueue" = field(init=False)

    @property
    def ready(self) -> bool:
        """Whether it is prepared, possibly with an error."""
        return self.prepared is not None and self.prepared.done()

    @property
    def error(self) -> BaseException | None:
        """Why it could not be prepared; call only if `ready`."""
        assert self.prepared is not None
        return None if self.prepared.cancelled() else self.prepared.exception()

    @property
    def work(self) -> TrainWork:
        """What the trainer takes; only if `ready` and without `error`."""
        assert self.prepared is not None
        return self.prepared.result()

    @property
    def cost(self) -> int:
        """In positions through forward and backward; only if `ready` and without `error`."""
        return gradient_cost(self.positions, backward=self.work.backward)


@dataclass(slots=True, eq=False)
class StepCommand:
    """Any other command of a run: runs alone, in order. `run` sets the result of the operation."""

    operation: Operation[Any]
    run: Callable[[], Awaitable[None]]
    size: int = 0
    queue: "RunQueue" = field(init=False)

    @property
    def positions(self) -> int:
        return 0

    @property
    def cost(self) -> int:
        return OPTIM_STEP_COST if self.operation.kind == "optim_step" else COPY_COST


Command = GradientCommand | StepCommand


def positions(data: Sequence[TrainDatum]) -> int:
    """Tokens of `data`, image positions included."""
    return sum(datum.input.length for datum in data)


class Load(NamedTuple):
    """Queued commands and the bytes of their requests."""

    commands: int = 0
    size: int = 0


def total(loads: Iterable[Load]) -> Load:
    """The sum."""
    commands = size = 0
    for load in loads:
        commands += load.commands
        size += load.size
    return Load(commands, size)


@dataclass(slots=True, eq=False)
class RunQueue:
    """The commands of one training run.

    Attributes
    ----------
    now: the event loop's clock.
    released: its adapter exists, so its commands may run.
    ended_at, absence: when its last command ended, and how long after that its last gradient was ready, in seconds.
    ready, ahead, rendered: prepared gradients that were not taken yet, their positions, and bytes of their images.
    gradients: forward/backwards in the gradient that the trainer holds and no optimizer step has used.
    void: the trainer holds a gradient that must be discarded before it adds another one.
    on_discarded: called when that has been done.
    """

    model_id: str
    session_id: str
    owner: str
    commands: CommandLog[Command]
    now: Callable[[], float]
    released: bool = False
    closed: bool = False
    ended_at: float = 0.0
    absence: float = 0.0
    ready: int = 0
    ahead: int = 0
    rendered: int = 0
    gradients: int = 0
    void: bool = False
    on_discarded: Callable[[], None] = lambda: None
    failure_pause: float = FAILURE_PAUSE
    _failures_read: list[float] = field(default_factory=list)
    _failed_at: float = 0.0
    _added_at: float = 0.0
    _arrival: asyncio.Event = field(default_factory=asyncio.Event)
    _bytes: int = 0
    _preparing: int = 0
    _unprepared: list[tuple[int, GradientCommand]] = field(default_factory=list)

    @property
    def runs(self) -> bool:
        return self.released and not self.closed

    @property
    def load(self) -> Load:
        """What is queued."""
        return Load(len(self.commands), self._bytes)

    def add(self, seq_id: int, command: Command) -> None:
        """Queue a command whose id the log accepts."""
        self.commands.add(seq_id, command, chunk=isinstance(command, GradientCommand), now=self.now())
        command.queue = self
        self._bytes += command.size
        if isinstance(command, GradientCommand):
            heapq.heappush(self._unprepared, (seq_id, command))
            self._added_at = self.now()
            command.era = bisect_right(self._failures_read, self._added_at if command.began is None else command.began)
            # The first of several requests arrives last, and they were sent together.
            later = self.commands.after(seq_id)
            command.era = min([command.era, *(each.era for each in later if isinstance(each, GradientCommand))])
        self._arrival.set()
        self._arrival = asyncio.Event()

    def close(self, reason: ApiError) -> None:
        """Fail what is queued."""
        self.closed = True
        for command in self.commands.pending():
            command.operation.fail(reason)
            if isinstance(command, GradientCommand) and command.prepared is not None:
                command.prepared.cancel()

    # Running, as `fairness.Member` -----------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        return len(self.commands) == 0

    def offer(self) -> Command | None:
        """The command at the head, if it is ready. One that could not be prepared fails here, in its place."""
        while self.runs and (command := self.commands.head(self.now())) is not None:
            if isinstance(command, StepCommand):
                return command
            if not command.ready:
                return None
            if (error := command.error) is None:
                return command
            self.take()
            if not isinstance(error, ApiError):
                log.error("%s failed", command.operation.request_id, exc_info=error)
            self.fail(command, as_api_error(error))
        return None

    def take(self) -> Command:
        command = self.commands.head(self.now())
        assert command is not None
        self.commands.pop(self.now())
        self._bytes -= command.size
        if isinstance(command, GradientCommand) and command.positions:
            self.absence = max(0.0, command.ready_at - self.ended_at)
            self.ready -= 1
            self.ahead -= command.positions
            self.rendered -= command.rendered
        return command

    # Gradients -------------------------------------------------------------------------------------------------------

    @property
    def gradient(self) -> bool:
        """Whether the trainer holds a gradient that no optimizer step has used."""
        return self.gradients > 0

    def work_of(self, command: GradientCommand) -> TrainWork:
        """What the trainer is to do for `command`, which is next: without its gradient if that would be discarded."""
        if command.operation.kind == "forward_backward":
            self.commands.start_anew(command.era)
            if self.commands.poisoned:
                return replace(command.work, backward=False)
        return command.work

    def added(self, work: TrainWork) -> None:
        """The trainer has added the gradient of `work`."""
        if work.backward and self.commands.poisoned:  # by another one in the same call
            self.void = True
        elif work.backward:
            self.gradients += 1

    def fail(self, command: GradientCommand, error: ApiError) -> None:
        """Fail a gradient; if it was to be accumulated, the gradient since the last step is discarded, and the next
        step fails too unless another one starts anew."""
        if command.operation.kind == "forward_backward":
            self.commands.start_anew(command.era)
            self.commands.poison(f"{command.operation.request_id} failed: {error}", command.era)
            error = reworded(error, f"{error}; {self._discarded()}")
            self._failed_at = self.now()
            # A result is kept for long: it holds nothing of the command, and so of what was sent.
            command.operation.on_failure_read = partial(self._failure_read, command.era)
        command.operation.fail(error)

    def _discarded(self) -> str:
        """Discard the gradient; what became of it, for a message."""
        count, self.gradients = self.gradients, 0
        left = "no gradient is left since the last optimizer step"
        if not count:
            return left
        self.void = True
        requests = "1 earlier forward_backward request" if count == 1 else f"{count} earlier forward_backward requests"
        return f"{left}: that of {requests} was discarded too, send all of it again"

    def forget_gradient(self) -> None:
        """The trainer has no gradient any more: an optimizer step used it, or it was discarded."""
        self.gradients, self.void = 0, False
        self.on_discarded()

    async def pause_before_failure(self, seq_id: int) -> None:
        """Wait until what a client sent together with forward/backward `seq_id`, which has failed, is probably here."""
        while not self.commands.is_closed_by_step(seq_id) and not self.closed:
            quiet = min(max(self._failed_at, self._added_at) + self.failure_pause, self._failed_at + LONGEST_PAUSE)
            if (rest := quiet - self.now()) <= 0:
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(rest):
                    await self._arrival.wait()

    def _failure_read(self, era: int) -> None:
        """The client has read the failure of a forward/backward of `era`. What it sends from now on is meant with that
        in mind."""
        if era == len(self._failures_read):
            self._failures_read.append(self.now())

    # Preparing -------------------------------------------------------------------------------------------------------

    @property
    def first_unprepared(self) -> bool:
        """Whether the next command in order is a gradient that is to be prepared."""
        return bool(self._unprepared) and not self.closed and self._unprepared[0][0] <= self.commands.next_seq_id

    @property
    def first_prepared(self) -> bool:
        """Whether the next command in order is a gradient that is prepared, with images."""
        command = self.commands.first()
        return isinstance(command, GradientCommand) and command.ready and command.rendered > 0

    def next_unprepared(self, ahead: int) -> bool:
        """Whether to prepare a gradient now: the first in order, and then one at a time (their positions are unknown
        before), until one more is ready than the next call of `ahead` positions takes."""
        if not self._unprepared or self.closed:
            return False
        return self.first_unprepared or (self._preparing == 0 and (self.ready < 2 or self.ahead <= ahead))

    def prepare(self) -> asyncio.Task[TrainWork]:
        """Start to prepare the first unprepared gradient."""
        _, command = heapq.heappop(self._unprepared)
        make, command.prepare = command.prepare, None
        assert make is not None

        async def prepare() -> TrainWork:
            work = await make()
            command.positions, command.ready_at = positions(work.data), self.now()
            command.rendered = rendered_bytes(datum.input for datum in work.data)
            self.ready += 1
            self.ahead += command.positions
            self.rendered += command.rendered
            return work

        def done(task: asyncio.Task[TrainWork]) -> None:
            self._preparing -= 1

        self._preparing += 1
        command.prepared = asyncio.create_task(prepare())
        command.prepared.add_done_callback(done)
        return command.prepared


# Room -----------------------------------------------------------------------------------------------------------------


PATIENCE = 120.0
"""Seconds after its first refusal at which a submit is taken whatever the bounds; well below the SDK's 300."""


SHORTEST_RETRY, LONGEST_RETRY = 0.5, 4.0
"""Seconds after which a refused submit is to be sent again: half the time that it has been refused for."""


class Queued(Protocol):
    """A queue as the bounds see it."""

    @property
    def session_id(self) -> str: ...

    @property
    def owner(self) -> str: ...

    @property
    def commands(self) -> CommandLog[Any]: ...

    @property
    def load(self) -> Load: ...

    @property
    def now(self) -> Callable[[], float]: ...


@dataclass(frozen=True, slots=True)
class Bounds:
    """The most that may be queued, for a session, for an owner and for all together."""

    quotas: Quotas

    def check(self, queue: Queued, queues: Iterable[Queued], seq_id: int, size: int) -> None:
        """TooManyRequestsError if a command of `size` bytes is refused for now; `queues`: of all training runs."""
        now = queue.now()
        if not queue.commands.can_run(now):
            return
        reason = self._exceeded(queue, list(queues), size)
        since = queue.commands.refused_since(seq_id)
        waited = 0.0 if since is None else now - since
        if reason is not None and waited < PATIENCE:
            queue.commands.refuse(seq_id, now)
            raise TooManyRequestsError(reason, retry_after=retry_after(waited))

    def too_large(self, queue: Queued, seq_id: int, size: int) -> str | None:
        """Why a gradient of `size` bytes could never run behind what its queue holds; None if it can."""
        waiting = 0 if seq_id == queue.commands.next_seq_id or queue.commands.can_run(queue.now()) else queue.load.size
        most = self.quotas.all.queued_bytes
        if waiting + size <= most:
            return None
        behind = f" behind {waiting} bytes of the model that cannot run yet" if waiting else ""
        return f"{size} bytes{behind} exceed the {most} bytes that the server queues; send fewer datums at once"

    def _exceeded(self, queue: Queued, queues: Sequence[Queued], size: int) -> str | None:
        """The bound that a command of `size` bytes would exceed, in words; None if none."""
        of_levels = (
            [other for other in queues if other.session_id == queue.session_id],
            [other for other in queues if other.owner == queue.owner],
            queues,
        )
        for (whose, most), those in zip(self.quotas.levels(queue.owner), of_levels, strict=True):
            load = total(other.load for other in those)
            if load.commands + 1 > most.queued_requests:
                return f"{load.commands} training requests of {whose} are queued, the most is {most.queued_requests}"
            if load.size + size > most.queued_bytes:
                return (
                    f"training requests of {load.size} bytes of {whose} are queued, with this one of {size} bytes "
                    f"they would exceed the most, {most.queued_bytes} bytes"
                )
        return None


def retry_after(waited: float) -> float:
    """Seconds until a submit that has been refused for `waited` seconds is to be sent again."""
    return min(LONGEST_RETRY, max(SHORTEST_RETRY, waited / 2))
