"""Imports: an adapter of PEFT, or an export, as the checkpoints of a new training run."""

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any

from tinker_local.backend.adapters.adapter import AdapterState
from tinker_local.backend.adapters.peft_adapters import PeftAdapter, read_peft_adapter
from tinker_local.backend.adapters.peft_config import MAX_CONFIG_BYTES
from tinker_local.backend.adapters.whole_matrices import bytes_of_whole_matrices, check_whole_matrices
from tinker_local.backend.control.base_precision import began_elsewhere, note_of_import
from tinker_local.backend.control.callers import LOCAL, Caller
from tinker_local.backend.control.checkpoints import Checkpoints
from tinker_local.backend.control.sessions import LONGEST_NAME, LONGEST_VALUE, Sessions
from tinker_local.backend.control.training_commands import Training
from tinker_local.backend.control.training_runs import TrainingRuns, new_run
from tinker_local.backend.families import family_of
from tinker_local.backend.models.served_models import ServedModel, ServedModels
from tinker_local.backend.options import BackendOptions
from tinker_local.backend.scheduling.operations import model_id_in
from tinker_local.backend.storage.names import AUTOSAVE, check_checkpoint_name
from tinker_local.backend.threads import DISK
from tinker_local.backend.training.optimizers import optimizer_of
from tinker_local.types import (
    CreateSessionRequest,
    InvalidRequestError,
    LoraConfig,
    NotFoundError,
    OptimizerConfig,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
    TooManyRequestsError,
)
from tinker_local.types.errors import brief

OTHER_FILE_BYTES = MAX_CONFIG_BYTES + 2**20
"""Of an adapter's files besides its weights: the configuration, and headers."""

NOTES = "import"
"""The entry of a checkpoint's `user_metadata` that has the notes of its import."""


@dataclass(frozen=True, slots=True)
class Imported:
    """`path`: of the training checkpoint; `sampler_path`: of the sampler's. `notes`: what a user should know."""

    path: str
    sampler_path: str
    notes: tuple[str, ...]


class Imports:
    """Makes checkpoints of adapters that were not trained here, through a training run that saves and ends: all limits,
    and the comparison of sampler and trainer, are those of any other run."""

    def __init__(
        self,
        options: BackendOptions,
        models: ServedModels,
        sessions: Sessions,
        runs: TrainingRuns,
        training: Training,
        checkpoints: Checkpoints,
    ) -> None:
        self._options = options
        self._models = models
        self._sessions = sessions
        self._runs = runs
        self._training = training
        self._checkpoints = checkpoints
        self._folder = options.data_dir / "imports"
        self._busy: set[str] = set()
        shutil.rmtree(self._folder, ignore_errors=True)  # of a server that was killed

    def most_bytes(self, base_model: str) -> int:
        """The files of an adapter of `base_model` are not larger: one of the largest rank, with an optimizer, and whole
        matrices beside it. Blocks."""
        base = self._models.get(base_model)
        trainer, config = base.engines.trainer, LoraConfig(rank=self._options.max_rank)
        most = trainer.adapter_bytes(config)
        if self._options.train_vision:
            with suppress(InvalidRequestError):  # the model reads text only, or its tower stays as it is
                most = trainer.adapter_bytes(config.model_copy(update={"train_vision": True}))
        return most + bytes_of_whole_matrices(base.path) + OTHER_FILE_BYTES

    @asynccontextmanager
    async def place(self, owner: str) -> AsyncIterator[Path]:
        """A folder for an adapter's files that is deleted afterwards; TooManyRequestsError if `owner` has one."""
        if owner in self._busy:
            raise TooManyRequestsError(f"an import of the owner {owner!r} is running; send the next one after it", 5.0)
        self._busy.add(owner)
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            with TemporaryDirectory(dir=self._folder) as folder:
                yield Path(folder)
        finally:
            self._busy.discard(owner)

    async def add(
        self, folder: Path, base_model: str, name: str, *, other_base: bool = False, caller: Caller = LOCAL
    ) -> Imported:
        """The adapter in `folder` as two checkpoints `name` of a new run: one to train on, with a fresh optimizer, and
        one to sample. `other_base`: although the adapter names another base model than `base_model`.

        The checkpoints' `user_metadata` has the notes as `import`. InvalidRequestError names what of the adapter cannot
        become a checkpoint; nothing is left of it then.
        """
        if check_checkpoint_name(name) == AUTOSAVE:
            raise InvalidRequestError(f"name: {AUTOSAVE!r} is the name of what the server saves by itself")
        base_model = self._models.served_name(base_model)
        base = self._models.get(base_model)
        family = family_of(base.engines.arch, base.path)
        adapter = await DISK.run(read_peft_adapter, folder, family)
        if not other_base:
            _check_base(adapter.base_model, base, base_model)
        await DISK.run(check_whole_matrices, adapter.matrices, base.path)
        config = adapter.config(family)
        session = CreateSessionRequest(display_name=f"import of {name}"[:LONGEST_NAME])
        session_id = await self._sessions.create(session, caller=caller)
        model_id = model_id_in(session_id, 0)
        try:
            notes = await self._load(base, base_model, model_id, adapter, config)
            told = {NOTES: "; ".join(notes)[:LONGEST_VALUE]} if notes else None
            sampler = SaveWeightsForSamplerRequest(model_id=model_id, seq_id=1, path=name, user_metadata=told)
            sampler_path = (await (await self._training.save_weights_for_sampler(sampler)))["path"]
            training = SaveWeightsRequest(model_id=model_id, seq_id=2, path=name, user_metadata=told)
            path = (await (await self._training.save_weights(training)))["path"]
        except BaseException as error:
            try:
                await self._sessions.finish(session_id, "errored", str(error))  # waits for saves
            finally:
                for kind in ("sampler_weights", "weights"):
                    with suppress(NotFoundError):
                        await self._checkpoints.delete(f"tinker://{model_id}/{kind}/{name}")
            raise
        await self._sessions.finish(session_id, "success")
        return Imported(path, sampler_path, notes)

    async def _load(
        self, base: ServedModel, base_model: str, model_id: str, adapter: PeftAdapter, config: LoraConfig
    ) -> tuple[str, ...]:
        """Make the run; the notes on its adapter."""
        trainer, optimizer = base.engines.trainer, optimizer_of(OptimizerConfig())
        notes: tuple[str, ...] = ()

        def fresh() -> AdapterState:
            trainer.create_adapter(model_id, config, optimizer.name)
            return trainer.capture(model_id, optimizer=False)

        async def make() -> dict[str, Any]:
            nonlocal notes
            begun = await base.scheduler.call(fresh)
            state, notes = await DISK.run(adapter.state, begun, family_of(base.engines.arch, base.path))
            if (run := self._runs.live(model_id)) is not None:
                run.imported, run.began_on = True, began_elsewhere(base)
            await base.scheduler.call(trainer.load_adapter, model_id, state)
            return {"model_id": model_id}

        await self._runs.begin("load_weights", new_run(model_id, base_model, base, config, None), base, optimizer, make)
        return (*notes, *note_of_import(base))


def _check_base(named: str, base: ServedModel, base_model: str) -> None:
    """InvalidRequestError if an adapter names another base model than `base`, by the last part of its name or path."""
    known = {_last(name) for name in (*base.names, base.path)}
    if named and _last(named) not in known:
        raise InvalidRequestError(
            f"adapter_config.json: base_model_name_or_path: the adapter is of {brief(named)}, and {base_model!r} is "
            f"served from {base.path!r}; if these are the same weights, import it with --other-base"
        )


def _last(name: str) -> str:
    return PurePosixPath(name.replace("\\", "/")).name.lower()
