"""What happens to training runs when their trainer's process has ended: some go on in a new one, the others end."""

import logging
from dataclasses import replace

from tinker_local.backend.adapters.adapter import AdapterState
from tinker_local.backend.control.checkpoint_lifetime import CheckpointUses, version_of
from tinker_local.backend.control.training_runs import TrainingRun, TrainingRuns, finish_saves
from tinker_local.backend.models.served_models import ServedModel
from tinker_local.backend.process.process_group import ProcessEndedError
from tinker_local.backend.storage.records import CheckpointRecord
from tinker_local.backend.storage.store import Store
from tinker_local.backend.threads import DISK
from tinker_local.types import NotFoundError

log = logging.getLogger(__name__)

SAVES_SECONDS = 10.0
"""How long the end of a run waits for its saves in progress, which may hold all that it would lose."""


class RestoreRuns:
    """The adapters of `base`, as `models.supervision.Adapters`.

    A run goes on under its id if the trainer held nothing else: it has taken no optimizer step since its last durable
    checkpoint (or since it was created or loaded), and no gradient waits for a step. Any other run ends, because going
    on from an older state would train something else than its client believes.
    """

    def __init__(self, base: ServedModel, store: Store, runs: TrainingRuns, uses: CheckpointUses) -> None:
        self._base = base
        self._store = store
        self._runs = runs
        self._uses = uses

    async def lost(self, why: str) -> None:
        """End the runs whose state was in the trainer alone."""
        runs = self._adapters()
        await finish_saves(runs, SAVES_SECONDS)
        for run in runs:
            if (gone := run.would_lose()) is not None:
                await self._runs.lose(run, f"{why}, and {gone}")

    async def restore(self) -> None:
        """Put the adapters of all others into the new trainer. Those whose checkpoint cannot be read end."""
        trainer, in_turn = self._base.engines.trainer, self._base.memory_sharing.in_turn
        for run in self._adapters():
            try:
                if run.source is None:
                    await in_turn(trainer.create_adapter, run.model_id, run.record.lora_config, run.optimizer.name)
                else:
                    await in_turn(trainer.load_adapter, run.model_id, await self._read(run, run.source))
            except ProcessEndedError:
                raise
            except Exception as error:
                log.exception("%s cannot go on in the new trainer", run.model_id)
                await self._runs.lose(run, f"the trainer's process ended, and its adapter could not be read: {error}")
            if self._runs.live(run.model_id) is not run:  # its session ended meanwhile
                await in_turn(trainer.remove_adapter, run.model_id)

    def _adapters(self) -> list[TrainingRun]:
        return [run for run in self._runs.all_live() if run.base is self._base and run.made]

    async def _read(self, run: TrainingRun, source: CheckpointRecord) -> AdapterState:
        """The state of a run, from exactly the checkpoint that it equals."""

        def read() -> AdapterState:
            current = self._store.get_checkpoint(source.training_run_id, source.kind, source.name)
            if current is None or version_of(current) != version_of(source):
                raise NotFoundError(f"{source.tinker_path} was deleted or overwritten")
            return self._store.read_checkpoint(source, optimizer=run.source_optimizer)

        with self._uses.using(source):
            state = await DISK.run(read)
        return replace(state, base_model=self._base.names[0], optimizer_type=run.optimizer.name)
