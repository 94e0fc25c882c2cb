"""`ControlPlane`: puts the parts of the API together, starts them with the base models, and ends them."""

import asyncio
import logging
import shutil
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from tinker_local.backend.control.autosaves import Autosaves
from tinker_local.backend.control.checkpoint_lifetime import CheckpointUses
from tinker_local.backend.control.checkpoints import Checkpoints
from tinker_local.backend.control.exports import Exports
from tinker_local.backend.control.imports import Imports
from tinker_local.backend.control.load_weights import LoadWeights
from tinker_local.backend.control.lost_requests import LostRequests
from tinker_local.backend.control.recorded_sessions import RecordedSessions
from tinker_local.backend.control.restore_runs import RestoreRuns
from tinker_local.backend.control.sampler_versions import SamplerVersions
from tinker_local.backend.control.sampling_sessions import Sampling
from tinker_local.backend.control.save_weights_for_sampler import SaveWeightsForSampler
from tinker_local.backend.control.session_traces import SessionTraces
from tinker_local.backend.control.sessions import SessionEnd, Sessions, now
from tinker_local.backend.control.signatures import Signatures
from tinker_local.backend.control.training_commands import Training
from tinker_local.backend.control.training_runs import TrainingRuns
from tinker_local.backend.models.load_engines import load_base_models
from tinker_local.backend.models.metrics import ModelMetrics
from tinker_local.backend.models.served_models import EngineLoader, Progress, ServedModel, ServedModels, by_path
from tinker_local.backend.options import BackendOptions, ModelSource
from tinker_local.backend.scheduling.operation_totals import OperationTotals
from tinker_local.backend.scheduling.operations import Operation, Operations
from tinker_local.backend.scheduling.quotas import Amounts, Quotas
from tinker_local.backend.scheduling.result_memory import ResultMemory
from tinker_local.backend.scheduling.run_queue import total
from tinker_local.backend.storage.curves import Curves
from tinker_local.backend.storage.model_paths import record_model_paths
from tinker_local.backend.storage.result_files import ResultFiles
from tinker_local.backend.storage.store import Store
from tinker_local.backend.storage.versions import VersionFolders
from tinker_local.backend.storage.watched_logs import WatchedLogs
from tinker_local.backend.threads import DATABASE, DISK
from tinker_local.types import InternalError

log = logging.getLogger(__name__)

END_SECONDS = 10.0
"""What a stop keeps of its time to end when runs are saved, or half of it if that is less: engines that hang are given
up after some seconds."""


SAMPLER_SECONDS = 10.0
"""For which a stop lets a trainer wait for the sampler's memory, or a third of the time for saving if that is less."""


class ControlPlane:
    """The life cycle, and the parts that it starts:

    `sessions`: create, heartbeat, finish, list, search. `runs`: training runs, created and ended. `training`: the
    commands of a run. `sampling`: sampling sessions and samples. `checkpoints`: look-up, expiry, deletion,
    copies. `imports`: adapters that were trained elsewhere. `exports`: signed downloads. `curves`: what each run has
    done. `operations`: by request id. `recorded`: sessions whose conversations are kept.
    `lost_requests`: why an operation is not there. `traces`: where a session's time went. `models`: the base models.
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
        self.quotas = Quotas(self.options)
        self.on_own_change: Callable[[str, str], None] = lambda action, path: None
        """Called when the server changes checkpoints by itself: what it did, and to which path."""
        self.key_problem: Callable[[], str | None] = lambda: None
        """Why no key can be checked now."""
        self.on_failure: Callable[[Operation[Any]], None] = lambda operation: None
        """Called with each operation that ends with an error."""
        self.totals = OperationTotals()
        self.models = ServedModels()
        self.ready = False
        self._stopping = False
        self._closing = AsyncExitStack()

    # Life cycle -----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Load the base models and open the store. If this fails, everything opened so far is closed."""
        try:
            await self._start()
        except BaseException:
            await self._closing.aclose()
            raise

    async def _start(self) -> None:
        options = self.options
        self.store = Store(
            options.data_dir,
            clock=self._clock,
            grace=options.expiry_grace,
            most_bytes=lambda owner: self.quotas.of(owner).storage_bytes,
        )
        self.quotas.disk_bytes = shutil.disk_usage(options.data_dir).total
        self._closing.callback(self.store.close)
        self.folders = VersionFolders(options.data_dir)
        self._closing.callback(self.folders.close)
        self._closing.push_async_callback(self.models.close)
        await load_base_models(self.models, self._sources, options, self._load, self._progress)
        await DATABASE.run(record_model_paths, options.data_dir, self._sources)
        self.sessions = Sessions(self.store, options.session_timeout, self._end_session)
        results = ResultMemory(options.result_memory_bytes, ResultFiles(options.data_dir / "results"))
        self._closing.push_async_callback(results.close)
        self.operations = Operations(
            options.result_retention,
            options.max_result_bytes_per_session,
            options.max_result_bytes,
            results,
        )
        self.operations.on_end = self._ended
        uses = CheckpointUses()
        signatures = Signatures(options.data_dir, self._clock)
        versions = SamplerVersions(self.store, self.folders, self.models)
        self.sampling = Sampling(
            options, self.quotas, self.store, versions, self.models, self.sessions, self.operations, uses, self._clock
        )
        self._closing.push_async_callback(self.sampling.targets.close)
        self.recorded = RecordedSessions(options.data_dir, options.record_sessions, self._clock)
        self.runs = TrainingRuns(options, self.quotas, self.store, self.models, self.sessions, self.operations)
        self.autosaves = Autosaves(
            options, self.store, self.runs, lambda path: self.on_own_change("save checkpoint", path)
        )
        for model in self.models.distinct():
            if model.supervision is not None:
                model.supervision.adapters = RestoreRuns(model, self.store, self.runs, uses)
        self.exports = Exports(self.store, uses, signatures, self._clock)
        self.curves = Curves(options.data_dir / "curves", self.store.take_curve)
        self.store.quota.curve_sizes = self.curves.sizes
        self.logs = None if options.watch_logs is None else WatchedLogs(options.watch_logs)
        loads = LoadWeights(self.store, self.models, self.sessions, self.runs, uses)
        saves = SaveWeightsForSampler(self.store, self.folders, versions, self.sampling)
        self.training = Training(
            self.quotas,
            self.store,
            self.runs,
            self.operations,
            loads,
            saves,
            self.exports,
            self.curves,
            self.sampling.recorded,
            self.recorded,
            self.sampling.drawn_by,
            self.sampling.routes,
            strict_losses=options.strict_losses,
        )
        self.lost_requests = LostRequests(self.store, self.sessions, self.runs, self.sampling)
        self.checkpoints = Checkpoints(
            self.store,
            versions,
            self.sampling,
            self.sessions,
            self.runs,
            uses,
            self._clock,
            lambda path: self.on_own_change("delete checkpoint", path),
        )
        self._closing.push_async_callback(self.checkpoints.close)
        self.imports = Imports(options, self.models, self.sessions, self.runs, self.training, self.checkpoints)
        await self.checkpoints.sweep()
        self.traces = SessionTraces(
            self.operations.recorder, self.store, self.sessions, signatures, options.data_dir / "traces"
        )
        self._closing.push_async_callback(self.traces.close)
        for name, work in (
            ("housekeeping", self._keep_house()),
            ("autosaves", self.autosaves.save_now_and_then()),
            ("examination", self.checkpoints.examine()),
        ):
            self._closing.push_async_callback(_cancel, asyncio.create_task(work, name=name))
        self.ready = True

    async def stop(self) -> None:
        """End training: save every run that would lose optimizer steps, so that the server ends within `stop_timeout`
        seconds, then fail its requests with the path. `close` follows; by itself, it saves nothing."""
        if not self.ready or self._stopping:
            return
        self._stopping = True
        runs, seconds = self.runs.all_live(), self.options.stop_timeout
        seconds = max(seconds - END_SECONDS, seconds / 2)
        if unsaved := sum(run.unsaved_steps > 0 for run in runs):
            self._progress(f"saving {unsaved} training runs, for {seconds:g} s at most; a second signal skips this")
        for model in self.models.distinct():
            model.give_up_sampler(min(SAMPLER_SECONDS, seconds / 3))
        await self.autosaves.save_all(runs, seconds, self._progress)
        for run in self.runs.all_live():
            if run.ready:
                gone = run.would_lose()
                await self.runs.lose(run, f"the server was stopped, and {gone}" if gone else "the server was stopped")

    def skip_saving(self) -> None:
        """Let `stop` end at once."""
        if self.ready:
            self.autosaves.skip()

    def stop_waiting(self) -> None:
        """End all long polls, finished or not: the server is about to stop."""
        if self.ready:
            for operation in self.operations.unfinished():
                operation.stop_waiting()
            self.sampling.stop_waiting()

    async def close(self) -> None:
        """Stop everything. Saves in progress are finished; other operations end with an error."""
        if not self.ready:
            return
        self.ready = False
        await self.runs.finish_saves()
        for operation in self.operations.unfinished():
            operation.cancel(InternalError("the server was stopped"))
        await self._closing.aclose()

    async def _keep_house(self) -> None:
        """Look at the disk, end silent sessions, forget old results and traces, delete expired checkpoints."""
        pause = max(0.05, min(5.0, self.options.session_timeout / 4))
        while True:
            await asyncio.sleep(pause)
            self.operations.forget_old()
            for chore in (
                *(self._look_at_disk, partial(self.sessions.end_silent, pause), self.checkpoints.sweep),
                *(self._prune, self.traces.forget_old, self.recorded.sweep),
            ):
                try:
                    await chore()
                except Exception:
                    log.exception("housekeeping failed; it goes on")

    async def _look_at_disk(self) -> None:
        await DISK.run(self.store.look_at_disk)

    async def _prune(self) -> None:
        if await self.sessions.prune(timedelta(days=self.options.keep_sessions)):
            await self.curves.keep(self.store.existing_runs)
            self.store.quota.recount()

    async def _end_session(self, session_id: str, end: SessionEnd) -> None:
        """Free everything that a session holds; one failure does not stop the rest. If its client did not finish as it
        wanted to, its training is saved first."""

        async def end_runs() -> None:
            if not end.clean:
                await self.autosaves.save_all(self.runs.of_session(session_id), self.options.stop_timeout, log.warning)
            await self.runs.end_session(session_id)

        freed = (self.sampling.end_session(session_id), end_runs())
        for error in await asyncio.gather(*freed, return_exceptions=True):
            if isinstance(error, BaseException):
                log.error("the session %s was not freed completely", session_id, exc_info=error)

    def _ended(self, operation: Operation[Any]) -> None:
        self.totals.add(operation)
        if operation.failed:
            self.on_failure(operation)

    def recovering(self) -> list[str]:
        """What does not work now but will again, a sentence for each base model, and one if no key can be checked;
        empty unless `ready`."""
        if not self.ready:
            return []
        stops = ["the server is stopping"] if self._stopping else []
        if (why := self.key_problem()) is not None:
            stops.append(why)
        return stops + [f"{model.names[0]}: {model.problem}" for model in self.models.distinct() if model.problem]

    def problems(self) -> list[str]:
        """What somebody should look at: `recovering`, and what only a person can mend; empty unless `ready`."""
        if not self.ready:
            return []
        disk = self.store.disk_problem()
        return self.recovering() + ([] if disk is None else [disk])

    def metrics(self) -> dict[str, ModelMetrics]:
        """What was counted since the start, by the first name of each base model; empty unless `ready`."""
        return {model.names[0]: model.metrics() for model in self.models.distinct()} if self.ready else {}

    async def usage(self) -> dict[str, tuple[Amounts, Amounts]]:
        """For each owner of a key, and each that has anything: what it uses, and the most that it may."""
        if not self.ready:
            return {}
        stored = await DATABASE.run(self.store.quota.used)
        in_flight, ephemeral, live = self.sampling.in_flight, self.sampling.ephemeral, self.runs.all_live()
        busy = {*in_flight.owners(), *ephemeral.owners(), *(run.owner for run in live)}
        owners = {*self.quotas.owners().names, *stored, *busy}
        found = {}
        for owner in sorted(owners):
            runs = self.runs.of_owner(owner)
            queued = total(run.queue.load for run in runs)
            used = Amounts(
                adapters=len(runs),
                adapter_bytes=sum(run.adapter_bytes for run in runs),
                queued_requests=queued.commands,
                queued_bytes=queued.size,
                samples=in_flight.of(owner),
                storage_bytes=stored.get(owner, 0),
                ephemeral_bytes=ephemeral.of(owner),
            )
            found[owner] = used, self.quotas.of(owner)
        return found

    def capabilities(self) -> list[dict[str, Any]]:
        """The models served, by every name."""
        return [
            {
                "model_name": name,
                "max_context_length": self.models.get(name).max_context_length,
                "trainable": True,
                "sampleable": True,
                **_packed(self.models.get(name)),
            }
            for name in self.models.names()
        ]


def _packed(model: ServedModel) -> dict[str, str]:
    """In what its base is, if it is not dense. Not part of the Tinker API."""
    precision = model.engines.base_precision
    return {} if precision is None else {"base_precision": precision}


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
