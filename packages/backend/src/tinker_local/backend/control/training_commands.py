"""What a model is asked for in order, by `seq_id`: forward/backward, optimizer step, save; and how any is queued."""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from tinker_local.backend.control import paths
from tinker_local.backend.control.lost import lost_model
from tinker_local.backend.control.preparation import prepare_work
from tinker_local.backend.control.trained_model import TrainedModel
from tinker_local.backend.control.training_runs import TrainingRuns
from tinker_local.backend.control.ttl import check_ttl
from tinker_local.backend.control.user_metadata import check_user_metadata
from tinker_local.backend.options import BackendOptions
from tinker_local.backend.scheduling.command_log import Bounds, Load
from tinker_local.backend.scheduling.model_queue import GradientCommand, StepCommand, positions
from tinker_local.backend.scheduling.operations import Operation, OperationKind, Operations
from tinker_local.backend.storage.names import check_checkpoint_name
from tinker_local.backend.storage.store import Store
from tinker_local.backend.training.interface import TrainWork
from tinker_local.backend.training.optimizers import step_settings
from tinker_local.types import (
    ApiError,
    ForwardBackwardOutput,
    ForwardBackwardRequest,
    InvalidRequestError,
    OptimStepOutput,
    OptimStepRequest,
    SaveWeightsRequest,
    TooManyRequestsError,
)


class TrainingCommands:
    """Queues the commands of live models. The same (model, `seq_id`) again is the same operation.

    Nothing is refused for good at submission: the SDK's training client would hang if one of several chunks were.
    """

    def __init__(self, options: BackendOptions, store: Store, runs: TrainingRuns, operations: Operations) -> None:
        self._store = store
        self._runs = runs
        self._operations = operations
        self._preparing = ThreadPoolExecutor(2, thread_name_prefix="prepare")
        self._bounds = Bounds(
            all=Load(options.max_queued_requests, options.max_queued_bytes),
            session=Load(options.max_queued_requests_per_session, options.max_queued_bytes_per_session),
        )

    async def forward_backward(
        self, model_id: str, seq_id: int, *, forward_only: bool, size: int, decode: Callable[[], ForwardBackwardRequest]
    ) -> Operation[ForwardBackwardOutput]:
        """Queue a forward/backward of `size` bytes. `decode` runs in a thread; whatever is wrong with the data fails
        the operation. TooManyRequestsError if there is no room: to be sent again with the same `seq_id`."""
        kind: OperationKind = "forward" if forward_only else "forward_backward"
        operation: Operation[ForwardBackwardOutput] = Operation(paths.request_id(model_id, seq_id), kind)
        model = await self._place(operation, model_id, seq_id, size)
        if isinstance(model, Operation):
            return model
        base = model.base

        def prepared() -> TrainWork:
            work = prepare_work(base, model_id, decode)
            images = sum(len(datum.input.images) for datum in work.data)
            operation.timeline.note(datums=len(work.data), tokens=positions(work.data), images=images)
            return work

        async def prepare() -> TrainWork:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._preparing, operation.timeline.during("preparing", prepared))

        command = GradientCommand(operation, prepare, size)
        if (reason := self._bounds.too_large(model.queue, seq_id, size)) is not None:
            command = GradientCommand(operation, partial(_fail, InvalidRequestError(f"data: {reason}")))
        base.scheduler.submit(model.queue, seq_id, command)
        return operation

    async def optim_step(self, request: OptimStepRequest) -> Operation[OptimStepOutput]:
        """Queue an optimizer step. It fails, and discards the gradient, if a gradient since the last one failed."""

        async def run(model: TrainedModel, operation: Operation[OptimStepOutput]) -> None:
            trainer, scheduler = model.base.engines.trainer, model.base.scheduler
            params = step_settings(request, model.optimizer)
            if (reason := model.queue.commands.take_poisoned()) is not None:
                await scheduler.call(trainer.discard_gradients, model.model_id)
                raise InvalidRequestError(
                    f"the optimizer step was not taken and the gradient was discarded, because {reason}"
                )
            metrics = await scheduler.call(trainer.optim_step, model.model_id, params)
            model.base.counts.optimizer_steps += 1
            operation.succeed(OptimStepOutput(metrics=metrics))

        return await self.in_order("optim_step", request.model_id, request.seq_id, run)

    async def save_weights(self, request: SaveWeightsRequest) -> Operation[dict[str, Any]]:
        """Queue a checkpoint of weights and optimizer; the copy is taken in order, the disk is written beside."""

        async def run(model: TrainedModel, operation: Operation[dict[str, Any]]) -> None:
            name = check_checkpoint_name(request.path, "path")
            check_ttl(request.ttl_seconds)
            check_user_metadata(request.user_metadata)
            state = await model.base.scheduler.call(model.base.engines.trainer.capture, model.model_id, optimizer=True)
            record = model.checkpoint("weights", name, request.ttl_seconds, request.user_metadata)

            async def write() -> None:
                written = await asyncio.to_thread(
                    self._store.write_checkpoint, record, state, overwrite=request.overwrite
                )
                operation.succeed({"path": written.tinker_path})

            model.beside(operation, write())

        return await self.in_order("save_weights", request.model_id, request.seq_id, run)

    async def refuse(self, kind: OperationKind, model_id: str, seq_id: int, error: ApiError) -> Operation[Any]:
        """Take the place of a command that is malformed: its operation fails in order with `error`."""

        async def run(model: TrainedModel, operation: Operation[Any]) -> None:
            raise error

        return await self.in_order(kind, model_id, seq_id, run)

    async def in_order(
        self,
        kind: OperationKind,
        model_id: str,
        seq_id: int,
        run: Callable[[TrainedModel, Operation[Any]], Awaitable[None]],
    ) -> Operation[Any]:
        """Queue `run` at `seq_id` of the model; it gives the operation its result or raises.

        TooManyRequestsError if there is no room: to be sent again with the same `seq_id`.
        """
        operation: Operation[Any] = Operation(paths.request_id(model_id, seq_id), kind)
        model = await self._place(operation, model_id, seq_id)
        if isinstance(model, Operation):
            return model
        model.base.scheduler.submit(model.queue, seq_id, StepCommand(operation, partial(run, model, operation)))
        return operation

    async def _place(
        self, operation: Operation[Any], model_id: str, seq_id: int, size: int = 0
    ) -> TrainedModel | Operation[Any]:
        """The model that a new operation of `size` bytes goes to, or the operation that stands for its id already, be
        it because it failed here."""
        if (known := self._operations.repeated(operation.request_id, operation.kind)) is not None:
            return known
        model = self._runs.live(model_id)
        if model is None:
            error = await lost_model(self._store, model_id)
            if (known := self._operations.repeated(operation.request_id, operation.kind)) is not None:
                return known
            self._operations.add(operation)
            operation.fail(error)
            return operation
        accepted = model.queue.commands.accepts(seq_id)
        if accepted:
            self._check_bounds(model, seq_id, size)
        operation.failures = model.base.counts.failures
        self._operations.add(operation)
        if not accepted:
            operation.fail(
                InvalidRequestError(
                    f"seq_id: {seq_id} arrived after the model went on to {model.queue.commands.next_seq_id} without it"
                )
            )
            return operation
        self._runs.touch(model)
        return model

    def _check_bounds(self, model: TrainedModel, seq_id: int, size: int) -> None:
        """TooManyRequestsError if as much is queued as may be."""
        try:
            self._bounds.check(model.queue, [live.queue for live in self._runs.all_live()], seq_id, size)
        except TooManyRequestsError:
            model.base.counts.submits_refused += 1
            raise

    def close(self) -> None:
        self._preparing.shutdown(wait=False, cancel_futures=True)


async def _fail(error: ApiError) -> TrainWork:
    """The preparation of a request that cannot be run."""
    raise error
