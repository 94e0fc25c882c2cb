"""`InProcessBackend`: the whole Tinker API in this process, one async method per operation, on the shared types."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from tinker_local.backend.control.checkpoint_uses import CheckpointUses
from tinker_local.backend.control.checkpoints import Checkpoints
from tinker_local.backend.control.copies import Copies
from tinker_local.backend.control.external_weights import ExternalWeights
from tinker_local.backend.control.futures import Futures
from tinker_local.backend.control.load_weights import LoadWeights
from tinker_local.backend.control.preparation import bytes_of
from tinker_local.backend.control.sampler_versions import SamplerVersions
from tinker_local.backend.control.samples import Samples
from tinker_local.backend.control.sampling_sessions import SamplingSessions
from tinker_local.backend.control.save_weights_for_sampler import SaveWeightsForSampler
from tinker_local.backend.control.session_search import FoundSession, search_sessions
from tinker_local.backend.control.session_traces import SessionTraces
from tinker_local.backend.control.sessions import Sessions, now
from tinker_local.backend.control.signatures import Signatures
from tinker_local.backend.control.trained_model import TrainedModel
from tinker_local.backend.control.training_commands import TrainingCommands
from tinker_local.backend.control.training_runs import TrainingRuns
from tinker_local.backend.models.loading import load_base_models
from tinker_local.backend.models.metrics import ModelMetrics
from tinker_local.backend.models.served_models import EngineLoader, Progress, ServedModels, by_path
from tinker_local.backend.options import BackendOptions, ModelSource
from tinker_local.backend.scheduling.operations import Operation, OperationKind, Operations
from tinker_local.backend.scheduling.queue_states import QueueState
from tinker_local.backend.storage.records import CheckpointRecord, EndReason, SessionRecord, TrainingRunRecord
from tinker_local.backend.storage.store import Store
from tinker_local.backend.storage.versions import VersionFolders
from tinker_local.backend.traces.recorder import TraceRecorder
from tinker_local.types import (
    ApiError,
    CopyWeightsRequest,
    CreateModelRequest,
    CreateSamplingSessionRequest,
    CreateSessionRequest,
    ForwardBackwardOutput,
    ForwardBackwardRequest,
    InternalError,
    LoadWeightsRequest,
    NotFoundError,
    OptimStepOutput,
    OptimStepRequest,
    SampleOutput,
    SampleRequest,
    SaveWeightsExternalRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
    SessionCursor,
    SessionSearchRequest,
)

if TYPE_CHECKING:
    from tinker_local.backend.http.server import LoopbackServer

log = logging.getLogger(__name__)


class InProcessBackend:
    """The Tinker API without HTTP.

    Every operation that takes time returns an `Operation`: await it for the result. Operations of one model run in
    the order of their `seq_id`, from 1; different models, and samples, run independently.

        async with InProcessBackend([ModelSource("my/model", "path/to/folder")]) as backend:
            session = await backend.create_session()
            created = await backend.create_model(CreateModelRequest(session_id=session, model_seq_id=0, ...))
            model_id = (await created)["model_id"]
            output = await (await backend.forward_backward(ForwardBackwardRequest(model_id=model_id, seq_id=1, ...)))

    It belongs to the event loop that started it. `load` says what serves a model: real engines by default, fakes in
    tests. Errors are those of `tinker_local.types.errors`.
    """

    def __init__(
        self,
        models: Sequence[ModelSource],
        options: BackendOptions | None = None,
        *,
        load: EngineLoader | None = None,
        progress: Progress = log.info,
        clock: Callable[[], datetime] = now,
    ) -> None:
        if not models:
            raise ValueError("at least one model is needed")
        self._sources = by_path(models)
        self._load = load
        self._progress = progress
        self._clock = clock
        self.options = options or BackendOptions()
        self.models = ServedModels()
        self.ready = False
        self._closing = AsyncExitStack()

    # Life cycle -----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Load the models and open the store. Anything that was opened is closed again if this fails."""
        try:
            await self._start()
        except BaseException:
            await self._closing.aclose()
            raise

    async def _start(self) -> None:
        options = self.options
        self.store = Store(options.data_dir, clock=self._clock)
        self._closing.callback(self.store.close)
        self.folders = VersionFolders(options.data_dir)
        self._closing.callback(self.folders.close)
        self._closing.push_async_callback(self.models.close)
        await load_base_models(self.models, self._sources, options, self._load, self._progress)
        self.sessions = Sessions(self.store, options.session_timeout, self._end_session)
        recorder = TraceRecorder(self.sessions.is_live)
        self.operations = Operations(options.result_retention, recorder.record)
        uses = CheckpointUses()
        self.training = TrainingRuns(options, self.store, self.models, self.sessions, self.operations)
        self.commands = TrainingCommands(options, self.store, self.training, self.operations)
        self._closing.callback(self.commands.close)
        self.loads = LoadWeights(self.store, self.models, self.sessions, self.training, self.commands, uses)
        versions = SamplerVersions(self.store, self.folders, self.models)
        self.sampling = SamplingSessions(
            options, self.store, versions, self.models, self.sessions, self.operations, self._clock
        )
        self.samples = Samples(options, self.sampling, versions, self.operations, uses)
        self._closing.callback(self.samples.close)
        self.saves_for_sampler = SaveWeightsForSampler(self.store, self.folders, versions, self.commands, self.sampling)
        self.futures = Futures(self.store, self.sessions, self.training, self.sampling, self.samples, self.operations)
        self.checkpoints = Checkpoints(self.store, versions, self.sampling, uses, self._clock)
        self._closing.push_async_callback(self.checkpoints.close)
        self.copies = Copies(self.store, self.checkpoints, self.sessions, self.training, self._clock)
        await self.checkpoints.sweep()
        signatures = Signatures(options.data_dir, self._clock)
        self.external_weights = ExternalWeights(self.store, self.commands, uses, signatures, self._clock)
        self.traces = SessionTraces(recorder, self.store, self.sessions, signatures, options.data_dir / "traces")
        self._closing.push_async_callback(self.traces.close)
        housekeeping = asyncio.create_task(self._keep_house(), name="housekeeping")
        self._closing.push_async_callback(_cancel, housekeeping)
        self.ready = True

    def stop_waiting(self) -> None:
        """Let all long polls return, finished or not: the server is about to stop."""
        if self.ready:
            for operation in self.operations.unfinished():
                operation.stop_waiting()
            self.sampling.stop_waiting()

    async def close(self) -> None:
        """Stop everything. Checkpoints that are being written are finished; other operations end with an error."""
        if not self.ready:
            return
        self.ready = False
        await self.training.finish_saves()
        for operation in self.operations.unfinished():
            operation.cancel(InternalError("the server was stopped"))
        await self._closing.aclose()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def serve_in_thread(self, host: str = "127.0.0.1", port: int = 0) -> "LoopbackServer":
        """Start this backend behind HTTP in a thread of its own, for a client of the same process."""
        from tinker_local.backend.http.server import LoopbackServer

        return LoopbackServer(self, host, port)

    async def _keep_house(self) -> None:
        """End silent sessions, forget old results and traces, delete expired checkpoints."""
        pause = max(0.05, min(5.0, self.options.session_timeout / 4))
        while True:
            await asyncio.sleep(pause)
            try:
                await self.sessions.end_silent()
                self.operations.forget_old()
                await self.checkpoints.sweep()
                await self.traces.forget_old()
            except Exception:
                log.exception("housekeeping failed; it goes on")

    async def _end_session(self, session_id: str) -> None:
        """Free everything of a session; what fails to be freed keeps nothing else."""
        freed = (self.sampling.end_session(session_id), self.training.end_session(session_id))
        for error in await asyncio.gather(*freed, return_exceptions=True):
            if isinstance(error, BaseException):
                log.error("the session %s was not freed completely", session_id, exc_info=error)

    # Sessions -------------------------------------------------------------------------------------------------------

    async def create_session(self, request: CreateSessionRequest | None = None, *, heartbeats: bool = False) -> str:
        """A new session's id. `heartbeats`: it ends when they stop, which is for clients that may vanish."""
        return await self.sessions.create(request or CreateSessionRequest(), heartbeats=heartbeats)

    async def session_heartbeat(self, session_id: str) -> None:
        """Keep a session alive; one made with `heartbeats` ends `session_timeout` seconds after the last."""
        await self.sessions.heartbeat(session_id)

    async def finish_session(self, session_id: str, reason: EndReason = "success", detail: str | None = None) -> None:
        """End a session and free its models and nameless samplers; `detail` is kept with the reason."""
        await self.sessions.end(session_id, reason, detail)

    async def list_sessions(self, limit: int, offset: int) -> list[str]:
        """Ids, newest first."""
        records, _ = await asyncio.to_thread(self.store.list_sessions, limit, offset)
        return [record.session_id for record in records]

    async def get_session(self, session_id: str) -> tuple[SessionRecord, list[str], list[str]]:
        """A session, and the ids of its training runs and samplers."""
        record = await self.sessions.record(session_id)
        return record, *(await asyncio.to_thread(self.store.session_members, session_id))

    async def search_sessions(self, request: SessionSearchRequest) -> tuple[list[FoundSession], SessionCursor | None]:
        """A page of the sessions that fit, newest first, and where the next page begins."""
        return await search_sessions(self.store, self.sessions, request)

    # Training -------------------------------------------------------------------------------------------------------

    async def create_model(self, request: CreateModelRequest) -> Operation[dict[str, Any]]:
        """A fresh LoRA adapter: result `{"model_id"}`."""
        return await self.training.create(request)

    async def get_info(self, model_id: str) -> TrainedModel:
        """The live model behind an id."""
        return await self.training.info(model_id)

    async def forward_backward(self, request: ForwardBackwardRequest) -> Operation[ForwardBackwardOutput]:
        """Logprobs, loss and (unless `forward_only`) the gradient, which is added to that of earlier calls.

        This and whatever else has a `seq_id` raises TooManyRequestsError if as much is queued as the options allow:
        send it again, with the same `seq_id`, after its `retry_after` seconds.
        """
        return await self.forward_backward_encoded(
            request.model_id,
            request.seq_id,
            forward_only=request.forward_only,
            size=bytes_of(request),
            decode=lambda: request,
        )

    async def forward_backward_encoded(
        self, model_id: str, seq_id: int, *, forward_only: bool, size: int, decode: Callable[[], ForwardBackwardRequest]
    ) -> Operation[ForwardBackwardOutput]:
        """`forward_backward` of a request of `size` bytes that `decode` unpacks in a worker thread."""
        return await self.commands.forward_backward(
            model_id, seq_id, forward_only=forward_only, size=size, decode=decode
        )

    async def optim_step(self, request: OptimStepRequest) -> Operation[OptimStepOutput]:
        """One AdamW update with the gradients added up, which are cleared."""
        return await self.commands.optim_step(request)

    async def save_weights(self, request: SaveWeightsRequest) -> Operation[dict[str, Any]]:
        """A durable checkpoint of weights and optimizer: result `{"path"}`."""
        return await self.commands.save_weights(request)

    async def load_weights(self, request: LoadWeightsRequest) -> Operation[dict[str, Any]]:
        """A checkpoint into a new model (`session_id`, `model_seq_id`) or an existing one (`model_id`, `seq_id`)."""
        return await self.loads.load(request)

    async def save_weights_for_sampler(self, request: SaveWeightsForSamplerRequest) -> Operation[dict[str, Any]]:
        """An immutable version to sample from: result `{"path"}` if named, else `{"sampling_session_id"}`."""
        return await self.saves_for_sampler.save(request)

    async def save_weights_external(self, request: SaveWeightsExternalRequest) -> Operation[dict[str, Any]]:
        """A PEFT folder to be downloaded: result `{"path", "size_bytes"}`; `external_weights.sign` gives its files."""
        return await self.external_weights.save(request)

    async def refuse(self, kind: OperationKind, model_id: str, seq_id: int, error: ApiError) -> Operation[Any]:
        """Let a malformed command fail in its place, so that the model's order goes on."""
        return await self.commands.refuse(kind, model_id, seq_id, error)

    # Sampling -------------------------------------------------------------------------------------------------------

    async def create_sampling_session(self, request: CreateSamplingSessionRequest) -> str:
        """A sampling session's id, on a base model or on a named sampler checkpoint."""
        return await self.sampling.create(request)

    async def sample(self, request: SampleRequest) -> Operation[SampleOutput]:
        """Sample sequences, and score the prompt if asked."""
        return await self.samples.sample(request)

    async def cancel(self, request_id: str) -> None:
        """Stop a sample and free what it holds; unknown ids and finished operations are left alone."""
        self.futures.cancel(request_id)

    def queue_state(self, operation: Operation[Any]) -> QueueState:
        """What an operation that is not done waits for: for others of the same device, or for nobody."""
        return self.futures.queue_state(operation)

    async def operation(self, request_id: str) -> Operation[Any]:
        """The operation behind a request id; if this process does not know it, why it is lost."""
        return await self.futures.operation(request_id)

    # What is stored -------------------------------------------------------------------------------------------------

    async def get_sampler(self, sampling_session_id: str) -> dict[str, Any]:
        """`sampler_id`, `base_model` and, for a named checkpoint, `model_path`."""
        record = await self.sampling.record(sampling_session_id)
        found = {"sampler_id": sampling_session_id, "base_model": record.base_model}
        return found if record.model_path is None else {**found, "model_path": record.model_path}

    async def get_training_run(self, training_run_id: str) -> TrainingRunRecord:
        record = await asyncio.to_thread(self.store.get_training_run, training_run_id)
        if record is None:
            raise NotFoundError(f"training_run_id: there is no training run {training_run_id!r}")
        return record

    async def list_training_runs(self, limit: int, offset: int) -> tuple[list[TrainingRunRecord], int]:
        """Newest first, and the count of all."""
        return await asyncio.to_thread(self.store.list_training_runs, limit, offset)

    async def list_checkpoints(self, training_run_id: str) -> list[CheckpointRecord]:
        """All checkpoints of a training run."""
        await self.get_training_run(training_run_id)
        return await asyncio.to_thread(self.store.list_checkpoints, training_run_id)

    async def list_all_checkpoints(self, limit: int, offset: int) -> tuple[list[CheckpointRecord], int]:
        """Newest first, and the count of all."""
        return await asyncio.to_thread(self.store.list_all_checkpoints, limit, offset)

    async def get_checkpoint(self, tinker_path: str) -> CheckpointRecord:
        """The checkpoint behind a tinker path."""
        return await self.checkpoints.get(tinker_path)

    async def delete_checkpoint(self, tinker_path: str) -> None:
        """Delete a checkpoint, on disk too; its sampling sessions end."""
        await self.checkpoints.delete(tinker_path)

    async def publish_checkpoint(self, tinker_path: str) -> None:
        """Mark a checkpoint as public; a local server has one owner, who reads it either way."""
        await self.checkpoints.set_public(tinker_path, True)

    async def unpublish_checkpoint(self, tinker_path: str) -> None:
        """Mark a checkpoint as private again."""
        await self.checkpoints.set_public(tinker_path, False)

    async def set_checkpoint_ttl(self, tinker_path: str, ttl_seconds: int | None) -> None:
        """Let a checkpoint expire `ttl_seconds` from now, or never."""
        await self.checkpoints.set_ttl(tinker_path, ttl_seconds)

    async def copy_weights(self, request: CopyWeightsRequest, idempotency_key: str | None = None) -> str:
        """The tinker path of a copy; the same key, or the same run, is the same copy."""
        return await self.copies.copy(request, idempotency_key)

    def metrics(self) -> dict[str, ModelMetrics]:
        """What was counted since the start, by the first name of each copy of weights; empty unless `ready`."""
        return {model.names[0]: model.metrics() for model in self.models.distinct()} if self.ready else {}

    def capabilities(self) -> list[dict[str, Any]]:
        """The models served, by every name."""
        return [
            {
                "model_name": name,
                "max_context_length": self.models.get(name).max_context_length,
                "trainable": True,
                "sampleable": True,
            }
            for name in self.models.names()
        ]


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
