"""What a store keeps: metadata in a database, adapters in checkpoint folders."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, Protocol

from tinker_local.backend.training.interface import AdapterState
from tinker_local.types import LoraConfig

CheckpointKind = Literal["weights", "sampler_weights", "external_weights"]

EndReason = Literal["success", "errored", "interrupted", "heartbeats_lost"]
"""Why a session ended: what its client reported, or that it was not heard any more."""


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """A session; one that neither lives nor has an `end_reason` was lost when the server stopped."""

    session_id: str
    created_at: datetime
    user_metadata: Mapping[str, Any] = field(default_factory=dict)
    tags: Sequence[str] = ()
    display_name: str | None = None
    ended_at: datetime | None = None
    end_reason: EndReason | None = None
    end_detail: str | None = None

    @property
    def why_ended(self) -> str | None:
        """Reason and detail in words; None if the end was not recorded."""
        return f"{self.end_reason}: {self.end_detail}" if self.end_detail else self.end_reason


@dataclass(frozen=True, slots=True)
class TrainingRunRecord:
    """A model that was created; it outlives the process as metadata only (`lora_config`: as created or loaded).

    `copied_from`: tinker path of the checkpoint that `copy_weights` made this run for; it was never a model.
    """

    training_run_id: str
    session_id: str
    base_model: str
    lora_config: LoraConfig
    created_at: datetime
    last_request_at: datetime
    user_metadata: Mapping[str, Any] = field(default_factory=dict)
    copied_from: str | None = None


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
    public: bool = False

    @property
    def checkpoint_id(self) -> str:
        """`weights/NAME`, `sampler_weights/NAME` or `external_weights/NAME`."""
        return f"{self.kind}/{self.name}"

    @property
    def tinker_path(self) -> str:
        """`tinker://RUN/KIND/NAME`."""
        return f"tinker://{self.training_run_id}/{self.kind}/{self.name}"


@dataclass(frozen=True, slots=True)
class CopyRecord:
    """A copy that was made: what was asked for under `key`, and the path that came of it."""

    key: str
    request: Mapping[str, Any]
    tinker_path: str


class Store(Protocol):
    """Durable state. Every method blocks (disk) and may be called from several threads.

    A checkpoint whose time is over is as good as gone: no method but `forget_expired` gives it.
    """

    def add_session(self, record: SessionRecord) -> None: ...
    def end_session(self, session_id: str, reason: EndReason, detail: str | None, when: datetime) -> None: ...
    def get_session(self, session_id: str) -> SessionRecord | None: ...
    def list_sessions(self, limit: int, offset: int) -> tuple[list[SessionRecord], int]:
        """Newest first, and the count of all."""

    def sessions_before(self, before: tuple[datetime, str] | None, limit: int) -> list[SessionRecord]:
        """Newest first, equal times by falling id; from behind the session of that time and id on."""

    def session_members(self, session_id: str) -> tuple[list[str], list[str]]:
        """The ids of a session's training runs and of its sampling sessions, the oldest first."""

    def session_storage(self, session_ids: Collection[str]) -> dict[str, tuple[int, int]]:
        """How many checkpoints each of these sessions has, and their bytes; sessions without one are left out."""

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

    def set_public(self, record: CheckpointRecord, public: bool) -> CheckpointRecord:
        """Publish or unpublish; InvalidRequestError if it is so already."""

    def set_expiry(self, record: CheckpointRecord, expires_at: datetime | None) -> CheckpointRecord:
        """Give a checkpoint another end, or none."""

    def forget_checkpoint(self, record: CheckpointRecord) -> CheckpointRecord:
        """Delete the record alone: nobody finds the checkpoint any more, whoever has it still reads its folder."""

    def forget_expired(self) -> list[CheckpointRecord]:
        """`forget_checkpoint` of those whose time is over."""

    def remove_folder(self, record: CheckpointRecord) -> None:
        """Delete the folder of a forgotten checkpoint."""

    def delete_checkpoint(self, record: CheckpointRecord) -> None:
        """Record and folder at once, for a checkpoint that nobody uses yet."""

    def copy_checkpoint(
        self,
        source: CheckpointRecord,
        run: TrainingRunRecord,
        *,
        session: SessionRecord | None,
        expires_at: datetime | None,
        copies: Sequence[CopyRecord],
    ) -> CheckpointRecord:
        """`source` as a checkpoint of the new `run` (of the new `session`, if given), sharing its files on the disk.

        `copies`: what is noted with it, by `find_copy`'s keys.
        """

    def find_copy(self, key: str) -> CopyRecord | None: ...

    def close(self) -> None: ...
