"""Clients, models and a trainer around the real scheduler, in virtual time: who sent what, and what ran when."""

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from tinker_local.backend.options import BackendOptions
from tinker_local.backend.scheduling.fairness import gradient_cost
from tinker_local.backend.scheduling.memory_sharing import MemorySharing
from tinker_local.backend.scheduling.operations import Operation, OperationKind
from tinker_local.backend.scheduling.quotas import Quotas
from tinker_local.backend.scheduling.run_queue import COPY_COST, Bounds, GradientCommand, Load, RunQueue, StepCommand
from tinker_local.backend.scheduling.train_scheduler import LONGEST_WAIT, TrainScheduler
from tinker_local.backend.storage.records import LOCAL_OWNER
from tinker_local.backend.training.trainer import TrainResult, TrainWork
from tinker_local.types import ApiError, GoneError, InvalidRequestError, TooManyRequestsError

from tests.scheduling.virtual_time import VirtualLoop


def bounds_of(all: Load, session: Load) -> Bounds:
    """Bounds of all sessions and of each."""
    return Bounds(
        Quotas(
            BackendOptions(
                max_queued_requests=all.commands,
                max_queued_bytes=all.size,
                max_queued_requests_per_session=session.commands,
                max_queued_bytes_per_session=session.size,
            )
        )
    )


UNBOUNDED = bounds_of(Load(10**9, 10**15), Load(10**9, 10**15))


@dataclass(slots=True, eq=False)
class Sent:
    """One accepted command. `cost` as fairness counts it; times in virtual seconds, None as long as it did not happen.
    `ran_after`: the cost of everything that ran before it; `ready_after`: the same when it could have run first."""

    model: "Model"
    seq_id: int
    kind: OperationKind
    positions: int
    operation: Operation[Any]
    ran_at: float | None = None
    ran_after: int = 0
    ready_after: int | None = None

    @property
    def cost(self) -> int:
        if self.positions:
            return gradient_cost(self.positions, backward=self.kind == "forward_backward")
        return 128 if self.kind == "optim_step" else COPY_COST


@dataclass(slots=True, eq=False)
class Model:
    queue: RunQueue
    sent: dict[int, Sent] = field(default_factory=dict)
    next_id: int = 1

    def ids(self, count: int) -> range:
        """The next `count` ids."""
        self.next_id += count
        return range(self.next_id - count, self.next_id)


class World:
    """A scheduler with a trainer that takes `seconds_per_position` and `seconds_per_call`.

    `ran`: every command in the order in which it was taken to run. `batches`: the gradients of each call.
    """

    def __init__(
        self,
        loop: VirtualLoop,
        *,
        batch_tokens: int = 4096,
        quantum: int = 512,
        bounds: Bounds = UNBOUNDED,
        prepare_seconds: Callable[[], float] = lambda: 0.0,
        seconds_per_position: float = 1e-4,
        seconds_per_call: float = 0.03,
    ) -> None:
        self.loop, self.bounds, self.batch_tokens, self.quantum = loop, bounds, batch_tokens, quantum
        self._prepare_seconds = prepare_seconds
        self._per_position, self._per_call = seconds_per_position, seconds_per_call
        self.scheduler = TrainScheduler(MemorySharing(self), batch_tokens=batch_tokens, quantum=quantum)  # type: ignore[arg-type]
        self.models: list[Model] = []
        self.ran: list[Sent] = []
        self.batches: list[list[Sent]] = []
        self.refused = 0
        self.spent = 0
        self._idle_since: float | None = None
        loop.before_jump = self._nothing_that_could_run_waits

    # Models and commands ---------------------------------------------------------------------------------------------

    def open(
        self, session_id: str, *, gap_patience: float = 360.0, released: bool = True, owner: str = LOCAL_OWNER
    ) -> Model:
        """A model; one that is not `released` waits until everything begins to run, a second after `finish`."""
        model = Model(self.scheduler.open(f"{session_id}:{len(self.models)}", session_id, gap_patience, owner))
        if released:
            self.scheduler.release(model.queue)
        self.models.append(model)
        return model

    def submit(
        self, model: Model, seq_id: int, kind: OperationKind, positions: int = 0, *, bad: bool = False
    ) -> Sent | None:
        """As `TrainingRuns` does: TooManyRequestsError beyond the bounds; None if the id has been gone past or the
        model is closed."""
        assert seq_id not in model.sent
        if model.queue.closed or not model.queue.commands.accepts(seq_id):
            return None
        self.bounds.check(model.queue, [other.queue for other in self.models], seq_id, positions)
        sent = Sent(model, seq_id, kind, positions, Operation(f"{model.queue.model_id}:{seq_id}", kind))
        if positions:
            command: Any = GradientCommand(sent.operation, lambda: self._prepare(sent, bad), positions)
        else:
            command = StepCommand(sent.operation, lambda: self._step(sent))
        model.sent[seq_id] = sent
        self.scheduler.submit(model.queue, seq_id, command)
        return sent

    async def send(self, model: Model, seq_id: int, kind: OperationKind, positions: int = 0, **how: Any) -> Sent | None:
        """`submit` as the SDK does: again after a pause, with the same id, as long as it is refused."""
        while True:
            try:
                return self.submit(model, seq_id, kind, positions, **how)
            except TooManyRequestsError as error:
                self.refused += 1
                pause = error.retry_after
            assert pause is not None
            await asyncio.sleep(pause)

    async def close(self, model: Model) -> None:
        await self.scheduler.close_run(model.queue, GoneError("closed"))

    async def finish(self, *clients: Coroutine[Any, Any, Any]) -> None:
        """Until all clients are done, and whatever they sent; then stop."""
        await asyncio.gather(*clients)
        if not all(model.queue.released for model in self.models):
            await asyncio.sleep(1)
            for model in self.models:
                self.scheduler.release(model.queue)
        for model in self.models:
            for sent in model.sent.values():
                await asyncio.wait([asyncio.ensure_future(outcome(sent.operation))])
        await self.scheduler.close()

    # What the scheduler calls ----------------------------------------------------------------------------------------

    async def _prepare(self, sent: Sent, bad: bool) -> TrainWork:
        await asyncio.sleep(self._prepare_seconds())
        if bad:
            raise InvalidRequestError("data[0]: bad")
        data: Any = [SimpleNamespace(input=SimpleNamespace(length=sent.positions, images=()))]
        return TrainWork(sent, data, "cross_entropy", backward=sent.kind == "forward_backward")  # type: ignore[arg-type]

    async def _step(self, sent: Sent) -> None:
        self._note(sent)

        def run() -> None:
            self.loop.took = 0.005

        await self.scheduler.call(run)
        if sent.kind == "optim_step" and (reason := sent.model.queue.commands.take_poisoned()) is not None:
            raise InvalidRequestError(reason)
        sent.operation.succeed(None)

    def discard_gradients(self, adapter_id: str) -> None:
        self.loop.took = 0.001

    def forward_backward(self, works: Sequence[Any]) -> list[TrainResult | ApiError]:
        self.batches.append([work.adapter_id for work in works])
        for work in works:
            self._note(work.adapter_id)
        self.loop.took = self._per_call + self._per_position * sum(sent.positions for sent in self.batches[-1])
        return [TrainResult([], {}) for _ in works]

    def _note(self, sent: Sent) -> None:
        assert sent.ran_at is None, "it runs twice"
        sent.ran_at, sent.ran_after = self.loop.time(), self.spent
        self.spent += sent.cost
        self.ran.append(sent)

    def _nothing_that_could_run_waits(self) -> None:
        """Before time passes: the trainer works, or no model has anything that could run (work conservation), but for
        the moment that a call may wait for company."""
        now, waits = self.loop.time(), False
        for model in self.models:
            head = model.queue.commands.head(now) if model.queue.runs else None
            if head is None or (isinstance(head, GradientCommand) and not head.ready):
                continue
            waits = True
            sent = model.sent[int(head.operation.request_id.rpartition(":")[2])]
            if sent.ready_after is None:
                sent.ready_after = self.spent
        if self.loop.busy or not waits:
            self._idle_since = None
        else:
            self._idle_since = now if self._idle_since is None else self._idle_since
            assert now - self._idle_since < 2 * LONGEST_WAIT, "somebody could run, and the trainer is idle"
            assert self.batches, "no client can be expected back"


async def outcome(operation: Operation[Any]) -> ApiError | None:
    """The error of an operation that ended with one."""
    try:
        await operation
    except ApiError as error:
        return error
    return None


async def group(world: World, model: Model, rng: random.Random, largest: int) -> list[Sent | None]:
    """One forward_backward (or forward) of one to four chunks, sent as the SDK sends them: 2, 3, ..., 1. Once in a
    while a chunk never arrives, or is bad."""
    ids = model.ids(rng.choice([1, 1, 1, 2, 4]))
    kind: OperationKind = "forward" if rng.random() < 0.1 else "forward_backward"

    async def chunk(seq_id: int) -> Sent | None:
        await asyncio.sleep(rng.random() * 0.02)
        if rng.random() < 0.02:
            return None
        return await world.send(model, seq_id, kind, rng.randint(1, largest), bad=rng.random() < 0.03)

    rest = await asyncio.gather(*(chunk(seq_id) for seq_id in ids[1:]))
    return [await chunk(ids[0]), *rest]


async def pipelined(world: World, model: Model, rng: random.Random, *, steps: int, largest: int) -> None:
    """Submits everything without waiting for results."""
    for _ in range(steps):
        for _ in range(rng.choice([1, 1, 2])):
            await group(world, model, rng, largest)
        await world.send(model, model.ids(1)[0], rng.choice(["optim_step", "optim_step", "save_weights"]))
        await asyncio.sleep(rng.choice([0, 0, 0, 0.5 * rng.random()]))


async def lock_step(world: World, model: Model, rng: random.Random, *, steps: int, largest: int) -> None:
    """Waits for each result before it sends the next request."""
    for _ in range(steps):
        await asyncio.sleep(0.05 * rng.random())
        for sent in await group(world, model, rng, largest):
            if sent is not None:
                await outcome(sent.operation)
        if (sent := await world.send(model, model.ids(1)[0], "optim_step")) is not None:
            await outcome(sent.operation)
