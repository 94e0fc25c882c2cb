"""Training runs: which models are alive, how they begin and end, and what the server has room for."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

from tinker_local.backend.control import paths
from tinker_local.backend.control.lost import lost_model
from tinker_local.backend.control.sessions import Sessions, now
from tinker_local.backend.control.trained_model import TrainedModel, finish_saves
from tinker_local.backend.control.user_metadata import check_user_metadata
from tinker_local.backend.models.served_models import ServedModel, ServedModels
from tinker_local.backend.options import BackendOptions
from tinker_local.backend.scheduling.operations import Operation, OperationKind, Operations
from tinker_local.backend.scheduling.queue_states import ACTIVE, QueueState
from tinker_local.backend.storage.records import TrainingRunRecord
from tinker_local.backend.storage.store import Store
from tinker_local.backend.training.optimizers import optimizer_of
from tinker_local.backend.training.optimizers.optimizer import Optimizer
from tinker_local.types import (
    CreateModelRequest,
    GoneError,
    InternalError,
    InvalidRequestError,
    LoraConfig,
    NotFoundError,
)


class TrainingRuns:
    """Creates and ends models, and finds the live ones."""

    def __init__(
        self, options: BackendOptions, store: Store, models: ServedModels, sessions: Sessions, operations: Operations
    ) -> None:
        self._options = options
        self._store = store
        self._base_models = models
        self._sessions = sessions
        self._operations = operations
        self._live: dict[str, TrainedModel] = {}
        self._copies: set[str] = set()

    # Creation -------------------------------------------------------------------------------------------------------

    async def create(self, request: CreateModelRequest) -> Operation[dict[str, Any]]:
        """A fresh adapter. Validation errors are raised at once; the operation ends with `model_id`."""
        model_id = paths.model_id(request.session_id, request.model_seq_id)
        if (known := self.creation(model_id, "create_model")) is not None:
            return known
        base = self._base_models.get(request.base_model)
        optimizer = optimizer_of(request.optimizer_config)
        check_user_metadata(request.user_metadata)
        await self._sessions.require(request.session_id)

        async def make() -> dict[str, Any]:
            create = base.engines.trainer.create_adapter
            await base.scheduler.call(create, model_id, request.lora_config, optimizer.name)
            return {"model_id": model_id}

        record = new_run(model_id, request.base_model, request.lora_config, request.user_metadata)
        return self.begin("create_model", record, base, optimizer, make)

    def creation(self, model_id: str, kind: OperationKind) -> Operation[dict[str, Any]] | None:
        """The operation that made or makes a model, if it was asked for; InvalidRequestError if it is no `kind`."""
        return self._operations.repeated(paths.request_id(model_id, "create"), kind)

    def begin(
        self,
        kind: OperationKind,
        record: TrainingRunRecord,
        base: ServedModel,
        optimizer: Optimizer,
        make: Callable[[], Awaitable[dict[str, Any]]],
    ) -> Operation[dict[str, Any]]:
        """A new model, if there is room; the operation ends with what `make` gives, which makes its adapter.

        A model that could not be created is forgotten.
        """
        model_id = record.training_run_id
        if model_id in self._live:
            raise InvalidRequestError(f"model_seq_id: {model_id} is alive; give the new model another number")
        if model_id in self._copies:
            raise InvalidRequestError(f"model_seq_id: {model_id} is a copy; give the new model another number")
        size = self._check_limits(base, record.lora_config, optimizer)
        queue = base.scheduler.open(model_id, record.session_id, self._options.gap_patience)
        operation: Operation[dict[str, Any]] = Operation(paths.request_id(model_id, "create"), kind)
        operation.failures = base.counts.failures
        model = self._live[model_id] = TrainedModel(record, base, queue, operation, size, optimizer)
        self._operations.add(operation)

        async def run() -> None:
            operation.timeline.enter("running")
            try:
                result = await make()
                await asyncio.to_thread(self._store.add_training_run, model.record)
                model.ready = True
                base.scheduler.release(queue)
                operation.succeed(result)
            except Exception as error:
                operation.fail_from(error)
                await self._free(model, "the model could not be created")

        operation.run_as(asyncio.create_task(run()))
        return operation

    def _check_limits(self, base: ServedModel, config: LoraConfig, optimizer: Optimizer) -> int:
        """The bytes of an adapter and its optimizer; InvalidRequestError if the server has no room for them."""
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
        size = base.engines.trainer.adapter_bytes(config, optimizer.name)
        used = sum(model.adapter_bytes for model in self._live.values())
        if options.max_adapter_bytes is not None and used + size > options.max_adapter_bytes:
            raise InvalidRequestError(
                f"create_model: an adapter of rank {config.rank} with its optimizer takes {size / 2**20:.1f} MiB; "
                f"{used / 2**20:.1f} of {options.max_adapter_bytes / 2**20:.1f} MiB are taken"
            )
        return size

    # End ------------------------------------------------------------------------------------------------------------

    async def _free(self, model: TrainedModel, reason: str) -> None:
        self._live.pop(model.model_id, None)
        if not model.creation.done:
            model.creation.cancel(GoneError(reason))  # before the adapter is removed, lest it is made afterwards
        await model.base.scheduler.close_model(model.queue, reason)
        await model.base.scheduler.call(model.base.engines.trainer.remove_adapter, model.model_id)

    async def end_session(self, session_id: str) -> None:
        """Free the models of a session that has ended. Checkpoints that are being written are finished first."""

        async def end(model: TrainedModel) -> None:
            await finish_saves([model])
            await self._free(model, f"the session {session_id} has ended")

        await asyncio.gather(*(end(m) for m in list(self._live.values()) if m.record.session_id == session_id))
        self._copies = {run for run in self._copies if paths.session_of(run) != session_id}

    async def finish_saves(self) -> None:
        """Wait for the checkpoints that are being written."""
        await finish_saves(self._live.values())

    # Ids of copies --------------------------------------------------------------------------------------------------

    def reserve(self, training_run_id: str) -> None:
        """Keep the id of a live session's run for a copy; InvalidRequestError if a model or a copy has it."""
        if training_run_id in self._live or training_run_id in self._copies:
            raise InvalidRequestError(f"model_seq_id: {training_run_id} exists; give the copy another number")
        self._copies.add(training_run_id)

    def release(self, training_run_id: str) -> None:
        """Give up what `reserve` kept."""
        self._copies.discard(training_run_id)

    # Look-ups -------------------------------------------------------------------------------------------------------

    def live(self, model_id: str) -> TrainedModel | None:
        return self._live.get(model_id)

    def all_live(self) -> list[TrainedModel]:
        return list(self._live.values())

    def count(self) -> int:
        return len(self._live)

    def state_of(self, operation: Operation[Any]) -> QueueState:
        """What an operation that is not done waits for."""
        model = self._live.get(paths.owner_of(operation.request_id))
        return ACTIVE if model is None else model.base.scheduler.state_of(model.queue, operation)

    async def info(self, model_id: str) -> TrainedModel:
        """The live model; NotFoundError if there never was one, GoneError that says why it is no longer alive."""
        model = self._live.get(model_id)
        if model is None:
            lost = await lost_model(self._store, model_id)
            # For ever lost is no 5xx: the SDK would ask again for five minutes.
            raise GoneError(str(lost)) if isinstance(lost, InternalError) else lost
        if not model.ready:
            raise NotFoundError(f"model_id: {model_id} is still being created; wait for the future of its creation")
        return model

    def touch(self, model: TrainedModel) -> None:
        """Note the time of the last request; on disk at most once a minute."""
        when = now()
        if when - model.record.last_request_at > timedelta(minutes=1):
            model.record = replace(model.record, last_request_at=when)
            if model.ready:
                asyncio.get_running_loop().run_in_executor(None, self._store.touch_training_run, model.model_id, when)


def new_run(
    model_id: str, base_model: str, config: LoraConfig, user_metadata: dict[str, Any] | None
) -> TrainingRunRecord:
    """The record of a model that begins now."""
    when = now()
    return TrainingRunRecord(
        model_id, paths.session_of(model_id), base_model, config, when, when, user_metadata=user_metadata or {}
    )
