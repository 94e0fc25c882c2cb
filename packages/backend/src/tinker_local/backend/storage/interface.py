"""What a store keeps: metadata in a database, adapters in checkpoint folders."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, Protocol

from tinker_local.backend.training.interface import AdapterState
from tinker_local.types import LoraConfig

CheckpointKind = Literal["weights", "sampler_weights", "external_weights"]


@dataclass(frozen=True, slots=True)
class SessionRecord:
    session_id: str
    created_at: datetime
    user_metadata: Mapping[str, Any] = field(default_factory=dict)
    tags: Sequence[str] = ()
    display_name: str | None = None
    ended_at: datetime | None = None
    end_reason: str | None = None


@dataclass(frozen=True, slots=True)
class TrainingRunRecord:
    """A model that was created; it outlives the process as metadata only (`lora_config`: as created or loaded)."""

    training_run_id: str
    session_id: str
    base_model: str
    lora_config: LoraConfig
    created_at: datetime
    last_request_at: datetime
    user_metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SamplingSessionRecord:
    """A sampling client: of a base model (`model_path` None), of a named checkpoint, or of a nameless one.

    `model_path`: tinker path of the named checkpoint. `nameless`: the version died with its process.
    """

    sampling_session_id: str
    session_id: str
    base_model: str
    model_path: str | None
    nameless: bool
    created_at: datetime


@dataclass(frozen=True, slots=True)
class CheckpointRecord:
    training_run_id: str
    kind: CheckpointKind
    name: str
    base_model: str
    lora_config: LoraConfig
    created_at: datetime
    size_bytes: int
    has_optimizer: bool
    expires_at: datetime | None = None
    user_metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def checkpoint_id(self) -> str:
        """`weights/NAME`, `sampler_weights/NAME` or `external_weights/NAME`."""
        return f"{self.kind}/{self.name}"

    @property
    def tinker_path(self) -> str:
        """`tinker://RUN/KIND/NAME`."""
        return f"tinker://{self.training_run_id}/{self.kind}/{self.name}"


class Store(Protocol):
    """Durable state. Every method blocks (disk) and may be called from several threads."""

    def add_session(self, record: SessionRecord) -> None: ...
    def end_session(self, session_id: str, reason: str, when: datetime) -> None: ...
    def get_session(self, session_id: str) -> SessionRecord | None: ...

    def add_training_run(self, record: TrainingRunRecord) -> None: ...
    def touch_training_run(self, training_run_id: str, when: datetime) -> None: ...
    def get_training_run(self, training_run_id: str) -> TrainingRunRecord | None: ...
    def list_training_runs(self, limit: int, offset: int) -> tuple[list[TrainingRunRecord], int]:
        """Newest first, and the count of all."""

    def add_sampling_session(self, record: SamplingSessionRecord) -> None: ...
    def get_sampling_session(self, sampling_session_id: str) -> SamplingSessionRecord | None: ...

    def write_checkpoint(self, record: CheckpointRecord, state: AdapterState, *, overwrite: bool) -> CheckpointRecord:
        """Write and record a checkpoint; when this returns it survives `kill -9`. Returns it with its size.

        Written to a temporary folder, fsynced, renamed, then recorded. Raises InvalidRequestError if the name exists
        and `overwrite` is false; with `overwrite` the old one stays whole until the new one is in place.
        """

    def get_checkpoint(self, training_run_id: str, kind: CheckpointKind, name: str) -> CheckpointRecord | None: ...
    def list_checkpoints(self, training_run_id: str) -> list[CheckpointRecord]: ...
    def list_all_checkpoints(self, limit: int, offset: int) -> tuple[list[CheckpointRecord], int]:
        """Newest first, and the count of all."""

    def checkpoint_folder(self, record: CheckpointRecord) -> Path:
        """The folder in PEFT's layout (`adapter_config.json`, `adapter_model.safetensors`)."""

    def read_checkpoint(self, record: CheckpointRecord, *, optimizer: bool) -> AdapterState: ...
    def delete_checkpoint(self, record: CheckpointRecord) -> None: ...

    def delete_expired(self, now: datetime) -> list[CheckpointRecord]:
        """Delete the checkpoints whose time is over, on disk too, and return them."""

    def close(self) -> None: ...
