"""Training runs: how they begin and end, which are alive, and the errors for those that are gone."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, TypeVar

from tinker_local.backend.control.base_precision import began_metadata
from tinker_local.backend.control.checkpoint_lifetime import expiry
from tinker_local.backend.control.run_progress import RunProgress
from tinker_local.backend.control.sessions import Sessions, check_user_metadata
from tinker_local.backend.models.served_models import ServedModel, ServedModels
from tinker_local.backend.options import BackendOptions
from tinker_local.backend.process.process_group import ProcessEndedError
from tinker_local.backend.scheduling.operations import (
    ACTIVE,
    Operation,
    OperationKind,
    Operations,
    QueueState,
    model_id_in,
    owner_of,
    request_id_of,
    session_of,
)
from tinker_local.backend.scheduling.quotas import Quotas
from tinker_local.backend.scheduling.run_queue import RunQueue
from tinker_local.backend.storage.metadata import EVERYTHING, Owned
from tinker_local.backend.storage.records import CheckpointKind, CheckpointRecord, SessionRecord, TrainingRunRecord
from tinker_local.backend.storage.store import Store
from tinker_local.backend.threads import DATABASE
from tinker_local.backend.training.optimizers import optimizer_of
from tinker_local.backend.training.optimizers.optimizer import Optimizer
from tinker_local.types import (
    ApiError,
    CreateModelRequest,
    GoneError,
    InternalError,
    InvalidRequestError,
    LoraConfig,
    NotFoundError,
    PromptLayout,
)

T = TypeVar("T")

KEPT_VERSIONS = 1024
"""Sampler versions of a run whose staleness is known: far more than a program samples from at once."""

FINISH_SECONDS = 60.0
"""How long the end of a session or server waits for saves in progress: longer than a working disk takes."""


@dataclass(slots=True, eq=False)
class TrainingRun:
    """A live training run.

    Attributes
    ----------
    ready: its adapter exists, and it is recorded.
    adapter_bytes: of the adapter with its optimizer.
    owner: of its session.
    creation: the operation that creates it.
    made: the trainer has its adapter.
    steps, saved_steps: optimizer steps taken since it was created or loaded, and those of them in `source`.
    stepped_at: when it took the last of them; of the monotonic clock.
    autosaving, autosaved_at: held during an autosave; when the last one began, or the run.
    requested_at, touched_at: when its last request came, and when the record was given the time of one.
    next_save: gives the number of a save.
    source: the last durable checkpoint of its weights, or the one that it was loaded from; None: it was created.
    imported: its adapter came from elsewhere, so that without a `source` only the trainer has it.
    source_optimizer: its optimizer is that of `source`.
    progress: what it has done.
    began_on: in what the base was on which its first weights were trained, if in another precision than here.
    saved_versions: after how many steps each of its newest sampler versions was saved, by the version's name.
    told_losses: those of which the log has said that their definition is this project's.
    captures: tasks that write or publish what was captured of it.
    """

    record: TrainingRunRecord
    owner: str
    base: ServedModel
    queue: RunQueue
    creation: Operation[dict[str, Any]]
    adapter_bytes: int
    optimizer: Optimizer
    ready: bool = False
    made: bool = False
    steps: int = 0
    saved_steps: int = 0
    stepped_at: float = 0.0
    autosaving: asyncio.Lock = field(default_factory=asyncio.Lock)
    autosaved_at: float = field(default_factory=time.monotonic)
    requested_at: float = field(default_factory=time.monotonic)
    touched_at: float = field(default_factory=time.monotonic)
    next_save: Callable[[], int] = lambda: 0
    source: CheckpointRecord | None = None
    source_optimizer: bool = False
    imported: bool = False
    progress: RunProgress = field(default_factory=RunProgress)
    began_on: str | None = None
    saved_versions: dict[str, int] = field(default_factory=dict)
    told_losses: set[str] = field(default_factory=set)
    captures: set[asyncio.Task[Any]] = field(default_factory=set)

    @property
    def model_id(self) -> str:
        return self.record.training_run_id

    @property
    def unsaved_steps(self) -> int:
        """Optimizer steps since the last durable checkpoint."""
        return self.steps - self.saved_steps

    def unsaved_words(self) -> str:
        """What a loss of it would lose, and since when."""
        what = f"{count_of_steps(self.unsaved_steps)} of {self.model_id}" if self.unsaved_steps else self.model_id
        return f"{what}, which has no checkpoint" if self.source is None else f"{what} since {self.source.tinker_path}"

    def stepped(self) -> None:
        """The trainer took an optimizer step."""
        self.steps += 1
        self.stepped_at = time.monotonic()

    def saved_for_sampler(self, version: str, steps: int) -> None:
        """A sampler version has the weights after `steps`."""
        self.saved_versions[version] = steps
        while len(self.saved_versions) > KEPT_VERSIONS:
            del self.saved_versions[next(iter(self.saved_versions))]

    def staleness(self) -> dict[str, int]:
        """Optimizer steps since each sampler version was saved, by its name."""
        return {version: self.steps - steps for version, steps in self.saved_versions.items()}

    def would_lose(self) -> str | None:
        """What of it only the trainer has, in words; None if nothing."""
        if steps := self.unsaved_steps:
            return f"{count_of_steps(steps)} {'are' if steps > 1 else 'is'} lost that no checkpoint has"
        if self.imported and self.source is None:
            return "the adapter is lost that was being imported"
        return "the gradient since the last optimizer step is lost" if self.queue.gradient else None

    def saved(self, record: CheckpointRecord, steps: int) -> None:
        """A checkpoint with the optimizer, taken after `steps`, is durable."""
        if steps >= self.saved_steps:
            self.source, self.source_optimizer, self.saved_steps = record, True, steps

    def checkpoint(
        self, kind: CheckpointKind, name: str, ttl_seconds: int | None, user_metadata: Mapping[str, Any] | None
    ) -> CheckpointRecord:
        """The record of a checkpoint taken now; its size is known once it is written."""
        when = datetime.now(UTC)
        return CheckpointRecord(
            training_run_id=self.model_id,
            kind=kind,
            name=name,
            base_model=self.record.base_model,
            lora_config=self.record.lora_config,
            created_at=when,
            size_bytes=0,
            has_optimizer=kind == "weights",
            save_number=self.next_save(),
            expires_at=expiry(when, ttl_seconds),
            user_metadata={**(user_metadata or {}), **began_metadata(self.began_on)},
            base_precision=self.record.base_precision,
        )

    def beside(self, operation: Operation[Any], work: Awaitable[None]) -> None:
        """Run what follows a capture without blocking the run's order."""

        async def run() -> None:
            operation.timeline.enter("writing")
            try:
                await work
            except Exception as error:
                operation.fail_from(error)

        self._capture(run())

    async def write_beside(self, work: Coroutine[Any, Any, T]) -> T:
        """`work`, which writes what was captured; ends with the caller if that is cancelled."""
        return await self._capture(work)

    def _capture(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self.captures.add(task)
        task.add_done_callback(self.captures.discard)
        return task


Command = Callable[[TrainingRun, Operation[Any]], Awaitable[None]]
"""Runs at its place in a run's order: gives the operation its result, or raises."""


async def finish_saves(models: Collection[TrainingRun], seconds: float = FINISH_SECONDS) -> None:
    """Wait for the saves in progress of `models`, at most `seconds`."""
    saves = [task for model in models for task in model.captures]
    if saves:
        await asyncio.wait(saves, timeout=seconds)


class TrainingRuns:
    """Creates and ends training runs, and finds the live ones."""

    def __init__(
        self,
        options: BackendOptions,
        quotas: Quotas,
        store: Store,
        models: ServedModels,
        sessions: Sessions,
        operations: Operations,
    ) -> None:
        self._options = options
        self._quotas = quotas
        self._store = store
        self._base_models = models
        self._sessions = sessions
        self._operations = operations
        self._live: dict[str, TrainingRun] = {}
        self._copies: set[str] = set()
        self._losses: dict[str, str] = {}

    # Creation -------------------------------------------------------------------------------------------------------

    async def create(self, request: CreateModelRequest) -> Operation[dict[str, Any]]:
        """A fresh adapter. Validation errors are raised at once; the operation ends with `model_id`."""
        model_id = model_id_in(request.session_id, request.model_seq_id)
        if (known := self.creation(model_id, "create_model")) is not None:
            return known
        name = self._base_models.served_name(request.base_model)
        base = self._base_models.get(name)
        optimizer = optimizer_of(request.optimizer_config)
        check_user_metadata(request.user_metadata)
        config = request.lora
        await self._sessions.require(request.session_id)

        async def make() -> dict[str, Any]:
            create = base.engines.trainer.create_adapter
            await base.scheduler.call(create, model_id, config, optimizer.name)
            return {"model_id": model_id}

        record = new_run(model_id, name, base, config, request.user_metadata)
        return self.begin("create_model", record, base, optimizer, make)

    def creation(self, model_id: str, kind: OperationKind) -> Operation[dict[str, Any]] | None:
        """The operation that creates a run, if there is one; InvalidRequestError if it is not a `kind`."""
        return self._operations.repeated(request_id_of(model_id, "create"), kind)

    def begin(
        self,
        kind: OperationKind,
        record: TrainingRunRecord,
        base: ServedModel,
        optimizer: Optimizer,
        make: Callable[[], Awaitable[dict[str, Any]]],
    ) -> Operation[dict[str, Any]]:
        """A new run, if there is room. `make` creates its adapter and returns the result of the operation.

        A run that could not be created is forgotten.
        """
        model_id = record.training_run_id
        if model_id in self._live:
            raise InvalidRequestError(f"model_seq_id: {model_id} is alive; give the new model another number")
        if model_id in self._copies:
            raise InvalidRequestError(f"model_seq_id: {model_id} is a copy; give the new model another number")
        owner = self._sessions.live_owner(record.session_id)
        size = self._check_limits(base, owner, record.lora_config, optimizer)
        options = self._options
        queue = base.scheduler.open(
            model_id, record.session_id, options.gap_patience, owner, failure_pause=options.failure_pause
        )
        operation: Operation[dict[str, Any]] = Operation(request_id_of(model_id, "create"), kind)
        operation.owner, operation.failures = owner, base.counts.failures
        model = self._live[model_id] = TrainingRun(
            record, owner, base, queue, operation, size, optimizer, next_save=self._store.next_save
        )
        queue.on_discarded = model.progress.gradient_ended
        self._operations.add(operation)

        async def run() -> None:
            operation.timeline.enter("running")
            try:
                await DATABASE.run(self._store.quota.check_new_run, owner)
                result = await make()
                model.made = True
                await DATABASE.run(self._store.add_training_run, model.record)
                model.ready = True
                base.scheduler.release(queue)
                operation.succeed(result)
            except Exception as error:
                operation.fail_from(error)
                await self._free(model, "the model could not be created")

        operation.run_as(asyncio.create_task(run()))
        return operation

    def _check_limits(self, base: ServedModel, owner: str, config: LoraConfig, optimizer: Optimizer) -> int:
        """The bytes of an adapter and its optimizer; InvalidRequestError if they do not fit within a limit."""
        options = self._options
        if not 1 <= config.rank <= options.max_rank:
            raise InvalidRequestError(
                f"lora_config.rank: {config.rank} is outside 1 to {options.max_rank}, the largest rank of this server"
            )
        if options.strict_hosted:
            _check_hosted(config)
        if not (config.train_unembed or config.train_mlp or config.train_attn):
            raise InvalidRequestError(
                "lora_config: at least one of train_unembed, train_mlp and train_attn must be true"
            )
        if config.train_vision and not options.train_vision:
            raise InvalidRequestError(
                "lora_config.train_vision: this server keeps vision towers frozen; start it with --train-vision"
            )
        base.check_sampled(config)
        size = base.engines.trainer.adapter_bytes(config, optimizer.name)
        own = self.of_owner(owner)
        for whose, most, live, flags in (
            (f" of the owner {owner!r}", self._quotas.of(owner), own, ("--quota", "--quota")),
            ("", self._quotas.all, self.all_live(), ("--max-adapters", "--max-adapter-memory")),
        ):
            advice = "wait until others finish theirs" if live else "choose a smaller rank"
            if own:
                advice = f"finish a session; the least recently used: {_least_used(own)}"
            if len(live) >= most.adapters:
                raise InvalidRequestError(
                    f"create_model: {len(live)} adapters{whose} are alive, the most is {most.adapters} ({flags[0]}): "
                    f"{advice}"
                )
            used = sum(model.adapter_bytes for model in live)
            if used + size > most.adapter_bytes:
                raise InvalidRequestError(
                    f"create_model: an adapter of rank {config.rank} with its optimizer takes {size / 2**20:.1f} MiB; "
                    f"{used / 2**20:.1f} of {most.adapter_bytes / 2**20:.1f} MiB{whose} are taken ({flags[1]}): "
                    f"{advice}"
                )
        return size

    # End ------------------------------------------------------------------------------------------------------------

    async def _free(self, model: TrainingRun, reason: str) -> None:
        self._live.pop(model.model_id, None)
        if not model.creation.done:
            model.creation.cancel(GoneError(reason))  # first, or the adapter could be created after its removal
        await model.base.scheduler.close_run(model.queue, GoneError(reason))
        if model.base.memory_sharing.trainer_gate.is_open:  # a new trainer does not get the adapter
            with suppress(ProcessEndedError):
                await model.base.scheduler.call(model.base.engines.trainer.remove_adapter, model.model_id)

    async def lose(self, model: TrainingRun, why: str) -> None:
        """End a run whose adapter the trainer has lost: what it was asked for, and will be, fails with `why`."""
        self._losses[model.model_id] = why
        error = await self.lost_model(model.model_id)
        if self._live.get(model.model_id) is model:
            del self._live[model.model_id]
            model.base.scheduler.lose_run(model.queue, error)

    async def end_session(self, session_id: str) -> None:
        """Free the runs of a session that has ended, after finishing their saves."""

        async def end(model: TrainingRun) -> None:
            await finish_saves([model])
            reason = f"the session {session_id} has ended"
            if model.queue.commands:
                reason += f". {await _how_to_go_on(self._store, model.model_id)}"
            await self._free(model, reason)

        await asyncio.gather(*(end(model) for model in self.of_session(session_id)))
        self._copies = {run for run in self._copies if session_of(run) != session_id}
        self._losses = {run: why for run, why in self._losses.items() if session_of(run) != session_id}

    async def finish_saves(self) -> None:
        """Wait for saves in progress."""
        await finish_saves(self._live.values())

    # Ids of copies --------------------------------------------------------------------------------------------------

    def reserve(self, training_run_id: str) -> None:
        """Reserve the id of a run for a copy; InvalidRequestError if a run or a copy has it."""
        if training_run_id in self._live or training_run_id in self._copies:
            raise InvalidRequestError(f"model_seq_id: {training_run_id} exists; give the copy another number")
        self._copies.add(training_run_id)

    def release(self, training_run_id: str) -> None:
        """Release what `reserve` reserved."""
        self._copies.discard(training_run_id)

    # Records --------------------------------------------------------------------------------------------------------

    async def get(self, training_run_id: str) -> TrainingRunRecord:
        """What is recorded of a training run, alive or not."""
        record = await DATABASE.run(self._store.get_training_run, training_run_id)
        if record is None:
            raise NotFoundError(f"training_run_id: there is no training run {training_run_id!r}")
        return record

    async def layout(self, training_run_id: str, checkpoint: CheckpointRecord | None) -> PromptLayout:
        """How the program of a run puts pictures into its prompts, as it said for the run or for this checkpoint."""
        run = await DATABASE.run(self._store.get_training_run, training_run_id)
        of_run = {} if run is None else run.user_metadata
        return PromptLayout.of({**of_run, **(checkpoint.user_metadata if checkpoint is not None else {})})

    async def newest(self, limit: int, offset: int, owned: Owned = EVERYTHING) -> tuple[list[TrainingRunRecord], int]:
        """Newest first, and the count of all."""
        return await DATABASE.run(self._store.list_training_runs, limit, offset, owned)

    # Look-ups -------------------------------------------------------------------------------------------------------

    def live(self, model_id: str) -> TrainingRun | None:
        return self._live.get(model_id)

    def all_live(self) -> list[TrainingRun]:
        return list(self._live.values())

    def of_session(self, session_id: str) -> list[TrainingRun]:
        """Its live runs."""
        return [run for run in self._live.values() if run.record.session_id == session_id]

    def of_owner(self, owner: str) -> list[TrainingRun]:
        """Its live runs."""
        return [run for run in self._live.values() if run.owner == owner]

    def count(self) -> int:
        return len(self._live)

    def state_of(self, operation: Operation[Any]) -> QueueState:
        """What an unfinished operation waits for."""
        model = self._live.get(owner_of(operation.request_id))
        return ACTIVE if model is None else model.base.scheduler.state_of(model.queue, operation)

    async def info(self, model_id: str) -> TrainingRun:
        """The live run; NotFoundError if there never was one, GoneError with the reason if it has ended."""
        model = self._live.get(model_id)
        if model is None:
            lost = await self.lost_model(model_id)
            # Not a 5xx: the SDK would retry for five minutes.
            raise GoneError(str(lost)) if isinstance(lost, InternalError) else lost
        if not model.ready:
            raise NotFoundError(f"model_id: {model_id} is still being created; wait for the future of its creation")
        return model

    async def lost_model(self, model_id: str) -> ApiError:
        """Why a run that is not alive takes no commands."""
        record = await DATABASE.run(self._store.get_training_run, model_id)
        if record is None:
            return NotFoundError(f"model_id: there is no model {model_id!r}")
        if record.copied_from is not None:
            return InvalidRequestError(
                f"model_id: {model_id} is a copy of {record.copied_from}, which cannot be trained on; "
                "begin a new model with create_training_client_from_state"
            )
        why = self._losses.get(model_id)
        if why is None:
            why = why_lost(await DATABASE.run(self._store.get_session, record.session_id))
        return InternalError(f"model {model_id} is gone: {why}. {await _how_to_go_on(self._store, model_id)}")

    async def pause_before_failure(self, operation: Operation[Any]) -> None:
        """Wait before answering that a forward_backward failed; see `RunQueue.pause_before_failure`."""
        run_id, _, seq_id = operation.request_id.rpartition(":")
        if (model := self._live.get(run_id)) is not None:
            await model.queue.pause_before_failure(int(seq_id))

    def touch(self, model: TrainingRun) -> None:
        """Note the time of the last request; written to disk at most once a minute."""
        model.requested_at = time.monotonic()
        if model.requested_at - model.touched_at > TOUCH_SECONDS:
            when, model.touched_at = datetime.now(UTC), model.requested_at
            model.record = replace(model.record, last_request_at=when)
            if model.ready:
                DATABASE.run(self._store.touch_training_run, model.model_id, when)


def new_run(
    model_id: str, base_name: str, base: ServedModel, config: LoraConfig, user_metadata: Mapping[str, Any] | None
) -> TrainingRunRecord:
    """The record of a run on `base`, `base_name` to its client, that begins now."""
    when = datetime.now(UTC)
    return TrainingRunRecord(
        model_id,
        session_of(model_id),
        base_name,
        config,
        when,
        when,
        user_metadata=user_metadata or {},
        base_precision=base.engines.base_precision,
    )


def _check_hosted(config: LoraConfig) -> None:
    """InvalidRequestError for what the hosted service does not train."""
    rank = config.rank
    if rank & (rank - 1):
        below = 2 ** (rank.bit_length() - 1)
        raise InvalidRequestError(
            f"lora_config.rank: {rank} must be a power of 2, as on the hosted service (--strict-hosted): choose "
            f"{below} or {2 * below}"
        )
    if config.train_vision:
        raise InvalidRequestError(
            "lora_config.train_vision: the hosted service never trains a vision tower, and this server refuses what it "
            "does not take (--strict-hosted)"
        )


TOUCH_SECONDS = 60.0
"""How far a run's `last_request_at` may lag behind."""

NAMED = 3
"""Runs that an error names as those to end first."""


def _least_used(runs: Collection[TrainingRun]) -> str:
    """In words, those of `runs` that had no request for longest."""
    first = sorted(runs, key=lambda run: run.requested_at)[:NAMED]
    found = (f"{run.model_id} (last request at {run.record.last_request_at:%Y-%m-%d %H:%M} UTC)" for run in first)
    return ", ".join(found)


def count_of_steps(steps: int) -> str:
    """In words."""
    return f"{steps} optimizer step{'' if steps == 1 else 's'}"


def why_lost(session: SessionRecord | None) -> str:
    """Why a session that is not alive was lost."""
    if session is not None and session.why_ended is not None:
        return f"its session has ended ({session.why_ended})"
    return "the server was restarted"


async def _how_to_go_on(store: Store, model_id: str) -> str:
    checkpoints = await DATABASE.run(store.list_checkpoints, model_id)
    saved = [c for c in checkpoints if c.kind == "weights"]
    saved = [c for c in saved if not c.unusable]
    if not saved:
        return "It has no saved checkpoint."
    return (
        f"Its last checkpoint is {saved[0].tinker_path}; continue with create_training_client_from_state_with_optimizer"
    )
