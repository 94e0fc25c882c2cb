"""`load_weights`: a checkpoint into a new training run, or into an existing one as its first command."""

import logging
from dataclasses import replace
from typing import Any

from tinker_local.backend.adapters.adapter import AdapterState
from tinker_local.backend.control.base_precision import began_on, other_precision, refuse_other_precision
from tinker_local.backend.control.checkpoint_lifetime import CheckpointUses
from tinker_local.backend.control.sessions import Sessions, check_no_token, check_user_metadata
from tinker_local.backend.control.training_runs import Command, TrainingRun, TrainingRuns, new_run
from tinker_local.backend.models.served_models import ServedModel, ServedModels
from tinker_local.backend.scheduling.operations import Operation, model_id_in
from tinker_local.backend.storage.names import parse_tinker_path
from tinker_local.backend.storage.records import CheckpointRecord
from tinker_local.backend.storage.store import Store
from tinker_local.backend.threads import DATABASE, DISK
from tinker_local.backend.training.optimizers import OPTIMIZERS, optimizer_of
from tinker_local.backend.training.optimizers.optimizer import Optimizer
from tinker_local.types import (
    TRAIN_VISION,
    GoneError,
    InvalidRequestError,
    LoadWeightsRequest,
    LoraConfig,
    OptimizerConfig,
    UnsupportedError,
)
from tinker_local.types.requests_and_results import asks_for_vision

log = logging.getLogger(__name__)


class LoadWeights:
    """Reads checkpoints, with or without their optimizer state, into training runs."""

    def __init__(
        self,
        store: Store,
        models: ServedModels,
        sessions: Sessions,
        runs: TrainingRuns,
        uses: CheckpointUses,
    ) -> None:
        self._store = store
        self._base_models = models
        self._sessions = sessions
        self._runs = runs
        self._uses = uses

    async def into_new(self, request: LoadWeightsRequest) -> Operation[dict[str, Any]]:
        """A training run that starts from a checkpoint's weights (and optimizer state, if requested)."""
        assert request.session_id is not None
        assert request.model_seq_id is not None
        model_id = model_id_in(request.session_id, request.model_seq_id)
        if (known := self._runs.creation(model_id, "load_weights")) is not None:
            return known
        await self._sessions.require(request.session_id)
        record = await self._checkpoint(request)
        name = self._base_models.served_name(request.base_model or record.base_model)
        base = self._base_models.get(name)
        check_base(record, base, name)
        if request.optimizer:
            refuse_other_precision(record, base)
        check_user_metadata(request.user_metadata)
        if asks_for_vision(request.user_metadata) and not record.lora_config.train_vision:
            raise InvalidRequestError(
                f"user_metadata[{TRAIN_VISION!r}]: {request.path} does not train the vision tower"
            )
        if request.optimizer and request.optimizer_config is not None:
            raise InvalidRequestError("optimizer_config: cannot be chosen when the optimizer state is loaded too")
        optimizer = optimizer_of(request.optimizer_config or OptimizerConfig())
        if request.optimizer:
            optimizer = await self._optimizer(record)
        layout = await self._runs.layout(record.training_run_id, record)
        metadata = {**layout.as_metadata(), **(request.user_metadata or {})}
        # While the checkpoint was looked up, the session may have ended, or the same request may have come again.
        await self._sessions.require(request.session_id)
        if (known := self._runs.creation(model_id, "load_weights")) is not None:
            return known

        async def make() -> dict[str, Any]:
            operation.timeline.enter("reading")
            state = await self._read(base, record, request, optimizer)
            operation.timeline.enter("running")
            await base.scheduler.call(base.engines.trainer.load_adapter, model_id, state)
            if (model := self._runs.live(model_id)) is not None:
                _loaded(model, record, request)
            return {"path": request.path, "model_id": model_id}

        run = new_run(model_id, name, base, record.lora_config, metadata)
        operation = self._runs.begin("load_weights", run, base, optimizer, make)
        return operation

    def into_existing(self, request: LoadWeightsRequest) -> Command:
        """Into an existing training run: as its first command only, as the hosted service does."""

        async def run(model: TrainingRun, operation: Operation[dict[str, Any]]) -> None:
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
            check_base(record, model.base, model.record.base_model)
            if request.optimizer:
                refuse_other_precision(record, model.base)
            have, want = model.record.lora_config, record.lora_config
            if without_seed(have) != without_seed(want):
                raise InvalidRequestError(
                    f"path: {request.path} has rank {want.rank} and trains {trained_parts(want)}; "
                    f"the model has rank {have.rank} and trains {trained_parts(have)}"
                )
            if request.optimizer and (its := await self._optimizer(record)) is not model.optimizer:
                raise InvalidRequestError(
                    f"path: {request.path} has optimizer state of {its.name!r}; the model has {model.optimizer.name!r}"
                )
            operation.timeline.enter("reading")
            state = await self._read(model.base, record, request, model.optimizer)
            operation.timeline.enter("running")
            if model.queue.closed:  # and the adapter removed
                raise GoneError(f"model_id: {model.model_id} ended while the checkpoint was read")
            await model.base.scheduler.call(model.base.engines.trainer.load_adapter, model.model_id, state)
            _loaded(model, record, request)
            operation.succeed({"path": request.path, "model_id": model.model_id})

        return run

    async def _checkpoint(self, request: LoadWeightsRequest) -> CheckpointRecord:
        """The checkpoint of `request`: training state, with its optimizer if that is requested."""
        check_no_token(request.weights_access_token)
        run, kind, name = parse_tinker_path(request.path, "path")
        if kind != "weights":
            raise InvalidRequestError(
                f"path: {request.path} was saved for {'sampling' if kind == 'sampler_weights' else 'download'}; "
                f"training goes on from tinker://{run}/weights/..."
            )
        reader = await self._sessions.owner_of(request.model_id or request.session_id or "")
        record = await DATABASE.run(self._store.existing_checkpoint, run, kind, name, "path", reader)
        if request.optimizer and not record.has_optimizer:
            raise InvalidRequestError(f"path: {request.path} holds no optimizer state")
        return record

    async def _optimizer(self, record: CheckpointRecord) -> Optimizer:
        """The optimizer whose state a checkpoint holds."""
        with self._uses.using(record):
            found = await DISK.run(self._store.checkpoint_optimizer, record)
        if found not in OPTIMIZERS:
            raise UnsupportedError(f"path: {record.tinker_path} has state of an unknown optimizer, {found!r}")
        return OPTIMIZERS[found]

    async def _read(
        self, base: ServedModel, record: CheckpointRecord, request: LoadWeightsRequest, optimizer: Optimizer
    ) -> AdapterState:
        """The state for the trainer of `base`, which knows its base model by the first of its names."""
        with self._uses.using(record):
            state = await DISK.run(self._store.read_checkpoint, record, optimizer=request.optimizer)
        return replace(state, base_model=base.names[0], optimizer_type=optimizer.name)


def _loaded(model: TrainingRun, record: CheckpointRecord, request: LoadWeightsRequest) -> None:
    """`model` has the weights of `record` now. If they were trained on a base in other bits, the log says so, and so
    will the checkpoints of the run."""
    model.source, model.source_optimizer = record, request.optimizer
    model.began_on = began_on(record, model.base)
    if (notice := other_precision(record, model.base)) is not None:
        log.warning("run %s: %s", model.model_id, notice)


def check_base(record: CheckpointRecord, base: ServedModel, name: str) -> None:
    """InvalidRequestError unless `base` (`name` to the client) is the copy that `record` was trained on."""
    if record.base_model not in base.names:
        raise InvalidRequestError(
            f"base_model: {name!r} does not have the weights of {record.base_model!r}, "
            f"which {record.tinker_path} is for"
        )


def without_seed(config: LoraConfig) -> LoraConfig:
    """The seed matters only when an adapter is made."""
    return config.model_copy(update={"seed": None})


def trained_parts(config: LoraConfig) -> str:
    """In words."""
    parts = [name for name in ("unembed", "mlp", "attn", "vision") if getattr(config, f"train_{name}")]
    return " and ".join(parts)
