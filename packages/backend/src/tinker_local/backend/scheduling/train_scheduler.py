"""Runs the commands of all training runs of one trainer: in order within a run, fair and batched across runs."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

from tinker_local.backend.process.process_group import ProcessEndedError
from tinker_local.backend.scheduling.fairness import FairQueue, gradient_of
from tinker_local.backend.scheduling.image_turns import MOST_RENDERED_BYTES
from tinker_local.backend.scheduling.memory_sharing import MemorySharing
from tinker_local.backend.scheduling.operations import (
    ACTIVE,
    OBJECT_BYTES,
    Operation,
    QueueState,
    WireForm,
    as_api_error,
    training_state,
)
from tinker_local.backend.scheduling.run_queue import (
    FAILURE_PAUSE,
    GAP_PATIENCE,
    Command,
    CommandLog,
    GradientCommand,
    RunQueue,
    StepCommand,
)
from tinker_local.backend.scheduling.shared_bytes import SharedBytes
from tinker_local.backend.storage.records import LOCAL_OWNER
from tinker_local.backend.threads import ENCODING, Ledger, acting_for
from tinker_local.backend.training.trainer import TrainResult, TrainWork
from tinker_local.types import ApiError, ForwardBackwardOutput, TensorData
from tinker_local.types.codec import decode_forward_backward_output, encode_forward_backward_output

log = logging.getLogger(__name__)
T = TypeVar("T")

WAIT_SHARE, LONGEST_WAIT = 0.25, 0.02
"""Batching window for runs expected to submit again: a share of the last call's time, and at most so many seconds.
(Eight clients of 64 tokens a step that send a step when they have the gradient's result, and calls of 50 ms: 8 instead
of 4 share a call, and make 40 % more steps.)"""


AT_ONCE, AT_ONCE_OF_AN_OWNER, AT_ONCE_OF_A_SESSION = 8, 6, 3
"""Concurrent preparations: more than threads, so that a thread never waits for work. A session whose images take long
leaves some to the others, and so does an owner."""


class TrainScheduler:
    """Runs the commands of all training runs of one trainer, by the turns of `memory_sharing`.

    A round first runs, one by one, the commands at the heads of all runs that are not gradients. Then it takes
    gradients from the heads of all runs, up to `batch_tokens` positions, and runs them in one call. `fairness` decides
    whose turn it is, with a quantum of `quantum` positions (one forward pass of a trainer on a GPU, so that a turn is
    enough work for the device). It sleeps on an event and never polls.

    Before a call it waits a moment for runs of the last call: their clients have just received results, and those that
    submit the next gradient at once should share the next call instead of alternating. It waits after the result of a
    gradient and again after that of a step, for `WAIT_SHARE` of the time of that call and at most `LONGEST_WAIT`, and
    only for runs that came back as soon the last time.

    `trained_tokens`: positions of the forward/backwards that succeeded so far. `running`: the queues whose commands are
    in the trainer now.
    """

    def __init__(self, memory_sharing: MemorySharing, *, batch_tokens: int, quantum: int) -> None:
        self._memory_sharing = memory_sharing
        self._batch_tokens = batch_tokens
        self.trained_tokens = 0
        self.running: tuple[RunQueue, ...] = ()
        self._taken: tuple[Command, ...] = ()
        self._queues: FairQueue[Command] = FairQueue(quantum)
        self._open: set[RunQueue] = set()
        self._preparations = Preparations(batch_tokens)
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._last: list[RunQueue] = []
        self._patience = 0.0
        self._wait_limit = 0.0
        self._wait_until: float | None = None
        self._deliveries: set[asyncio.Task[None]] = set()
        self._task = asyncio.create_task(self._run(), name="train-scheduler")

    @property
    def commands_running(self) -> int:
        """Commands in the trainer now."""
        return len(self.running)

    def state_of(self, queue: RunQueue, operation: Operation[Any]) -> QueueState:
        """What an operation of `queue` waits for; one that has run, and is writing for example, is active."""
        if queue.released and all(command.operation is not operation for command in queue.commands.pending()):
            return ACTIVE
        running = [other.session_id for other in self.running]
        return training_state(queue.session_id, running, [(q.session_id, len(q.commands)) for q in self._open])

    @property
    def commands_waiting(self) -> int:
        """Queued commands of all training runs."""
        return sum(len(queue.commands) for queue in self._open)

    @property
    def adapters(self) -> int:
        """Training runs whose adapter exists."""
        return sum(queue.runs for queue in self._open)

    async def call(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run a trainer's method in the trainer's thread."""
        return await self._memory_sharing.call(function, *args, **kwargs)

    def open(
        self,
        model_id: str,
        session_id: str,
        gap_patience: float = GAP_PATIENCE,
        owner: str = LOCAL_OWNER,
        failure_pause: float = FAILURE_PAUSE,
    ) -> RunQueue:
        """A queue for a new training run; its commands wait until `release`."""
        log, now = CommandLog[Command](gap_patience), self._loop.time
        queue = RunQueue(model_id, session_id, owner, log, now, failure_pause=failure_pause)
        self._open.add(queue)
        self._queues.add(queue)
        self._preparations.add(queue)
        return queue

    def release(self, queue: RunQueue) -> None:
        """The adapter exists: run its commands."""
        queue.released = True
        self._wake.set()

    def hold(self, queue: RunQueue) -> None:
        """Run no more of its commands; one that runs ends."""
        queue.released = False

    def takes_step(self, queue: RunQueue) -> bool:
        """Whether an optimizer step of the run is in the trainer now."""
        return any(command.queue is queue and command.operation.kind == "optim_step" for command in self._taken)

    async def close_run(self, queue: RunQueue, reason: ApiError) -> None:
        """Fail the queued commands and forget the run."""
        queue.close(reason)
        self._forget(queue)

    def lose_run(self, queue: RunQueue, reason: ApiError) -> None:
        """`close_run` of a run whose adapter is lost: a command in the trainer fails with `reason` too."""
        queue.close(reason)
        for command in self._taken:
            if command.queue is queue:
                command.operation.fail(reason)
        self._forget(queue)

    def _forget(self, queue: RunQueue) -> None:
        self._open.discard(queue)
        self._queues.remove(queue)
        self._preparations.remove(queue)
        self._prepare()  # others of its owner have more room

    def submit(self, queue: RunQueue, seq_id: int, command: Command) -> None:
        """Queue a command whose `seq_id` the log accepts."""
        queue.add(seq_id, command)
        self._prepare()
        self._wake.set()

    def _prepare(self) -> None:
        for task in self._preparations.start():
            task.add_done_callback(self._prepared)

    def _prepared(self, task: asyncio.Task[TrainWork]) -> None:
        if not task.cancelled():
            task.exception()  # mark it as retrieved: the run may be closed
        self._prepare()
        self._wake.set()

    async def close(self) -> None:
        """Stop; queued commands stay unfinished."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        if self._timer is not None:
            self._timer.cancel()
        await self._memory_sharing.close()

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
            self._arm_timer()

    async def _round(self) -> bool:
        """Run what can run now; returns whether there was anything."""
        ran = False
        while (taken := self._queues.take_step()) is not None:
            ran = True
            await self._run_step(taken)
        if self._waits_for_company():
            return ran
        batch = self._queues.take_batch(self._batch_tokens)
        self._prepare()  # there is room now, and a skipped gap may have made another command the first in order
        if batch:
            await self._run_gradients(batch)
        return ran or bool(batch) or self._queues.steps_wait()

    async def _run_step(self, command: Command) -> None:
        assert isinstance(command, StepCommand)
        queue = command.queue
        self.running, self._taken = (queue,), (command,)
        command.operation.timeline.enter("running")
        began = self._loop.time()
        try:
            with acting_for(queue.owner, queue.session_id):
                await command.run()
        except Exception as error:
            if isinstance(error, ProcessEndedError):
                await self._memory_sharing.settled()
            command.operation.fail_from(error)
        finally:
            self.running = self._taken = ()
            queue.ended_at = self._loop.time()
            self._wait_limit += queue.ended_at - began  # the step did not use up the window

    async def _run_gradients(self, taken: Sequence[Command]) -> None:
        batch = [command for command in taken if isinstance(command, GradientCommand)]
        works = [command.queue.work_of(command) for command in batch]
        results: Sequence[TrainResult | ApiError]
        self.running, self._taken = tuple(command.queue for command in batch), tuple(batch)
        for command in batch:
            command.operation.timeline.enter("running")
        began = self._loop.time()
        try:
            for queue in dict.fromkeys(self.running):
                if queue.void:
                    await self._memory_sharing.discard_gradients(queue.model_id)
                    queue.forget_gradient()
            results = await self._memory_sharing.forward_backward(works)
            if len(results) != len(works):
                raise RuntimeError(f"the trainer gave {len(results)} results for {len(works)} requests")
        except ProcessEndedError as error:
            await self._memory_sharing.settled()
            results = [error] * len(works)
        except Exception as error:
            log.exception("a batch of %d requests failed", len(works))
            results = [as_api_error(error)] * len(works)
        finally:
            self.running = self._taken = ()
        self._note_end(batch, began)
        for command, work, result in zip(batch, works, results, strict=True):
            if isinstance(result, ApiError):
                command.queue.fail(command, result)
            else:
                self.trained_tokens += command.positions if work.backward else 0
                with acting_for(command.queue.owner, command.queue.session_id):
                    encoded = command.ran(work, result, command.positions)
                    command.queue.added(work)
                    task = asyncio.create_task(self._deliver(command, result, encoded))
                self._deliveries.add(task)
                task.add_done_callback(self._deliveries.discard)

    def _note_end(self, batch: Sequence[GradientCommand], began: float) -> None:
        now = self._loop.time()
        self._last = [command.queue for command in batch]
        self._patience = min(LONGEST_WAIT, WAIT_SHARE * (now - began))
        self._wait_limit = now + 2 * self._patience
        for queue in self._last:
            queue.ended_at = now

    def _waits_for_company(self) -> bool:
        """Whether a run of the last call is expected to submit now; if so, the timer ends the wait."""
        expected = [q for q in self._last if q.runs and q.absence <= self._patience and gradient_of(q) is None]
        latest = max((queue.ended_at for queue in expected), default=0.0) + self._patience
        until = min(latest, self._wait_limit)
        self._wait_until = until if expected and self._loop.time() < until else None
        return self._wait_until is not None

    async def _deliver(
        self, command: GradientCommand, result: TrainResult, encoded: Awaitable[ForwardBackwardOutput] | None
    ) -> None:
        """Convert a result to public types in a thread (a thousand datums take a while) while the trainer continues.
        `encoded`: where that is under way."""
        command.operation.timeline.enter("finishing")
        try:
            size = sum(array.nbytes + OBJECT_BYTES for output in result.outputs for array in output.values())
            form = WireForm(encode_forward_backward_output, decode_forward_backward_output)
            output = await (ENCODING.run(to_output, result) if encoded is None else encoded)
            command.operation.succeed(output, size, form)
        except Exception as error:
            log.exception("%s failed", command.operation.request_id)
            command.queue.fail(command, as_api_error(error))

    def _arm_timer(self) -> None:
        """Wake up when the wait for a missing chunk, or for an expected run, ends."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadlines = [d for queue in self._open if queue.runs and (d := queue.commands.deadline()) is not None]
        if self._wait_until is not None:
            deadlines.append(self._wait_until)
        if deadlines:
            self._timer = self._loop.call_at(min(deadlines), self._wake.set)


class Preparations:
    """Starts the preparation of gradients.

    Prepared data (above all pixels) takes more memory than the request, and a client that sends much must not occupy
    the threads. So the owner for which the fewest are under way is next, its sessions take turns, and so do the runs of
    each. A run prepares what fits into one call of `ahead` positions and one gradient more, so that its session always
    has something to take.

    The images of all that is prepared take `most` bytes, shared as by `SharedBytes`, and those of what is under way. An
    owner beyond its share prepares one gradient after the other, each when no other of its runs has one to take.
    """

    def __init__(self, ahead: int, most: int = MOST_RENDERED_BYTES) -> None:
        self._ahead = ahead
        self._most = most
        self._under_way: Ledger[str] = Ledger()
        self._of_owner: Ledger[str] = Ledger()
        self._sessions: OrderedDict[str, OrderedDict[int, RunQueue]] = OrderedDict()

    def add(self, queue: RunQueue) -> None:
        self._sessions.setdefault(queue.session_id, OrderedDict())[id(queue)] = queue

    def remove(self, queue: RunQueue) -> None:
        """Unknown queues are ignored."""
        models = self._sessions.get(queue.session_id, OrderedDict())
        if models.pop(id(queue), None) is not None and not models:
            del self._sessions[queue.session_id]

    def start(self) -> list[asyncio.Task[TrainWork]]:
        """Start as many as there is room for; call it again when one is done, or was taken."""
        started = []
        while self._under_way.total() < AT_ONCE and (queue := self._next()) is not None:
            self._under_way[queue.session_id] += 1
            self._of_owner[queue.owner] += 1
            started.append(queue.prepare())
            started[-1].add_done_callback(partial(self._done, queue))
        return started

    def _done(self, queue: RunQueue, task: asyncio.Task[TrainWork]) -> None:
        self._under_way[queue.session_id] -= 1
        self._of_owner[queue.owner] -= 1

    def _next(self) -> RunQueue | None:
        over, found = self._over(), None
        for session_id, models in self._sessions.items():
            if self._under_way[session_id] >= AT_ONCE_OF_A_SESSION:
                continue
            for queue in models.values():
                count = self._of_owner[queue.owner]
                if count >= AT_ONCE_OF_AN_OWNER or (found is not None and count >= self._of_owner[found.owner]):
                    break
                if queue.next_unprepared(self._ahead) and (queue.owner not in over or self._needed(queue)):
                    found = queue
                    break
        if found is not None:
            self._sessions[found.session_id].move_to_end(id(found))
            self._sessions.move_to_end(found.session_id)
        return found

    def _over(self) -> set[str]:
        """Owners beyond their share."""
        queues = [queue for models in self._sessions.values() for queue in models.values() if queue.rendered]
        if not queues:
            return set()
        shared = SharedBytes(self._most)
        for queue in queues:
            shared.take(queue.owner, queue.rendered)
        return {owner for owner in shared.owners() if shared.over(owner)}

    def _needed(self, queue: RunQueue) -> bool:
        """Whether no run of the owner of `queue` goes on before it is prepared."""
        own = (each for models in self._sessions.values() for each in models.values() if each.owner == queue.owner)
        return queue.first_unprepared and not self._of_owner[queue.owner] and not any(q.first_prepared for q in own)


def to_output(result: TrainResult, further: Mapping[str, float] = MappingProxyType({})) -> ForwardBackwardOutput:
    """The trainer's arrays as public types, without copying. `further`: metrics beside those of the result."""
    return ForwardBackwardOutput(
        loss_fn_outputs=tuple(
            {name: TensorData.from_numpy(array) for name, array in output.items()} for output in result.outputs
        ),
        metrics={**result.metrics, **further},
    )
