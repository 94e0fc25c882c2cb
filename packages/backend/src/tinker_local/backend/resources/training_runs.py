"""Training runs: models that are being trained, their command logs, and what survives of them."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any

from tinker_local.backend.models.base_models import BaseModel, BaseModels
from tinker_local.backend.options import BackendOptions
from tinker_local.backend.resources import paths
from tinker_local.backend.resources.checkpoint_uses import CheckpointUses
from tinker_local.backend.resources.ownership import check_no_token
from tinker_local.backend.resources.preparation import prepare_work
from tinker_local.backend.resources.sessions import Sessions, now
from tinker_local.backend.resources.user_metadata import check_user_metadata
from tinker_local.backend.scheduling.admission import Bounds, Load
from tinker_local.backend.scheduling.model_queue import GradientCommand, ModelQueue, StepCommand
from tinker_local.backend.scheduling.operations import Operation, OperationKind, Operations, as_api_error
from tinker_local.backend.scheduling.queue_states import ACTIVE, QueueState
from tinker_local.backend.storage.interface import CheckpointRecord, Store, TrainingRunRecord
from tinker_local.backend.storage.lookup import existing_checkpoint
from tinker_local.backend.storage.names import check_checkpoint_name, parse_tinker_path
from tinker_local.backend.training.interface import AdapterState, TrainWork
from tinker_local.backend.training.optimizers import check_optimizer, step_params
from tinker_local.types import (
    ApiError,
    CreateModelRequest,
    ForwardBackwardOutput,
    ForwardBackwardRequest,
    GoneError,
    InternalError,
    InvalidRequestError,
    LoadWeightsRequest,
    LoraConfig,
    NotFoundError,
    OptimizerConfig,
    OptimStepOutput,
    OptimStepRequest,
    SaveWeightsRequest,
    TooManyRequestsError,
    UnsupportedError,
)

log = logging.getLogger(__name__)

MIN_TTL, MAX_TTL = 3600, 10 * 365 * 86400
"""Seconds; the hosted service's bounds."""

FINISH_SECONDS = 60.0
"""How long the end of a session or server waits for saves in flight: longer than any disk that works."""


@dataclass(slots=True, eq=False)
class TrainedModel:
    """A live training run."""

    record: TrainingRunRecord
    base: BaseModel
    queue: ModelQueue
    ready: bool = False
    adapter_bytes: int = 0
    creation: Operation[dict[str, Any]] | None = None
    captures: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def model_id(self) -> str:
        return self.record.training_run_id


class TrainingRuns:
    """Creates, runs and ends models."""

    def __init__(
        self,
        options: BackendOptions,
        store: Store,
        models: BaseModels,
        sessions: Sessions,
        operations: Operations,
        uses: CheckpointUses,
    ) -> None:
        self._options = options
        self._store = store
        self._base_models = models
        self._sessions = sessions
        self._operations = operations
        self._uses = uses
        self._live: dict[str, TrainedModel] = {}
        self._copies: set[str] = set()
        self._preparing = ThreadPoolExecutor(2, thread_name_prefix="prepare")
        self._bounds = Bounds(
            all=Load(options.max_queued_requests, options.max_queued_bytes),
            session=Load(options.max_queued_requests_per_session, options.max_queued_bytes_per_session),
        )

    # Creation and end -----------------------------------------------------------------------------------------------

    async def create(self, request: CreateModelRequest) -> Operation[dict[str, Any]]:
        """A fresh adapter. Validation errors are raised at once; the operation ends with `model_id`."""
        model_id = paths.model_id(request.session_id, request.model_seq_id)
        if (known := self._operations.get(paths.request_id(model_id, "create"))) is not None:
            return repeated(known, "create_model")
        base = self._base_models.get(request.base_model)
        check_optimizer(request.optimizer_config)
        check_user_metadata(request.user_metadata)
        await self._sessions.require(request.session_id)
        model = self._open(model_id, request.session_id, request.base_model, base, request.lora_config)
        model.record = replace(model.record, user_metadata=request.user_metadata or {})
        operation = self._begin(model, "create_model")

        async def work() -> None:
            await base.scheduler.call(base.engines.trainer.create_adapter, model_id, request.lora_config)
            await self._created(model)
            operation.succeed({"model_id": model_id})

        self._start(model, operation, work)
        return operation

    async def create_from_checkpoint(self, request: LoadWeightsRequest) -> Operation[dict[str, Any]]:
        """A model that begins with a checkpoint's weights (and optimizer state, if asked)."""
        assert request.session_id is not None
        assert request.model_seq_id is not None
        model_id = paths.model_id(request.session_id, request.model_seq_id)
        if (known := self._operations.get(paths.request_id(model_id, "create"))) is not None:
            return repeated(known, "load_weights")
        await self._sessions.require(request.session_id)
        record = await self._checkpoint(request)
        name = request.base_model or record.base_model
        base = self._base_models.get(name)
        self._check_base(record, base, name)
        check_user_metadata(request.user_metadata)
        if request.optimizer and request.optimizer_config is not None:
            raise InvalidRequestError("optimizer_config: cannot be chosen when the optimizer state is loaded too")
        check_optimizer(request.optimizer_config or OptimizerConfig())
        # While the checkpoint was looked up, the session may have ended, or the same request may have come again.
        await self._sessions.require(request.session_id)
        if (known := self._operations.get(paths.request_id(model_id, "create"))) is not None:
            return repeated(known, "load_weights")
        model = self._open(model_id, request.session_id, name, base, record.lora_config)
        model.record = replace(model.record, user_metadata=request.user_metadata or {})
        operation = self._begin(model, "load_weights")

        async def work() -> None:
            state = await self._read(base, record, request)
            await base.scheduler.call(base.engines.trainer.load_adapter, model_id, state)
            await self._created(model)
            operation.succeed({"path": request.path, "model_id": model_id})

        self._start(model, operation, work)
        return operation

    def _open(
        self, model_id: str, session_id: str, base_name: str, base: BaseModel, config: LoraConfig
    ) -> TrainedModel:
        if model_id in self._live:
            raise InvalidRequestError(f"model_seq_id: {model_id} is alive; give the new model another number")
        if model_id in self._copies:
            raise InvalidRequestError(f"model_seq_id: {model_id} is a copy; give the new model another number")
        size = self._check_limits(base, config)
        when = now()
        record = TrainingRunRecord(model_id, session_id, base_name, config, when, when)
        queue = base.scheduler.open(model_id, session_id, self._options.hole_patience)
        model = TrainedModel(record, base, queue, adapter_bytes=size)
        self._live[model_id] = model
        return model

    def _check_limits(self, base: BaseModel, config: LoraConfig) -> int:
        options = self._options
        if not 1 <= config.rank <= options.max_rank:
            raise InvalidRequestError(
                f"lora_config.rank: {config.rank} is outside 1 to {options.max_rank}, the largest rank of this server"
            )
        if not (config.train_unembed or config.train_mlp or config.train_attn):
            raise InvalidRequestError(
                "lora_config: at least one of train_unembed, train_mlp and train_attn must be true"
            )
        if len(self._live) >= options.max_adapters:
            raise InvalidRequestError(
                f"create_model: {len(self._live)} adapters are alive and this server holds at most "
                f"{options.max_adapters}; finish a session or raise --max-adapters"
            )
        size = base.engines.trainer.adapter_bytes(config)
        used = sum(model.adapter_bytes for model in self._live.values())
        if options.max_adapter_bytes is not None and used + size > options.max_adapter_bytes:
            raise InvalidRequestError(
                f"create_model: an adapter of rank {config.rank} with its optimizer takes {size / 2**20:.1f} MiB; "
                f"{used / 2**20:.1f} of {options.max_adapter_bytes / 2**20:.1f} MiB are taken"
            )
        return size

    def _begin(self, model: TrainedModel, kind: OperationKind) -> Operation[dict[str, Any]]:
        model.creation = Operation(paths.request_id(model.model_id, "create"), kind)
        model.creation.failures = model.base.counts.failures
        self._operations.add(model.creation)
        return model.creation

    def _start(self, model: TrainedModel, operation: Operation[Any], work: Callable[[], Awaitable[None]]) -> None:
        """Run the creation; a model that could not be created is forgotten."""

        async def run() -> None:
            try:
                await work()
            except Exception as error:
                if not isinstance(error, ApiError):
                    log.exception("%s failed", operation.request_id)
                operation.fail(as_api_error(error))
                await self._free(model, "the model could not be created")

        operation.run_as(asyncio.create_task(run()))

    async def _created(self, model: TrainedModel) -> None:
        await asyncio.to_thread(self._store.add_training_run, model.record)
        model.ready = True
        model.base.scheduler.release(model.queue)

    async def _free(self, model: TrainedModel, reason: str) -> None:
        self._live.pop(model.model_id, None)
        if model.creation is not None and not model.creation.done:
            model.creation.cancel(GoneError(reason))  # before the adapter is removed, lest it is made afterwards
        await model.base.scheduler.close_model(model.queue, reason)
        await model.base.scheduler.call(model.base.engines.trainer.remove_adapter, model.model_id)

    async def end_session(self, session_id: str) -> None:
        """Free the models of a session that has ended. Checkpoints that are being written are finished first."""

        async def end(model: TrainedModel) -> None:
            await finish(model.captures)
            await self._free(model, f"the session {session_id} has ended")

        await asyncio.gather(*(end(m) for m in list(self._live.values()) if m.record.session_id == session_id))
        self._copies = {run for run in self._copies if paths.session_of(run) != session_id}

    def reserve(self, training_run_id: str) -> None:
        """Keep the id of a live session's run for a copy; InvalidRequestError if a model or a copy has it."""
        if training_run_id in self._live or training_run_id in self._copies:
            raise InvalidRequestError(f"model_seq_id: {training_run_id} exists; give the copy another number")
        self._copies.add(training_run_id)

    def release(self, training_run_id: str) -> None:
        """Give up what `reserve` kept."""
        self._copies.discard(training_run_id)

    async def finish_saves(self) -> None:
        """Wait for the checkpoints that are being written."""
        await finish([task for model in self._live.values() for task in model.captures])

    def close(self) -> None:
        self._preparing.shutdown(wait=False, cancel_futures=True)

    # Look-ups -------------------------------------------------------------------------------------------------------

    def live(self, model_id: str) -> TrainedModel | None:
        return self._live.get(model_id)

    def state_of(self, operation: Operation[Any]) -> QueueState:
        """What an operation that is not done waits for."""
        model = self._live.get(paths.owner_of(operation.request_id))
        return ACTIVE if model is None else model.base.scheduler.state_of(model.queue, operation)

    def count(self) -> int:
        return len(self._live)

    async def info(self, model_id: str) -> TrainedModel:
        """The live model; NotFoundError if there never was one, GoneError that says why it is no longer alive."""
        model = self._live.get(model_id)
        if model is None:
            lost = await self.lost(model_id)
            # For ever lost is no 5xx: the SDK would ask again for five minutes.
            raise GoneError(str(lost)) if isinstance(lost, InternalError) else lost
        if not model.ready:
            raise NotFoundError(f"model_id: {model_id} is still being created; wait for the future of its creation")
        return model

    async def lost(self, model_id: str) -> ApiError:
        """Why nothing can be done with a model that is not alive."""
        record = await asyncio.to_thread(self._store.get_training_run, model_id)
        if record is None:
            return NotFoundError(f"model_id: there is no model {model_id!r}")
        if record.copied_from is not None:
            return InvalidRequestError(
                f"model_id: {model_id} is a copy of {record.copied_from}, which cannot be trained on; "
                "begin a new model with create_training_client_from_state"
            )
        session = await asyncio.to_thread(self._store.get_session, record.session_id)
        if session is not None and session.why_ended is not None:
            why = f"its session has ended ({session.why_ended})"
        else:
            why = "the server was restarted"
        return InternalError(f"model {model_id} is gone: {why}. {await self._advice(model_id)}")

    async def _advice(self, model_id: str) -> str:
        checkpoints = await asyncio.to_thread(self._store.list_checkpoints, model_id)
        saved = [c for c in checkpoints if c.kind == "weights"]
        if not saved:
            return "It has no saved checkpoint."
        last = max(saved, key=lambda c: c.created_at)
        return (
            f"Its last checkpoint is {last.tinker_path}; continue with create_training_client_from_state_with_optimizer"
        )

    def _check_base(self, record: CheckpointRecord, base: BaseModel, name: str) -> None:
        """InvalidRequestError unless `base` (`name` to the client) is the copy that `record` was trained on."""
        if record.base_model not in base.names:
            raise InvalidRequestError(
                f"base_model: {name!r} does not have the weights of {record.base_model!r}, "
                f"which {record.tinker_path} is for"
            )

    async def _read(self, base: BaseModel, record: CheckpointRecord, request: LoadWeightsRequest) -> AdapterState:
        """What the trainer of `base` loads; a trainer knows its model by the first of its names."""
        with self._uses.using(record):
            state = await asyncio.to_thread(self._store.read_checkpoint, record, optimizer=request.optimizer)
        return replace(state, base_model=base.names[0])

    async def _checkpoint(self, request: LoadWeightsRequest) -> CheckpointRecord:
        check_no_token(request.weights_access_token)
        run, kind, name = parse_tinker_path(request.path, "path")
        if kind != "weights":
            raise InvalidRequestError(
                f"path: {request.path} was saved for {'sampling' if kind == 'sampler_weights' else 'download'}; "
                f"training goes on from tinker://{run}/weights/..."
            )
        record = await existing_checkpoint(self._store, run, kind, name, "path")
        if request.optimizer and not record.has_optimizer:
            raise InvalidRequestError(f"path: {request.path} holds no optimizer state")
        return record

    # Commands in order ----------------------------------------------------------------------------------------------

    async def forward_backward(
        self, model_id: str, seq_id: int, *, forward_only: bool, size: int, decode: Callable[[], ForwardBackwardRequest]
    ) -> Operation[ForwardBackwardOutput]:
        """Queue a forward/backward of `size` bytes. `decode` runs in a thread; whatever is wrong with the data fails
        the operation. TooManyRequestsError if there is no room: to be sent again with the same `seq_id`."""
        kind: OperationKind = "forward" if forward_only else "forward_backward"
        operation: Operation[ForwardBackwardOutput] = Operation(paths.request_id(model_id, seq_id), kind)
        known, model = await self._place(operation, model_id, seq_id, size)
        if known is not None:
            return known
        assert model is not None
        base = model.base

        async def prepare() -> TrainWork:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._preparing, prepare_work, base, model_id, decode)

        command = GradientCommand(operation, prepare, size)
        if (reason := self._bounds.too_large(model.queue, seq_id, size)) is not None:
            command = GradientCommand(operation, partial(_fail, InvalidRequestError(f"data: {reason}")))
        base.scheduler.submit(model.queue, seq_id, command)
        return operation

    async def optim_step(self, request: OptimStepRequest) -> Operation[OptimStepOutput]:
        """Queue an optimizer step. It fails, and discards the gradient, if a gradient since the last one failed."""

        async def run(model: TrainedModel, operation: Operation[OptimStepOutput]) -> None:
            trainer, scheduler = model.base.engines.trainer, model.base.scheduler
            params = step_params(request)
            if (reason := model.queue.commands.take_spoiled()) is not None:
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
            record = checkpoint_record(model, "weights", name, request.ttl_seconds, request.user_metadata)

            async def write() -> None:
                written = await asyncio.to_thread(
                    self._store.write_checkpoint, record, state, overwrite=request.overwrite
                )
                operation.succeed({"path": written.tinker_path})

            self.beside(model, operation, write())

        return await self.in_order("save_weights", request.model_id, request.seq_id, run)

    async def load_into(self, request: LoadWeightsRequest) -> Operation[dict[str, Any]]:
        """Load a checkpoint into an existing model, as its first command only (as the hosted service does)."""
        assert request.model_id is not None
        assert request.seq_id is not None

        async def run(model: TrainedModel, operation: Operation[dict[str, Any]]) -> None:
            if request.seq_id != 1:
                raise InvalidRequestError(
                    f"load_weights: allowed as a model's first request only, this is number {request.seq_id}; "
                    "use create_training_client_from_state"
                )
            if request.optimizer_config is not None:
                raise UnsupportedError("optimizer_config: the model was created with its optimizer already")
            if request.base_model is not None or request.user_metadata is not None:
                raise UnsupportedError("base_model, user_metadata: only when the load creates the model")
            record = await self._checkpoint(request)
            self._check_base(record, model.base, model.record.base_model)
            have, want = model.record.lora_config, record.lora_config
            if replace_seed(have) != replace_seed(want):
                raise InvalidRequestError(
                    f"path: {request.path} has rank {want.rank} and trains {flags(want)}; "
                    f"the model has rank {have.rank} and trains {flags(have)}"
                )
            state = await self._read(model.base, record, request)
            if model.queue.closed:  # and the adapter removed
                raise GoneError(f"model_id: {model.model_id} ended while the checkpoint was read")
            await model.base.scheduler.call(model.base.engines.trainer.load_adapter, model.model_id, state)
            operation.succeed({"path": request.path, "model_id": model.model_id})

        return await self.in_order("load_weights", request.model_id, request.seq_id, run)

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
        known, model = await self._place(operation, model_id, seq_id)
        if known is not None:
            return known
        assert model is not None
        live = model

        async def step() -> None:
            await run(live, operation)

        live.base.scheduler.submit(live.queue, seq_id, StepCommand(operation, step))
        return operation

    def beside(self, model: TrainedModel, operation: Operation[Any], work: Awaitable[None]) -> None:
        """Do what follows a capture without holding up the model's order."""

        async def run() -> None:
            try:
                await work
            except Exception as error:
                if not isinstance(error, ApiError):
                    log.exception("%s failed", operation.request_id)
                operation.fail(as_api_error(error))

        task = asyncio.create_task(run())
        model.captures.add(task)
        task.add_done_callback(model.captures.discard)

    async def _place(
        self, operation: Operation[Any], model_id: str, seq_id: int, size: int = 0
    ) -> tuple[Operation[Any] | None, TrainedModel | None]:
        """The operation that stands for this id already, or the model that a new one of `size` bytes goes to.

        Nothing is refused for good at submission: the SDK's training client would hang if one of several chunks were.
        """
        if (known := self._operations.get(operation.request_id)) is not None:
            return repeated(known, operation.kind), None
        model = self._live.get(model_id)
        if model is None:
            error = await self.lost(model_id)
            if (known := self._operations.get(operation.request_id)) is not None:
                return repeated(known, operation.kind), None
            self._operations.add(operation)
            operation.fail(error)
            return operation, None
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
            return operation, None
        self._touch(model)
        return None, model

    def _check_bounds(self, model: TrainedModel, seq_id: int, size: int) -> None:
        """TooManyRequestsError if as much is queued as may be."""
        try:
            self._bounds.check(model.queue, [live.queue for live in self._live.values()], seq_id, size)
        except TooManyRequestsError:
            model.base.counts.submits_refused += 1
            raise

    def _touch(self, model: TrainedModel) -> None:
        """Note the time of the last request; on disk at most once a minute."""
        when = now()
        if when - model.record.last_request_at > timedelta(minutes=1):
            model.record = replace(model.record, last_request_at=when)
            if model.ready:
                asyncio.get_running_loop().run_in_executor(None, self._store.touch_training_run, model.model_id, when)


async def _fail(error: ApiError) -> TrainWork:
    """The preparation of a request that cannot be run."""
    raise error


async def finish(saves: Collection[asyncio.Task[None]]) -> None:
    """Wait for `saves`, at most `FINISH_SECONDS`."""
    if saves:
        await asyncio.wait(saves, timeout=FINISH_SECONDS)


def repeated(known: Operation[Any], kind: OperationKind) -> Operation[Any]:
    """`known`, if it is what the client asks for again; InvalidRequestError if its id is another operation's."""
    if known.kind != kind:
        raise InvalidRequestError(f"seq_id: {known.request_id} is a {known.kind} already, it cannot be a {kind}")
    return known


def check_ttl(seconds: int | None) -> None:
    """InvalidRequestError for a life time outside one hour to ten years."""
    if seconds is not None and not MIN_TTL <= seconds <= MAX_TTL:
        raise InvalidRequestError(f"ttl_seconds: {seconds} is outside {MIN_TTL} (an hour) to {MAX_TTL} (ten years)")


def flags(config: LoraConfig) -> str:
    """The trained parts in words."""
    parts = [name for name in ("unembed", "mlp", "attn") if getattr(config, f"train_{name}")]
    return " and ".join(parts)


def replace_seed(config: LoraConfig) -> LoraConfig:
    """`config` without its seed, which matters only when an adapter is made."""
    return config.model_copy(update={"seed": None})


def checkpoint_record(
    model: TrainedModel,
    kind: Any,
    name: str,
    ttl_seconds: int | None,
    user_metadata: Mapping[str, Any] | None,
) -> CheckpointRecord:
    """The record of a checkpoint of `model` taken now; its size is known once it is written."""
    when = now()
    return CheckpointRecord(
        training_run_id=model.model_id,
        kind=kind,
        name=name,
        base_model=model.record.base_model,
        lora_config=model.record.lora_config,
        created_at=when,
        size_bytes=0,
        has_optimizer=kind == "weights",
        expires_at=None if ttl_seconds is None else when + timedelta(seconds=ttl_seconds),
        user_metadata=user_metadata or {},
    )
