"""The queue of one training run: its commands in order, and which of them are being prepared."""

import asyncio
import heapq
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from tinker_local.backend.scheduling.command_log import CommandLog, Load
from tinker_local.backend.scheduling.fairness import gradient_cost
from tinker_local.backend.scheduling.operations import Operation, as_api_error
from tinker_local.backend.training.trainer import TrainDatum, TrainWork
from tinker_local.types import ApiError, ForwardBackwardOutput, GoneError

log = logging.getLogger(__name__)

AT_ONCE = 4
"""Concurrent preparations: twice the number of threads, so that a thread never waits for work."""

OPTIM_STEP_COST, COPY_COST = 128, 1024
"""Costs in positions through forward and backward: milliseconds on a GPU that trains about ten thousand positions a
second. An optimizer step updates an adapter; the others copy one between device and host."""


@dataclass(slots=True, eq=False)
class GradientCommand:
    """A forward or forward/backward.

    Attributes
    ----------
    prepare: decodes, renders and checks the data off the event loop. Called once, when it is this command's turn, and
        then dropped with the request.
    size: bytes of the request, held until it has run.
    prepared: the task of `prepare`, once it has started.
    positions: of the data, image positions included; 0 until they are known.
    ready_at: when it was prepared.
    queue: where it was added.
    """

    operation: Operation[ForwardBackwardOutput]
    prepare: Callable[[], Coroutine[Any, Any, TrainWork]] | None
    size: int = 0
    prepared: asyncio.Task[TrainWork] | None = None
    positions: int = 0
    ready_at: float = 0.0
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


@dataclass(slots=True, eq=False)
class RunQueue:
    """The commands of one training run.

    Attributes
    ----------
    now: the event loop's clock.
    released: its adapter exists, so its commands may run.
    ended_at, absence: when its last command ended, and how long after that its last gradient was ready, in seconds.
    ready, ahead: prepared gradients that were not taken yet, and their positions.
    """

    model_id: str
    session_id: str
    commands: CommandLog[Command]
    now: Callable[[], float]
    released: bool = False
    closed: bool = False
    ended_at: float = 0.0
    absence: float = 0.0
    ready: int = 0
    ahead: int = 0
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

    def close(self, reason: str) -> None:
        """Fail what is queued."""
        self.closed = True
        for command in self.commands.pending():
            command.operation.fail(GoneError(reason))
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
        return command

    def fail(self, command: GradientCommand, error: ApiError) -> None:
        """Fail a gradient; if it was to be accumulated, the next optimizer step fails too."""
        if command.operation.kind == "forward_backward":
            self.commands.poison(f"{command.operation.request_id} failed: {error}")
        command.operation.fail(error)

    # Preparing -------------------------------------------------------------------------------------------------------

    def next_unprepared(self, ahead: int) -> bool:
        """Whether to prepare a gradient now: the first in order, and then one at a time (their positions are unknown
        before), until one more is ready than the next call of `ahead` positions takes."""
        if not self._unprepared or self.closed:
            return False
        first = self._unprepared[0][0] <= self.commands.next_seq_id
        return first or (self._preparing == 0 and (self.ready < 2 or self.ahead <= ahead))

    def prepare(self) -> asyncio.Task[TrainWork]:
        """Start to prepare the first unprepared gradient."""
        _, command = heapq.heappop(self._unprepared)
        make, command.prepare = command.prepare, None
        assert make is not None

        async def prepare() -> TrainWork:
            work = await make()
            command.positions, command.ready_at = positions(work.data), self.now()
            self.ready += 1
            self.ahead += command.positions
            return work

        def done(task: asyncio.Task[TrainWork]) -> None:
            self._preparing -= 1

        self._preparing += 1
        command.prepared = asyncio.create_task(prepare())
        command.prepared.add_done_callback(done)
        return command.prepared


class Preparations:
    """Starts the preparation of gradients.

    Prepared data (above all pixels) takes more memory than the request, and a client that sends much must not occupy
    the threads. So sessions take turns, and so do the runs of each. A run prepares what fits into one call of `ahead`
    positions and one gradient more, so that its session always has something to take.
    """

    def __init__(self, ahead: int) -> None:
        self._ahead = ahead
        self._under_way = 0
        self._sessions: OrderedDict[str, OrderedDict[int, RunQueue]] = OrderedDict()

    def add(self, queue: RunQueue) -> None:
        self._sessions.setdefault(queue.session_id, OrderedDict())[id(queue)] = queue

    def remove(self, queue: RunQueue) -> None:
        """Unknown queues are ignored."""
        models = self._sessions.get(queue.session_id, OrderedDict())
        if models.pop(id(queue), None) is not None and not models:
            del self._sessions[queue.session_id]

    def start(self) -> list[asyncio.Task[TrainWork]]:
        """Start as many as there is room for; call it again when one is done."""
        started = []
        while self._under_way < AT_ONCE and (queue := self._next()) is not None:
            self._under_way += 1
            started.append(queue.prepare())
            started[-1].add_done_callback(self._done)
        return started

    def _done(self, task: asyncio.Task[TrainWork]) -> None:
        self._under_way -= 1

    def _next(self) -> RunQueue | None:
        for session_id, models in self._sessions.items():
            for queue in models.values():
                if queue.next_unprepared(self._ahead):
                    models.move_to_end(id(queue))
                    self._sessions.move_to_end(session_id)
                    return queue
        return None
