"""A live model: its adapter's place in the trainer, its commands, and the checkpoints of it that are being written."""

import asyncio
from collections.abc import Awaitable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from tinker_local.backend.control.sessions import now
from tinker_local.backend.control.ttl import expiry
from tinker_local.backend.models.served_models import ServedModel
from tinker_local.backend.scheduling.model_queue import ModelQueue
from tinker_local.backend.scheduling.operations import Operation
from tinker_local.backend.storage.records import CheckpointKind, CheckpointRecord, TrainingRunRecord
from tinker_local.backend.training.optimizers.optimizer import Optimizer

FINISH_SECONDS = 60.0
"""How long the end of a session or server waits for saves in flight: longer than any disk that works."""


@dataclass(slots=True, eq=False)
class TrainedModel:
    """A live training run.

    Attributes
    ----------
    ready: its adapter was made, and it is recorded.
    adapter_bytes: of the adapter with its optimizer.
    creation: the operation that makes it.
    captures: what was captured of it, on its way to the disk or to the sampler.
    """

    record: TrainingRunRecord
    base: ServedModel
    queue: ModelQueue
    creation: Operation[dict[str, Any]]
    adapter_bytes: int
    optimizer: Optimizer
    ready: bool = False
    captures: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def model_id(self) -> str:
        return self.record.training_run_id

    def checkpoint(
        self, kind: CheckpointKind, name: str, ttl_seconds: int | None, user_metadata: Mapping[str, Any] | None
    ) -> CheckpointRecord:
        """The record of a checkpoint taken now; its size is known once it is written."""
        when = now()
        return CheckpointRecord(
            training_run_id=self.model_id,
            kind=kind,
            name=name,
            base_model=self.record.base_model,
            lora_config=self.record.lora_config,
            created_at=when,
            size_bytes=0,
            has_optimizer=kind == "weights",
            expires_at=expiry(when, ttl_seconds),
            user_metadata=user_metadata or {},
        )

    def beside(self, operation: Operation[Any], work: Awaitable[None]) -> None:
        """Do what follows a capture without holding up the model's order."""

        async def run() -> None:
            operation.timeline.enter("writing")
            try:
                await work
            except Exception as error:
                operation.fail_from(error)

        task = asyncio.create_task(run())
        self.captures.add(task)
        task.add_done_callback(self.captures.discard)


async def finish_saves(models: Collection[TrainedModel]) -> None:
    """Wait for the checkpoints of `models` that are being written, at most `FINISH_SECONDS`."""
    saves = [task for model in models for task in model.captures]
    if saves:
        await asyncio.wait(saves, timeout=FINISH_SECONDS)
