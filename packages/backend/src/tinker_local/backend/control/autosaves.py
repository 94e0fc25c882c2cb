"""Autosaves: checkpoints of training that would otherwise be lost, written by the server itself."""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Collection

import numpy as np
from tinker_local.backend.adapters.adapter import WEIGHTS_VECTOR, AdapterLayout, AdapterState
from tinker_local.backend.control.checkpoint_lifetime import version_of
from tinker_local.backend.control.training_runs import TrainingRun, TrainingRuns, count_of_steps, finish_saves
from tinker_local.backend.daemon_thread import in_daemon_thread
from tinker_local.backend.models.served_models import ServedModel
from tinker_local.backend.options import BackendOptions
from tinker_local.backend.scheduling.operations import as_api_error
from tinker_local.backend.storage.names import AUTOSAVE
from tinker_local.backend.storage.records import CheckpointRecord
from tinker_local.backend.storage.store import Store
from tinker_local.backend.threads import DATABASE, DISK
from tinker_local.types import InternalError

log = logging.getLogger(__name__)

AT_ONCE = 2
"""Autosaves of a base model at a time: each holds a copy of its adapter and optimizer in memory. Those of another base
model do not wait for a trainer that hangs."""

SAVES_SECONDS = 10.0
"""How long an autosave waits for the run's own saves in progress, which may make it unnecessary."""

PART = 2**24
"""Numbers of an adapter that are copied from the trainer at a time, 64 MiB."""

TICK = 5.0
"""Seconds, at most, between two looks at which runs are due."""


class Autosaves:
    """Saves training runs, with their optimizer, as `weights/autosave`: the same checkpoint as one that a client saves.

    Each run has one, which the next one replaces once that is on disk. It expires after `options.autosave_ttl` days. A
    run is saved only while it has optimizer steps that no checkpoint has.
    """

    def __init__(
        self, options: BackendOptions, store: Store, runs: TrainingRuns, on_save: Callable[[str], None]
    ) -> None:
        self._on_save = on_save
        self._store = store
        self._runs = runs
        self._interval = None if options.autosave is None else 60.0 * options.autosave
        self._ttl_seconds = round(86400 * options.autosave_ttl)
        self._rooms: defaultdict[ServedModel, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(AT_ONCE))
        self._last_saves: set[asyncio.Task[None]] = set()
        self._removals: set[asyncio.Future[None]] = set()
        self._skipped = False

    async def save(self, run: TrainingRun) -> CheckpointRecord | None:
        """Save `run`; None if a checkpoint has all of its steps. The run's commands wait only for the capture."""
        async with self._rooms[run.base], run.autosaving:
            await finish_saves([run], SAVES_SECONDS)
            if not (run.unsaved_steps or run.base.scheduler.takes_step(run.queue) or await self._was_deleted(run)):
                return None
            if not run.base.memory_sharing.trainer_gate.is_open:
                raise InternalError(run.base.problem or "the trainer has ended")
            run.autosaved_at = time.monotonic()
            state, record, steps = await self._capture(run)
            return await run.write_beside(self._write(run, record, state, steps))

    async def _capture(self, run: TrainingRun) -> tuple[AdapterState, CheckpointRecord, int]:
        """The run as it is now, the record of that moment, and the optimizer steps. Commands of all runs go on
        meanwhile. They wait for a copy within the trainer and for one part at a time: an adapter of rank 32 for an 8B
        model, with its optimizer, has 1 GB."""
        scheduler, trainer = run.base.scheduler, run.base.engines.trainer
        copy_id = f"{run.model_id}/autosave"

        def copy() -> tuple[AdapterLayout, CheckpointRecord, int]:
            layout, steps = trainer.copy_adapter(run.model_id, copy_id), run.steps  # steps change between calls only
            metadata = {"optimizer_steps": str(steps)}
            # Here, because a checkpoint that the client takes while the parts are read is newer than this one.
            return layout, run.checkpoint("weights", AUTOSAVE, self._ttl_seconds, metadata), steps

        try:
            layout, record, steps = await scheduler.call(copy)
            vectors = {name: np.empty(layout.size, np.float32) for name in (WEIGHTS_VECTOR, *layout.states)}
            for name, vector in vectors.items():
                for start in range(0, layout.size, PART):
                    part = await scheduler.call(trainer.read_adapter, copy_id, name, start, start + PART)
                    await DISK.run(np.copyto, vector[start : start + PART], part)
        finally:
            # Not awaited: a trainer that hangs must not hold up a stop.
            removal = asyncio.ensure_future(scheduler.call(trainer.remove_adapter, copy_id))
            self._removals.add(removal)
            removal.add_done_callback(self._removals.discard)
            removal.add_done_callback(lambda done: done.cancelled() or done.exception())
        return layout.filled(vectors.pop(WEIGHTS_VECTOR), vectors), record, steps

    async def _write(
        self, run: TrainingRun, record: CheckpointRecord, state: AdapterState, steps: int
    ) -> CheckpointRecord:
        written = await in_daemon_thread(self._store.write_checkpoint, record, state, overwrite=True)
        run.saved(written, steps)
        self._on_save(written.tinker_path)
        return written

    async def _was_deleted(self, run: TrainingRun) -> bool:
        """Whether the checkpoint that has all steps of `run` has expired, or was deleted or overwritten."""
        source = run.source
        if source is None or not run.steps:
            return False
        current = await DATABASE.run(self._store.get_checkpoint, source.training_run_id, source.kind, source.name)
        return current is None or version_of(current) != version_of(source)

    # Every few minutes ----------------------------------------------------------------------------------------------

    async def save_now_and_then(self) -> None:
        """Save each run every `--autosave` minutes; returns at once without that option."""
        if self._interval is None:
            return
        async with asyncio.TaskGroup() as saves:
            while True:
                await asyncio.sleep(min(TICK, self._interval / 4))
                now = time.monotonic()
                for run in self._runs.all_live():
                    if run.unsaved_steps and now - run.autosaved_at >= self._interval:
                        run.autosaved_at = now
                        saves.create_task(self._try_to_save(run))

    async def _try_to_save(self, run: TrainingRun) -> None:
        try:
            await self.save(run)
        except Exception as error:
            log.warning("%s could not be saved, and will be tried again: %s", run.model_id, as_api_error(error))

    # Before runs end ------------------------------------------------------------------------------------------------

    async def save_all(self, runs: Collection[TrainingRun], seconds: float, say: Callable[[str], None]) -> None:
        """Take no more commands of `runs` from their queues and save them, those that trained last first, within
        `seconds`. `say` gets each result, failures too."""
        for run in runs:
            run.base.scheduler.hold(run.queue)
        if not runs or self._skipped:
            return
        latest_first = sorted(runs, key=lambda run: run.stepped_at, reverse=True)
        tasks = {asyncio.create_task(self._save_and_say(run, say)): run for run in latest_first}
        self._last_saves |= tasks.keys()
        _, late = await asyncio.wait(tasks, timeout=seconds)
        for task in late:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._last_saves -= tasks.keys()
        for task, run in tasks.items():
            if task.cancelled() and run.unsaved_steps:
                why = "there was no time left" if task in late else "it was skipped"
                say(f"NOT saved: {run.unsaved_words()}: {why}")

    async def _save_and_say(self, run: TrainingRun, say: Callable[[str], None]) -> None:
        try:
            record = await self.save(run)
        except Exception as error:
            say(f"NOT saved: {run.unsaved_words()}: {as_api_error(error)}")
        else:
            if record is not None:
                say(f"saved {record.tinker_path} after {count_of_steps(run.steps)}")

    def skip(self) -> None:
        """End `save_all`, and let no other begin."""
        self._skipped = True
        for task in self._last_saves:
            task.cancel()
