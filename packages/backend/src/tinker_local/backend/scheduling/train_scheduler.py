"""Which model's commands run next on a trainer: in order within a model, co-batched and in turn across models."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tinker_local.backend.scheduling.command_log import CommandLog
from tinker_local.backend.scheduling.operations import Operation, as_api_error
from tinker_local.backend.training.interface import TrainDatum, Trainer, TrainResult, TrainWork
from tinker_local.types import ApiError, ForwardBackwardOutput, GoneError, TensorData

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(slots=True, eq=False)
class GradientCommand:
    """A forward or forward/backward. `prepared` is a task that decodes, renders and checks the data off the loop."""

    operation: Operation[ForwardBackwardOutput]
    prepared: asyncio.Task[TrainWork]


@dataclass(slots=True, eq=False)
class StepCommand:
    """Anything else of a model's sequence: runs alone, in order. `run` gives the operation its result."""

    operation: Operation[Any]
    run: Callable[[], Awaitable[None]]


Command = GradientCommand | StepCommand


@dataclass(slots=True, eq=False)
class ModelQueue:
    """One model's place in the scheduler. `released`: its adapter is there, so that its commands may run."""

    model_id: str
    commands: CommandLog[Command] = field(default_factory=CommandLog)
    released: bool = False
    closed: bool = False

    @property
    def runs(self) -> bool:
        return self.released and not self.closed


def positions(data: Sequence[TrainDatum]) -> int:
    """Tokens of `data`, image positions included."""
    return sum(datum.input.length for datum in data)


class TrainScheduler:
    """Runs the commands of all models of one trainer, in a thread that only this trainer uses.

    A round first runs, for every model in turn, the commands at its head that are not gradients; then it takes
    gradients from the heads of all models, in turn, up to `batch_tokens` positions, and runs them in one call.
    It sleeps on an event: nothing polls.

    `trained_tokens`: positions of the forward/backwards that succeeded so far. `commands_running`: in the trainer now.
    """

    def __init__(self, trainer: Trainer, *, batch_tokens: int) -> None:
        self._trainer = trainer
        self._batch_tokens = batch_tokens
        self.trained_tokens = 0
        self.commands_running = 0
        self._queues: dict[str, ModelQueue] = {}
        self._wake = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="trainer")
        self._timer: asyncio.TimerHandle | None = None
        self._deliveries: set[asyncio.Task[None]] = set()
        self._task = asyncio.create_task(self._run(), name="train-scheduler")

    @property
    def commands_waiting(self) -> int:
        """Commands of all models that have not been taken to run."""
        return sum(len(queue.commands) for queue in self._queues.values())

    @property
    def adapters(self) -> int:
        """Models whose adapter is there."""
        return sum(queue.runs for queue in self._queues.values())

    async def call(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run a trainer's method in the trainer's thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: function(*args, **kwargs))

    def open(self, model_id: str) -> ModelQueue:
        """A queue for a new model; what is submitted to it waits until `release`."""
        queue = self._queues[model_id] = ModelQueue(model_id)
        return queue

    def release(self, queue: ModelQueue) -> None:
        """The model has been created: run its commands."""
        queue.released = True
        self._wake.set()

    async def close_model(self, queue: ModelQueue, reason: str) -> None:
        """Fail what the model has queued and forget it."""
        queue.closed = True
        if self._queues.get(queue.model_id) is queue:
            del self._queues[queue.model_id]
        for command in queue.commands.pending():
            command.operation.fail(GoneError(reason))
            if isinstance(command, GradientCommand):
                command.prepared.cancel()

    def submit(self, queue: ModelQueue, seq_id: int, command: Command) -> None:
        """Queue a command whose id the queue's log accepts."""
        queue.commands.add(seq_id, command, chunk=isinstance(command, GradientCommand), now=time.monotonic())
        if isinstance(command, GradientCommand):
            command.prepared.add_done_callback(self._prepared)
        self._wake.set()

    def _prepared(self, task: asyncio.Task[TrainWork]) -> None:
        if not task.cancelled():
            task.exception()  # a closed model's failure is asked for by nobody
        self._wake.set()

    async def close(self) -> None:
        """Stop; what is queued stays unfinished."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        if self._timer is not None:
            self._timer.cancel()
        await asyncio.to_thread(self._thread.shutdown, wait=True)

    # One round ------------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            try:
                while await self._round():
                    pass
            except Exception:
                log.exception("the scheduler met an error that no operation caught")
                self._wake.set()  # there may be more to run
                await asyncio.sleep(0.01)
            self._arm_hole_timer()

    async def _round(self) -> bool:
        """Run what can run now; whether there was anything."""
        ran = False
        for queue in list(self._queues.values()):
            while (command := self._head(queue)) is not None and isinstance(command, StepCommand):
                queue.commands.pop(time.monotonic())
                ran = True
                await self._run_step(command)
        batch = self._take_gradients()
        if batch:
            await self._run_gradients(batch)
        return ran or bool(batch)

    def _head(self, queue: ModelQueue) -> Command | None:
        return queue.commands.head(time.monotonic()) if queue.runs else None

    async def _run_step(self, command: StepCommand) -> None:
        self.commands_running = 1
        try:
            await command.run()
        except Exception as error:
            if not isinstance(error, ApiError):
                log.exception("%s failed", command.operation.request_id)
            command.operation.fail(as_api_error(error))
        finally:
            self.commands_running = 0

    def _take_gradients(self) -> list[tuple[ModelQueue, GradientCommand, TrainWork]]:
        """Ready gradients from the heads of all models, one of each in turn, up to the budget (at least one)."""
        batch: list[tuple[ModelQueue, GradientCommand, TrainWork]] = []
        budget = self._batch_tokens
        rotation = list(self._queues.values())
        while rotation and budget > 0:
            still: list[ModelQueue] = []
            for queue in rotation:
                work = self._take_gradient(queue)
                if work is None:
                    continue
                still.append(queue)
                batch.append((queue, *work))
                budget -= positions(work[1].data)
                if budget <= 0:
                    break
            rotation = still
        if batch:  # whoever was served first is served last the next time
            first = batch[0][0]
            if first.model_id in self._queues:
                self._queues[first.model_id] = self._queues.pop(first.model_id)
        return batch

    def _take_gradient(self, queue: ModelQueue) -> tuple[GradientCommand, TrainWork] | None:
        while (command := self._head(queue)) is not None and isinstance(command, GradientCommand):
            if not command.prepared.done():
                return None
            queue.commands.pop(time.monotonic())
            if command.prepared.cancelled():
                continue
            error = command.prepared.exception()
            if error is None:
                return command, command.prepared.result()
            if not isinstance(error, ApiError):
                log.error("%s failed", command.operation.request_id, exc_info=error)
            self._fail_gradient(queue, command, as_api_error(error))
        return None

    @staticmethod
    def _fail_gradient(queue: ModelQueue, command: GradientCommand, error: ApiError) -> None:
        if command.operation.kind == "forward_backward":
            queue.commands.spoil(f"{command.operation.request_id} failed: {error}")
        command.operation.fail(error)

    async def _run_gradients(self, batch: list[tuple[ModelQueue, GradientCommand, TrainWork]]) -> None:
        works = [work for _, _, work in batch]
        results: Sequence[TrainResult | ApiError]
        self.commands_running = len(batch)
        try:
            results = await self.call(self._trainer.forward_backward, works)
            if len(results) != len(works):
                raise RuntimeError(f"the trainer gave {len(results)} results for {len(works)} requests")
        except Exception as error:
            log.exception("a batch of %d requests failed", len(works))
            results = [as_api_error(error)] * len(works)
        finally:
            self.commands_running = 0
        for (queue, command, work), result in zip(batch, results, strict=True):
            if isinstance(result, ApiError):
                self._fail_gradient(queue, command, result)
            else:
                self.trained_tokens += positions(work.data) if work.backward else 0
                task = asyncio.create_task(self._deliver(queue, command, result))
                self._deliveries.add(task)
                task.add_done_callback(self._deliveries.discard)

    async def _deliver(self, queue: ModelQueue, command: GradientCommand, result: TrainResult) -> None:
        """Turn a result into public types in a thread (a thousand datums take a while); the trainer goes on."""
        try:
            command.operation.succeed(await asyncio.to_thread(to_output, result))
        except Exception as error:
            log.exception("%s failed", command.operation.request_id)
            self._fail_gradient(queue, command, as_api_error(error))

    def _arm_hole_timer(self) -> None:
        """Wake up when the patience with a missing chunk ends."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadlines = [d for q in self._queues.values() if q.runs and (d := q.commands.deadline()) is not None]
        if deadlines:
            delay = max(0.0, min(deadlines) - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(delay, self._wake.set)


def to_output(result: TrainResult) -> ForwardBackwardOutput:
    """The trainer's arrays as public types; nothing is copied."""
    return ForwardBackwardOutput(
        loss_fn_outputs=tuple(
            {name: TensorData.from_numpy(array) for name, array in output.items()} for output in result.outputs
        ),
        metrics=dict(result.metrics),
    )
