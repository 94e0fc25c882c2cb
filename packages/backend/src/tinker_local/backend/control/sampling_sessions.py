"""Sampling sessions, each on a base model or on one immutable version of an adapter; and the samples of each."""

import asyncio
import logging
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

from tinker_local.backend.adapters.adapter import AdapterVersion
from tinker_local.backend.control.base_precision import other_precision
from tinker_local.backend.control.checkpoint_lifetime import CheckpointUses, version_of
from tinker_local.backend.control.ephemeral_versions import EphemeralVersion, EphemeralVersions
from tinker_local.backend.control.mismatch import DrawnBy
from tinker_local.backend.control.moving_weights import InFlightClient, InFlightTarget, InFlightTargets
from tinker_local.backend.control.recorded_routes import RecordedRoutes
from tinker_local.backend.control.recorded_samples import RecordedSamples
from tinker_local.backend.control.sample_prompts import SamplePrompts
from tinker_local.backend.control.sampler_versions import SamplerVersions
from tinker_local.backend.control.sampling_clients import Completion, SamplingClients, client_of
from tinker_local.backend.control.sessions import Sessions
from tinker_local.backend.control.token_weights import TokenWeights
from tinker_local.backend.models.served_models import ServedModel, ServedModels
from tinker_local.backend.options import BackendOptions
from tinker_local.backend.rendering.grammar import Grammar
from tinker_local.backend.rendering.rendered_input import ReadPrompt, RenderedInput
from tinker_local.backend.sampling.prompt_scores import check_sample_topk
from tinker_local.backend.sampling.sampler import (
    Drawn,
    EngineTimes,
    Penalties,
    SampleWork,
    bytes_of,
    sampled_tokens,
    scores_alone,
    token_budget,
)
from tinker_local.backend.scheduling.operations import (
    ACTIVE,
    OBJECT_BYTES,
    Operation,
    Operations,
    QueueState,
    Timeline,
    WireForm,
    memory_state,
    owner_of,
    request_id_of,
    sampling_id_in,
    sequence_ids,
    session_of,
)
from tinker_local.backend.scheduling.quotas import InFlight, Quotas, request_bytes
from tinker_local.backend.scheduling.sample_turns import SamplerQueue
from tinker_local.backend.storage.names import parse_tinker_path
from tinker_local.backend.storage.records import ADMIN, LOCAL_OWNER, CheckpointRecord, SamplingSessionRecord
from tinker_local.backend.storage.store import Store
from tinker_local.backend.threads import DATABASE, DISK, Who
from tinker_local.types import (
    CreateSamplingSessionRequest,
    GoneError,
    InternalError,
    InvalidRequestError,
    ModelInput,
    NotFoundError,
    SampleOutput,
    SampleRequest,
    StorageFullError,
    UnsupportedError,
)
from tinker_local.types.codec import decode_sample_output, encode_sample_output

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class SamplingSession:
    """`ephemeral`: a version that lives as long as the session, or until it is dropped for newer ones; `checkpoint`: a
    named one, maybe `deleted`; `in_flight`: weights that move; `running`: the samples that have not ended, and what
    counts each out of what is in flight, unless it counts on until it is delivered.

    A session whose checkpoint is deleted refuses new samples and finishes those that it has accepted.
    """

    record: SamplingSessionRecord
    owner: str
    base: ServedModel
    clients: SamplingClients
    ephemeral: EphemeralVersion | None = None
    checkpoint: CheckpointRecord | None = None
    in_flight: InFlightClient | None = None
    deleted: bool = False
    running: dict[Operation[SampleOutput], Callable[[], None] | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BesidesRequest:
    """What the SDK's requests do not have, and those of other APIs do. `drawn` gets the sample's tokens as they are
    drawn, from any thread, before its result is there, which then has no logprobs. `grammar`: what they must spell.
    `uncount` gets what to call when the answer is delivered: until then the request counts for its owner, with
    `waiting` bytes that may wait for the client. None: it counts until it has ended. `read` gets the prompt as the
    model reads it, before any token is drawn."""

    drawn: Drawn | None = None
    grammar: Grammar | None = None
    uncount: list[Callable[[], None]] | None = None
    waiting: int = 0
    penalties: Penalties | None = None
    read: Callable[[RenderedInput], None] | None = None

    @property
    def size(self) -> int:
        """Bytes."""
        return self.waiting + (0 if self.grammar is None else len(self.grammar.text))


SDK_REQUEST = BesidesRequest()

_FORGOTTEN_AT_ONCE = 4096
"""Results that a client has read, before the event loop goes on with others."""


class Sampling:
    """Sampling sessions and what is sampled in them. Samples run concurrently, in no order."""

    def __init__(
        self,
        options: BackendOptions,
        quotas: Quotas,
        store: Store,
        versions: SamplerVersions,
        models: ServedModels,
        sessions: Sessions,
        operations: Operations,
        uses: CheckpointUses,
        clock: Callable[[], datetime],
    ) -> None:
        self._options = options
        self._store = store
        self._versions = versions
        self._base_models = models
        self._sessions = sessions
        self._operations = operations
        self._uses = uses
        self._clock = clock
        self._open: dict[str, SamplingSession] = {}
        self._of_session: dict[str, dict[str, None]] = {}  # their ids
        self._prompts = SamplePrompts(options)
        self.in_flight = InFlight(quotas)
        self.ephemeral = EphemeralVersions(quotas, versions)
        self.targets = InFlightTargets(self.ephemeral)
        self.token_weights = TokenWeights()
        self.recorded = RecordedSamples()
        self.routes = RecordedRoutes()
        self._in_samplers: dict[ServedModel, SamplerQueue] = {}
        self._told_precisions: set[str] = set()

    # Sessions -------------------------------------------------------------------------------------------------------

    async def create_session(
        self, request: CreateSamplingSessionRequest, *, read_as_public: bool = False, must_record: bool = True
    ) -> str:
        """A sampling session's id; the same request again gives the same one. `read_as_public`: the checkpoint is of
        another owner, and the session ends when it is unpublished. `must_record`: see `Sessions.create`."""
        session_id = sampling_id_in(request.session_id, request.sampling_session_seq_id)
        if session_id in self._open:
            return self._same(session_id, request)
        reader = (await self._sessions.require(request.session_id)).owner
        checkpoint = None if request.model_path is None else await self._checkpoint(request.model_path, reader)
        if checkpoint is None and request.base_model is None:
            raise InvalidRequestError("base_model: give base_model or model_path")
        name = self._base_models.served_name(request.base_model or (checkpoint.base_model if checkpoint else ""))
        base = self._base_models.get(name)
        if checkpoint is not None and checkpoint.base_model not in base.names:
            raise InvalidRequestError(
                f"base_model: {request.model_path} is for {checkpoint.base_model!r}, not {name!r}"
            )
        # While the checkpoint was looked up, the session may have ended, or the same request may have come again.
        owner = (await self._sessions.require(request.session_id)).owner
        if session_id in self._open:
            return self._same(session_id, request)
        record = SamplingSessionRecord(
            session_id, request.session_id, name, request.model_path, False, datetime.now(UTC), read_as_public
        )
        session = SamplingSession(record, owner, base, self._clients(), checkpoint=checkpoint)
        self._check_there(session)
        await self._add(session, must_record)
        return session_id

    def _same(self, session_id: str, request: CreateSamplingSessionRequest) -> str:
        """`session_id`, which is open, if it is what `request` asks for."""
        self._check_there(self._open[session_id])
        record = self._open[session_id].record
        asked = request.base_model
        same_base = asked is None or self._base_models.served_name(asked) == record.base_model
        if record.nameless or record.model_path != request.model_path or not same_base:
            raise InvalidRequestError(
                f"sampling_session_seq_id: {request.sampling_session_seq_id} is the sampler of "
                f"{'an ephemeral save' if record.nameless else record.model_path or record.base_model} already"
            )
        return session_id

    async def open_ephemeral(
        self, session_id: str, sampling_seq_id: int, base_name: str, base: ServedModel, version: str
    ) -> str:
        """A sampling session of an ephemeral version, which it owns from now on."""
        sampling_id = sampling_id_in(session_id, sampling_seq_id)
        owner = (await self._sessions.require(session_id)).owner
        if sampling_id in self._open:
            raise InvalidRequestError(f"sampling_session_seq_id: {sampling_seq_id} is taken in session {session_id}")
        record = SamplingSessionRecord(sampling_id, session_id, base_name, None, True, datetime.now(UTC))
        ephemeral = EphemeralVersion(version, self._versions.size(version), session_id, sampling_id, owner, base)
        self.ephemeral.add(ephemeral)
        try:
            await self._add(SamplingSession(record, owner, base, self._clients(), ephemeral))
        except Exception:
            self.ephemeral.forget(ephemeral)
            raise
        return sampling_id

    async def in_flight_target(self, run: str, session_id: str, base: ServedModel) -> InFlightTarget:
        """What in-flight clients of a training run of a live session sample from; GoneError if that has ended, which
        frees its targets only once."""
        await self._sessions.require(session_id)
        return self.targets.of(run, session_id, base)

    async def open_in_flight(
        self,
        session_id: str,
        sampling_seq_id: int,
        base_name: str,
        base: ServedModel,
        version: str,
        client: Callable[[str], InFlightClient],
    ) -> tuple[str, EphemeralVersion]:
        """A sampling session of weights that move, and what keeps `version`, the newest of them. `client` makes the
        session's client from its id."""
        sampling_id = sampling_id_in(session_id, sampling_seq_id)
        owner = (await self._sessions.require(session_id)).owner
        if sampling_id in self._open:
            raise InvalidRequestError(f"sampling_session_seq_id: {sampling_seq_id} is taken in session {session_id}")
        record = SamplingSessionRecord(sampling_id, session_id, base_name, None, True, datetime.now(UTC))
        size = self._versions.size(version)
        kept = EphemeralVersion(version, size, session_id, sampling_id, owner, base, pinned=True)
        self.ephemeral.add(kept)
        try:
            await self._add(SamplingSession(record, owner, base, self._clients(), in_flight=client(sampling_id)))
        except Exception:
            self.ephemeral.forget(kept)
            raise
        return sampling_id, kept

    async def _add(self, session: SamplingSession, must_record: bool = True) -> None:
        """Open `session` at once, so that its end finds it, and record it."""
        sampling_id = session.record.sampling_session_id
        self._remember(session)
        add = self._store.add_sampling_session if session.record.nameless else self._store.add_named_sampling_session
        try:
            with nullcontext() if must_record else suppress(StorageFullError, InvalidRequestError):  # of its quota
                await DATABASE.run(add, session.record)
        except Exception:
            self._open.pop(sampling_id, None)
            self._of_session.get(session.record.session_id, {}).pop(sampling_id, None)
            raise

    def _remember(self, session: SamplingSession) -> SamplingSession:
        """`session`, or the one that is open under its id already."""
        record = session.record
        self._tell_precision(session)
        self._of_session.setdefault(record.session_id, {})[record.sampling_session_id] = None
        return self._open.setdefault(record.sampling_session_id, session)

    async def get(self, sampling_session_id: str) -> SamplingSession:
        """An open session, or one of a named version from before a restart."""
        session = self._open.get(sampling_session_id)
        if session is not None:
            self._check_there(session)
            return session
        record = await DATABASE.run(self._store.get_sampling_session, sampling_session_id)
        if record is None:
            raise NotFoundError(f"sampling_session_id: there is no sampling session {sampling_session_id!r}")
        parent = await DATABASE.run(self._store.get_session, record.session_id)
        if parent is not None and parent.why_ended is not None:
            raise _gone(record, parent.why_ended)
        if record.nameless:
            raise InternalError(
                f"the sampler {sampling_session_id} was of an ephemeral save, and the server was restarted since; "
                "save again, or use save_weights_for_sampler(name), which survives"
            )
        owner = LOCAL_OWNER if parent is None else parent.owner
        checkpoint = None if record.model_path is None else await self._checkpoint(record.model_path, owner)
        base = self._base_models.get(record.base_model)
        if record.read_as_public is None and checkpoint is not None:
            own = owner in (ADMIN, await self._sessions.owner_of(checkpoint.training_run_id))
            record = replace(record, read_as_public=not own)
        session = SamplingSession(record, owner, base, self._clients(reopened=True), checkpoint=checkpoint)
        self._check_there(session)
        return self._remember(session)

    def _tell_precision(self, session: SamplingSession) -> None:
        """Say once, of each checkpoint, that it was trained on a base in other bits."""
        checkpoint = session.checkpoint
        if checkpoint is None or checkpoint.tinker_path in self._told_precisions:
            return
        if (notice := other_precision(checkpoint, session.base)) is not None:
            self._told_precisions.add(checkpoint.tinker_path)
            log.warning("samples: %s", notice)

    def _clients(self, *, reopened: bool = False) -> SamplingClients:
        return SamplingClients(self._options.result_retention, reopened=reopened)

    async def join(self, sampling_session_id: str) -> int:
        """A number for a copy of the session's client, whose samples begin at so many `CLIENT_BLOCK`s."""
        return (await self._for_good(sampling_session_id)).clients.join()

    async def completions(self, sampling_session_id: str, client: int, cursor: int, timeout: float) -> list[Completion]:
        """The samples of a client that ended after `cursor`; waits up to `timeout` seconds for the first."""
        session = self._open.get(sampling_session_id) or await self._for_good(sampling_session_id)
        return await session.clients.completions(client, cursor).after(cursor, timeout)

    async def retrieved(self, sampling_session_id: str, client: int, request_ids: Iterable[str]) -> None:
        """Forget these results, which a client has read; ignores ids of other clients. Others run in between."""
        for number, request_id in enumerate(request_ids, 1):
            if number % _FORGOTTEN_AT_ONCE == 0:
                await asyncio.sleep(0)
            owner, _, seq_id = request_id.rpartition(":")
            known = owner == sampling_session_id and self._operations.get(request_id) is not None
            if known and client_of(int(seq_id)) == client:
                self._operations.forget(request_id)

    async def record(self, sampling_session_id: str) -> SamplingSessionRecord:
        """What is recorded of an open session."""
        return (await self._for_good(sampling_session_id)).record

    async def _for_good(self, sampling_session_id: str) -> SamplingSession:
        """`get`, for calls that the SDK would repeat forever after a 5xx: a lost session raises GoneError."""
        try:
            return await self.get(sampling_session_id)
        except InternalError as error:
            raise GoneError(str(error)) from None

    async def _checkpoint(self, path: str, reader: str) -> CheckpointRecord:
        run, kind, name = parse_tinker_path(path, "model_path")
        if kind == "weights":
            raise InvalidRequestError(
                f"model_path: {path} is training state. Make a sampler version of it with your ServiceClient, and "
                f'sample from its path: service.create_training_client_from_state("{path}").result()'
                f'.save_weights_for_sampler("{name}").result().path'
            )
        if kind == "external_weights":
            raise InvalidRequestError(
                f"model_path: {path} is an export; sample from what save_weights_for_sampler saved "
                f"(tinker://{run}/sampler_weights/...)"
            )
        record = await DATABASE.run(self._store.existing_checkpoint, run, kind, name, "model_path", reader)
        if record.unusable != "":
            await DISK.run(self._store.refuse_unusable, record, "model_path")
        return record

    async def end_session(self, session_id: str) -> None:
        """Cancel the samples of a session and free its ephemeral versions."""
        self.recorded.end_session(session_id)
        self.routes.end_session(session_id)
        self.token_weights.end_session(session_id)
        ending = [self._open[name] for name in self._of_session.pop(session_id, ())]
        for session in ending:
            del self._open[session.record.sampling_session_id]
            for operation in list(session.running):
                operation.cancel(_gone(session.record))
        await asyncio.gather(
            self.targets.end_session(session_id),
            *(self.ephemeral.remove(session.ephemeral) for session in ending if session.ephemeral is not None),
        )

    def _check_there(self, session: SamplingSession) -> None:
        checkpoint = session.checkpoint
        if checkpoint is not None and checkpoint.expires_at is not None and checkpoint.expires_at <= self._clock():
            raise NotFoundError(f"model_path: {checkpoint.tinker_path} expired at {checkpoint.expires_at.isoformat()}")
        if session.ephemeral is not None and session.ephemeral.dropped:
            raise NotFoundError(
                f"sampling_session_id: {session.record.sampling_session_id} was dropped: {session.ephemeral.dropped}"
            )
        if checkpoint is not None and session.deleted:
            raise NotFoundError(f"model_path: there is no checkpoint {checkpoint.tinker_path} any more")
        if checkpoint is not None and session.record.read_as_public and not checkpoint.public:
            raise NotFoundError(f"model_path: there is no checkpoint {checkpoint.tinker_path}")

    def checkpoint_changed(self, record: CheckpointRecord) -> None:
        """Give the sessions of a checkpoint its new expiry, or whether it is public now."""
        for session in self._of_checkpoint(record):
            session.checkpoint = record

    def checkpoint_deleted(self, record: CheckpointRecord) -> None:
        """Let the sessions of a checkpoint refuse new samples; accepted ones continue."""
        for session in self._of_checkpoint(record):
            session.deleted = True

    def _of_checkpoint(self, record: CheckpointRecord) -> list[SamplingSession]:
        version = version_of(record)
        return [s for s in self._open.values() if s.checkpoint is not None and version_of(s.checkpoint) == version]

    def stop_waiting(self) -> None:
        """End the polls that wait for samples."""
        for session in self._open.values():
            session.clients.stop_waiting()

    # Samples --------------------------------------------------------------------------------------------------------

    async def sample(self, request: SampleRequest, besides: BesidesRequest = SDK_REQUEST) -> Operation[SampleOutput]:
        """Queue a sample; the same (sampling session, seq_id) again is the same operation."""
        request_id = request_id_of(request.sampling_session_id, request.seq_id)
        if (known := self._operations.get(request_id)) is not None:
            return known
        self._check(request)
        lost: InternalError | None = None
        try:
            session = await self.get(request.sampling_session_id)  # before allocating anything per sample
        except InternalError as error:
            lost = error
        if (known := self._operations.get(request_id)) is not None:
            return known
        operation: Operation[SampleOutput] = Operation(request_id, "sample", request.num_samples)
        if lost is not None:  # for good: fail the future, because the SDK would submit again after a 5xx
            self._operations.add(operation)
            operation.fail(lost)
            return operation
        _check_context(request, session.base.engines.sampler.max_context_length)
        self._check_recording(request, session.base)
        size = request_bytes(request) + besides.size
        self.in_flight.check(session.record.session_id, session.owner, size)
        operation.owner, operation.failures = session.owner, session.base.counts.failures
        self._operations.add(operation)
        session.clients.watch(request.seq_id, operation)
        uncount = self.in_flight.enter(session.record.session_id, session.owner, size)
        session.base.counts.samples_accepted += 1
        session.running[operation] = None if besides.uncount is not None else uncount
        if besides.uncount is not None:
            besides.uncount.append(uncount)
        if session.checkpoint is not None:
            self._uses.take(session.checkpoint)
        if session.ephemeral is not None:
            self.ephemeral.sampled(session.ephemeral)
        task = asyncio.create_task(self._run(session, request, operation, besides))
        task.add_done_callback(lambda _: self._ended(session, operation))  # it may be cancelled before it starts
        operation.run_as(task)
        return operation

    def _check(self, request: SampleRequest) -> None:
        if request.num_samples > self._options.max_num_samples:
            raise InvalidRequestError(
                f"num_samples: {request.num_samples} is more than this server's {self._options.max_num_samples}"
            )

    def _check_recording(self, request: SampleRequest, base: ServedModel) -> None:
        """UnsupportedError if nothing would read what a request has recorded."""
        if request.record_stability_info and self._options.strict_losses and base.routed is None:
            raise UnsupportedError(
                "record_stability_info: only stable_reinforce reads it, which this server refuses (--strict-losses); "
                "leave it out and train with another loss, as with loss_fn=importance_sampling of a recipe"
            )

    async def _run(
        self,
        session: SamplingSession,
        request: SampleRequest,
        operation: Operation[SampleOutput],
        besides: BesidesRequest,
    ) -> None:
        try:
            output = await self._sample(session, request, operation, besides)
            size = bytes_of(output) + OBJECT_BYTES * len(output.sequences)
            form = WireForm(encode_sample_output, partial(decoded, operation.request_id))
            self._ended(session, operation)
            operation.succeed(output, size, form)
        except Exception as error:
            self._ended(session, operation)
            operation.fail_from(error)

    def _ended(self, session: SamplingSession, operation: Operation[SampleOutput]) -> None:
        """Count a sample out, however it ended, before its result can be read."""
        if operation in session.running:
            uncount = session.running.pop(operation)
            if session.checkpoint is not None:
                self._uses.leave(session.checkpoint)
            session.base.counts.samples_accepted -= 1
            if uncount is not None:
                uncount()
            if session.ephemeral is not None:
                self.ephemeral.sample_ended(session.ephemeral)

    async def _sample(
        self,
        session: SamplingSession,
        request: SampleRequest,
        operation: Operation[SampleOutput],
        besides: BesidesRequest,
    ) -> SampleOutput:
        session_id = session.record.session_id
        async with self._prompts.rendered(
            session.base, session.owner, session_id, request.prompt, operation.timeline
        ) as prompt:
            return await self._sample_rendered(session, request, operation, prompt, besides)

    async def _sample_rendered(
        self,
        session: SamplingSession,
        request: SampleRequest,
        operation: Operation[SampleOutput],
        prompt: RenderedInput,
        besides: BesidesRequest,
    ) -> SampleOutput:
        images, engines = len(prompt.images), session.base.engines
        operation.timeline.note(num_samples=request.num_samples, prompt_tokens=prompt.length, images=images)
        budget = _budget(request, prompt.length, engines.sampler.max_context_length)
        check_sample_topk(request.topk_sample_logprobs, request.num_samples, budget, engines.trainer.vocab_size)
        routed = session.base.routed if request.record_stability_info else None
        if routed is not None:
            self.routes.check(routed, request.num_samples, prompt.length, budget)
        if besides.read is not None:
            besides.read(prompt)
        work = SampleWork(
            prompt,
            self._version(session),
            request.sampling_params,
            request.num_samples,
            prompt_logprobs=request.prompt_logprobs,
            topk_prompt_logprobs=request.topk_prompt_logprobs,
            topk_sample_logprobs=request.topk_sample_logprobs,
            target_prompt_logprobs=request.target_prompt_logprobs,
            prompt_alt_tokens_k=request.prompt_alt_tokens_k,
            prompt_logprobs_last_n=request.prompt_logprobs_last_n,
            begun=partial(operation.timeline.enter, "running"),
            drawn=besides.drawn,
            grammar=besides.grammar,
            penalties=besides.penalties,
            routes=routed is not None,
            who=Who(session.owner, session.record.session_id),
        )
        queue = self._in_samplers.setdefault(session.base, SamplerQueue())
        session_id, sampler = session.record.session_id, session.base.engines.sampler

        async def run(piece: SampleWork) -> SampleOutput:
            if not piece.first_sample:
                operation.timeline.enter("queued")
            queue.enter(operation, session_id, request.num_samples)
            if session.in_flight is not None:
                return await session.in_flight.sample(session.base, piece)
            return await sampler.sample(piece)

        queue.wait(operation, session_id)
        try:
            output = await session.base.sample_turns.sample(session.owner, session_id, work, run)
        finally:
            queue.leave(operation)
        operation.timeline.note(
            sampled_tokens=sampled_tokens(output), cached_prompt_tokens=output.prompt_cache_hit_tokens
        )
        if isinstance(output.times, EngineTimes):
            note_times(session.base, operation.timeline, output.times)
        count(session.base, work, output)
        output = with_ids(output if besides.drawn is None else without_logprobs(output), operation.request_id)
        if session.in_flight is not None:
            self.token_weights.add(session_id, output.sequences, session.in_flight.target)
        if request.record_stability_info:
            self.recorded.add(session_id, output.sequences, prompt.length, self._version_name(session))
        return output if routed is None else self._routes_kept(session, output, prompt)

    def _routes_kept(self, session: SamplingSession, output: SampleOutput, prompt: RenderedInput) -> SampleOutput:
        """`output` without the experts of its sequences, which are recorded."""
        self.routes.add(session.record.session_id, session.base.path, output.sequences, prompt)
        without = tuple(sequence.model_copy(update={"routes": None}) for sequence in output.sequences)
        return output.model_copy(update={"sequences": without})

    def weights_of_tokens(self, sampler_id: str, sequence_id: str) -> list[dict[str, Any]]:
        """Which in-flight saves drew the tokens of a sequence of this sampling session; NotFoundError if that is not
        known."""
        if not sequence_id.startswith(f"{sampler_id}:"):
            raise InvalidRequestError(f"sequence_id: {sequence_id!r} is not of the sampling session {sampler_id!r}")
        return self.token_weights.find(session_of(sampler_id), sequence_id)

    async def read(self, session: SamplingSession, prompt: ModelInput) -> ReadPrompt:
        """A prompt as the model would read it."""
        timeline = Timeline("", "sample")
        session_id = session.record.session_id
        async with self._prompts.rendered(session.base, session.owner, session_id, prompt, timeline) as rendered:
            return ReadPrompt.of(rendered)

    def _version(self, session: SamplingSession) -> AdapterVersion | None:
        """The version that `session` samples from; None for a base model, and for weights that move, whose version is
        that of the moment when the sampler gets the sample."""
        if session.ephemeral is not None:
            return self._versions.ephemeral(session.ephemeral.name)
        return None if session.checkpoint is None else self._versions.named(session.checkpoint)

    def _version_name(self, session: SamplingSession) -> str | None:
        """Of the version that `session` samples from, also when that is gone; None for a base model, and where weights
        move."""
        if session.ephemeral is not None:
            return session.ephemeral.name
        return None if session.checkpoint is None else self._versions.name_of(session.checkpoint)

    def drawn_by(self, session_id: str, sequence_id: str) -> DrawnBy:
        """The weights that drew a sequence, for a run of this session: of an in-flight client, those of each token;
        else those of its record, if there is one, or of the sampling session that its id names. May be called from any
        thread."""
        if (each := self.token_weights.drawn_by(session_id, sequence_id)) is not None:
            return each
        if (record := self.recorded.known(session_id, sequence_id)) is not None:
            return record.version
        session = self._open.get(owner_of(owner_of(sequence_id)))
        return None if session is None or session.record.session_id != session_id else self._version_name(session)

    def state_of(self, operation: Operation[Any]) -> QueueState:
        """What an unfinished sample waits for."""
        session = self._open.get(owner_of(operation.request_id))
        if session is None:
            return ACTIVE
        base = session.base
        queue = self._in_samplers.get(base)
        if queue is None or operation not in queue:
            return ACTIVE  # its prompt is being prepared
        if base.memory_sharing.trainer_has_memory:
            return memory_state(session.record.session_id, [model.session_id for model in base.scheduler.running])
        return queue.state(operation, base.engines.sampler.sequences_waiting)


def _gone(record: SamplingSessionRecord, why: str = "") -> GoneError:
    """What to do when the session of a sampling client has ended, perhaps known `why`."""
    again = "ServiceClient().create_sampling_client"
    if record.nameless:
        how = (
            "its weights were of an ephemeral save and are gone. Load a checkpoint of its training run with a new "
            "ServiceClient, and save again; what save_weights_for_sampler(name) saves survives the session"
        )
    elif record.model_path is not None:
        how = f'create a new sampling client: {again}(model_path="{record.model_path}")'
    else:
        how = f'create a new sampling client: {again}(base_model="{record.base_model}")'
    sampler, reason = record.sampling_session_id, f" ({why})" if why else ""
    return GoneError(f"sampling_session_id: the session {record.session_id} of {sampler} has ended{reason}; {how}")


def _check_context(request: SampleRequest, limit: int) -> None:
    """Refuse at once, as the hosted service does, what can be seen not to fit: clients that shorten a conversation
    and try again tell this from a failed sample by its status. A prompt with an image that does not say its tokens is
    checked when it is rendered."""
    try:
        length = request.prompt.length
    except ValueError:
        return
    _budget(request, length, limit)


def _budget(request: SampleRequest, length: int, limit: int) -> int:
    """How many tokens may follow a prompt of `length`."""
    wanted = request.sampling_params.max_tokens
    return token_budget(length, wanted, limit, scored=scores_alone(request, wanted))


def with_ids(output: SampleOutput, request_id: str) -> SampleOutput:
    """`output` with the ids of its sequences, and without its times, which are on the operation's timeline."""
    ids = sequence_ids(request_id, len(output.sequences))
    sequences = (
        sequence.model_copy(update={"sequence_id": sequence_id})
        for sequence, sequence_id in zip(output.sequences, ids, strict=True)
    )
    return output.model_copy(update={"sequences": tuple(sequences), "times": None})


def without_logprobs(output: SampleOutput) -> SampleOutput:
    """What is left to know of a result that was streamed."""
    sequences = (sequence.model_copy(update={"logprobs": None, "topk_logprobs": None}) for sequence in output.sequences)
    return output.model_copy(update={"sequences": tuple(sequences)})


def decoded(request_id: str, encoded: bytes) -> SampleOutput:
    """What `encode_sample_output` has encoded, which leaves out the ids."""
    return with_ids(decode_sample_output(encoded), request_id)


def note_times(base: ServedModel, timeline: Timeline, times: EngineTimes) -> None:
    """Tell where the time of a sample went within the sampler, on its timeline and in metrics."""
    timeline.sampled(times)
    counts = base.counts
    for seconds, histogram in (
        (timeline.seconds_to("decode"), counts.first_token_seconds),
        (times.per_token, counts.token_seconds),
    ):
        if seconds is not None:
            histogram.add(seconds)


def count(base: ServedModel, work: SampleWork, output: SampleOutput) -> None:
    """Count what the sampler did."""
    counts = base.counts
    counts.samples += len(output.sequences)
    counts.prompt_tokens += work.prompt.length
    counts.sampled_tokens += sampled_tokens(output)
    spans = [span for sequence in output.sequences for span in sequence.drawn_under or ()]
    counts.in_flight_tokens += sum(span.tokens for span in spans)
    counts.tokens_on_older_keys += sum(span.tokens for span in spans if span.on_older_keys)
