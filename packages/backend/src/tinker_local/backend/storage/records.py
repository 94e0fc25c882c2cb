"""The records that the store keeps: sessions, training runs, sampling sessions, checkpoints and copies."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from tinker_local.types import LoraConfig

CheckpointKind = Literal["weights", "sampler_weights", "external_weights"]

LOCAL_OWNER = "local"
"""The owner of sessions from before there were others, and of those of keys without a name."""

ADMIN = "admin"
"""The owner whose keys see everything."""

LOCAL_PROJECT = "local"
"""The project of sessions that name none."""

BEGAN_ON = "tinker_local.began_on"
"""The entry of a checkpoint's `user_metadata` that says in what the base was on which its first weights were trained,
if its run trained on another: as `base_precision`, "dense" or `ELSEWHERE`."""

ELSEWHERE = "elsewhere"
"""Of an adapter that was imported where the base is not dense: in what its own was is not known."""

EndReason = Literal["success", "errored", "interrupted", "heartbeats_lost"]
"""Why a session ended: what its client reported, or that its heartbeats stopped."""


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """A session. If it is not live and has no `end_reason`, it was lost when the server stopped.

    `owner`: who created it. `project_id`: a label; None is the project `local`.
    """

    session_id: str
    created_at: datetime
    user_metadata: Mapping[str, Any] = field(default_factory=dict)
    tags: Sequence[str] = ()
    display_name: str | None = None
    ended_at: datetime | None = None
    end_reason: EndReason | None = None
    end_detail: str | None = None
    owner: str = LOCAL_OWNER
    project_id: str | None = None

    @property
    def why_ended(self) -> str | None:
        """The reason and its detail; None if no end was recorded."""
        return f"{self.end_reason}: {self.end_detail}" if self.end_detail else self.end_reason


@dataclass(frozen=True, slots=True)
class TrainingRunRecord:
    """A training run. Only this record outlives the process; `lora_config` is the one of its creation or load.

    `copied_from`: the tinker path of the source, if `copy_weights` made this run to hold a copy. It was never trained.
    `base_precision`: as of a checkpoint.
    """

    training_run_id: str
    session_id: str
    base_model: str
    lora_config: LoraConfig
    created_at: datetime
    last_request_at: datetime
    user_metadata: Mapping[str, Any] = field(default_factory=dict)
    copied_from: str | None = None
    base_precision: str | None = None


@dataclass(frozen=True, slots=True)
class SamplingSessionRecord:
    """A sampling client of a base model (`model_path` None), a named checkpoint, or an ephemeral version.

    `model_path`: the tinker path of the named checkpoint. `nameless`: the ephemeral version is lost with its process.
    `read_as_public`: its owner may read the checkpoint only while it is published; None in data of older servers, which
    did not record it.
    """

    sampling_session_id: str
    session_id: str
    base_model: str
    model_path: str | None
    nameless: bool
    created_at: datetime
    read_as_public: bool | None = False


@dataclass(frozen=True, slots=True)
class CheckpointRecord:
    """A checkpoint.

    `missing`: the server found no folder of it when it started. `unusable`: why it, or its optimizer's state, cannot be
    loaded although its files are whole; empty if it can, None if an older server wrote it and it was not examined yet.
    `save_number`: its place among all saves of the data folder, from 1 on; 0 if it has none yet. Of two checkpoints,
    the one with the greater number is newer, whatever the machine's clock has said. `base_precision`: in what the base
    model was while it was trained: one of `precision.WORDS`, `precision.EVEN` or a published checkpoint's `word`; None:
    dense, or an older server did not record it.
    """

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
    missing: bool = False
    unusable: str | None = field(default=None, compare=False)
    save_number: int = field(default=0, compare=False)
    base_precision: str | None = None

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
    """A copy: the request that came under `key`, and the path of the result."""

    key: str
    request: Mapping[str, Any]
    tinker_path: str
