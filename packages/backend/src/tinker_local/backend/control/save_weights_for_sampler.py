"""`save_weights_for_sampler`: capture a version in the run's order; publish, load and verify it beside the order."""

import asyncio
import logging
from collections.abc import Awaitable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from tinker_local.backend.adapters.adapter import AdapterDType, AdapterState, AdapterVersion
from tinker_local.backend.control.checkpoint_lifetime import check_ttl
from tinker_local.backend.control.moving_weights import InFlightClient, InFlightSave, InFlightTarget
from tinker_local.backend.control.sampler_versions import SamplerVersions
from tinker_local.backend.control.sampling_sessions import Sampling
from tinker_local.backend.control.sessions import check_user_metadata
from tinker_local.backend.control.training_runs import Command, TrainingRun
from tinker_local.backend.models.adapter_check import explained_by_rounding, logprobs_under
from tinker_local.backend.models.agreement import compare, sampler_logprobs, worst
from tinker_local.backend.models.served_models import ServedModel
from tinker_local.backend.process.process_group import ProcessEndedError
from tinker_local.backend.scheduling.operations import Operation
from tinker_local.backend.storage.names import check_checkpoint_name
from tinker_local.backend.storage.records import CheckpointRecord
from tinker_local.backend.storage.store import Store
from tinker_local.backend.storage.versions import VersionFolders
from tinker_local.backend.threads import DISK
from tinker_local.types import (
    InternalError,
    InvalidRequestError,
    SaveWeightsForSamplerRequest,
    UnsupportedError,
)

log = logging.getLogger(__name__)

Expected = Awaitable[npt.NDArray[np.float32]]
"""The trainer's logprobs of the probes, which it may still be computing."""


class SaveWeightsForSampler:
    """Makes sampler versions, named and ephemeral. Only a version that the sampler serves correctly is given out."""

    def __init__(
        self,
        store: Store,
        folders: VersionFolders,
        versions: SamplerVersions,
        sampling: Sampling,
    ) -> None:
        self._store = store
        self._folders = folders
        self._versions = versions
        self._sampling = sampling
        self._count = 0

    def save(self, request: SaveWeightsForSamplerRequest) -> Command:
        """Capture and publish a version. The operation ends once it is durable (if named), loaded and verified."""

        async def run(model: TrainingRun, operation: Operation[dict[str, Any]]) -> None:
            self._check(request, model)
            scheduler, trainer = model.base.scheduler, model.base.engines.trainer
            # A checkpoint keeps all digits; an ephemeral version only those that the sampler reads.
            dtype: AdapterDType = "float32" if request.path is not None else model.base.engines.sampler.adapter_dtype
            loop = asyncio.get_running_loop()
            captured: asyncio.Future[AdapterState] = loop.create_future()

            def capture() -> npt.NDArray[np.float32]:
                """Both in one call, to wait for the trainer's thread once; the state is passed on at once."""
                state = trainer.capture(model.model_id, optimizer=False, dtype=dtype)
                loop.call_soon_threadsafe(captured.set_result, state)
                return trainer.logprobs(model.model_id, *model.base.probes.adapter)

            expected = asyncio.ensure_future(scheduler.call(capture))
            # An in-flight version that a newer one supersedes does not ask for it.
            expected.add_done_callback(lambda done: done.cancelled() or done.exception())
            await asyncio.wait((captured, expected), return_when=asyncio.FIRST_COMPLETED)
            if not captured.done():
                await expected  # raises
            state, steps = captured.result(), model.steps
            if request.kind == "inflight":
                target = await self._sampling.in_flight_target(model.model_id, model.record.session_id, model.base)
                publish = self._publish_in_flight(
                    model, operation, request, state, steps, expected, target, target.begin_save(steps)
                )
            elif request.path is None:
                publish = self._publish_ephemeral(model, operation, request, state, steps, expected)
            else:
                record = model.checkpoint("sampler_weights", request.path, request.ttl_seconds, request.user_metadata)
                publish = self._publish_named(model, operation, record, state, steps, expected)
            model.beside(operation, publish)
            await asyncio.wait((expected,))  # the run continues once the trainer has finished

        return run

    @staticmethod
    def _check(request: SaveWeightsForSamplerRequest, model: TrainingRun) -> None:
        if request.kind == "inflight" and request.path is not None:
            raise InvalidRequestError(
                f"path: {request.path!r} would name weights that move (kind='inflight'); save a name with "
                "kind='snapshot', which keeps the weights of this moment"
            )
        if request.kind == "inflight" and (why := model.base.engines.sampler.why_not_in_flight):
            raise UnsupportedError(
                f"kind: 'inflight' is not possible on this server: {why}; use 'snapshot', which keeps the weights of "
                "this moment"
            )
        if (request.path is None) == (request.sampling_session_seq_id is None):
            raise InvalidRequestError("path: give either path or sampling_session_seq_id")
        if request.path is not None:
            check_checkpoint_name(request.path, "path")
            check_user_metadata(request.user_metadata)
            check_ttl(request.ttl_seconds)
        elif request.ttl_seconds is not None or request.user_metadata is not None:
            raise UnsupportedError("ttl_seconds, user_metadata: only for a named save")

    async def _publish_named(
        self,
        model: TrainingRun,
        operation: Operation[dict[str, Any]],
        record: CheckpointRecord,
        state: AdapterState,
        steps: int,
        expected: Expected,
    ) -> None:
        written = await DISK.run(self._store.write_checkpoint, record, state, overwrite=False)
        version = self._versions.named(written, just_written=True)
        model.saved_for_sampler(version.name, steps)
        operation.timeline.enter("loading")
        try:
            await self._load_and_verify(model.base, version, state, expected)
        except Exception:
            await model.base.engines.sampler.remove_version(version)
            await DISK.run(self._store.delete_checkpoint, written)
            raise
        operation.succeed({"path": written.tinker_path})

    async def _publish_ephemeral(
        self,
        model: TrainingRun,
        operation: Operation[dict[str, Any]],
        request: SaveWeightsForSamplerRequest,
        state: AdapterState,
        steps: int,
        expected: Expected,
    ) -> None:
        name = await self._in_memory(model, request, state)
        model.saved_for_sampler(name, steps)
        operation.timeline.enter("loading")
        try:
            await self._load_and_verify(model.base, self._versions.ephemeral(name), state, expected)
            assert request.sampling_session_seq_id is not None
            session_id = await self._sampling.open_ephemeral(
                model.record.session_id, request.sampling_session_seq_id, model.record.base_model, model.base, name
            )
        except Exception:
            await self._versions.remove_ephemeral(model.base, name)
            raise
        operation.succeed({"sampling_session_id": session_id})
        self._folders.write(name)

    async def _in_memory(self, model: TrainingRun, request: SaveWeightsForSamplerRequest, state: AdapterState) -> str:
        """The name of a new ephemeral version of `state`, which the sampler can load."""
        self._count += 1
        name = f"{model.model_id}/{request.seq_id}#{self._count}"
        await self._folders.publish(name, state)
        return name

    async def _publish_in_flight(
        self,
        model: TrainingRun,
        operation: Operation[dict[str, Any]],
        request: SaveWeightsForSamplerRequest,
        state: AdapterState,
        steps: int,
        expected: Expected,
        target: InFlightTarget,
        number: int,
    ) -> None:
        """The save ends when its version is captured and its client can sample; replicas follow."""
        name = await self._in_memory(model, request, state)
        assert request.sampling_session_seq_id is not None
        record = model.record
        try:
            session_id, kept = await self._sampling.open_in_flight(
                record.session_id,
                request.sampling_session_seq_id,
                record.base_model,
                model.base,
                name,
                lambda session_id: InFlightClient(target, number, f"{session_id}#{number}"),
            )
        except Exception:
            await self._versions.remove_ephemeral(model.base, name)
            raise
        version = self._versions.ephemeral(name)
        model.saved_for_sampler(target.version(number), steps)
        verify = partial(self._load_and_verify, model.base, version, state, expected, in_any_trainer=True)
        await target.put(InFlightSave(number, version, kept, verify))
        operation.succeed({"sampling_session_id": session_id})
        self._folders.write(name)

    @staticmethod
    async def _load_and_verify(
        base: ServedModel,
        version: AdapterVersion,
        state: AdapterState,
        expected: Expected,
        *,
        in_any_trainer: bool = False,
    ) -> None:
        """Load a version of `state` and check that the sampler computes what the trainer does. Where they differ by
        more than is usual, what rounding explains is measured. `in_any_trainer`: the save has ended, so if the trainer
        ends before it has computed `expected`, the next one does."""
        engines, probes, tolerance = base.engines, base.probes.adapter, base.engines.tolerance
        await engines.sampler.load_version(version)
        found = await sampler_logprobs(engines.sampler, version, probes, base.replicas)
        try:
            trained = await expected
        except ProcessEndedError:
            if not in_any_trainer:
                raise
            trained = await base.scheduler.call(logprobs_under, state, engines.trainer, probes)
        agreement = worst([each for logprobs in found for each in compare(probes, trained, logprobs)])
        if not agreement.difference <= tolerance and np.isfinite(agreement.difference):
            explained = await base.scheduler.call(explained_by_rounding, state, engines.trainer, probes)
            tolerance = max(tolerance, explained)
        if not agreement.difference <= tolerance:
            raise InternalError(
                f"the sampler does not serve the weights that were saved: its logprobs of a probe differ from the "
                f"trainer's by {agreement.difference:.3g} on average (at most {tolerance:.3g} is normal); {agreement}"
            )
