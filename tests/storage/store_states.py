"""Adapter states and records for the storage tests, each given by a seed; imported by tests and run by the writer."""

from datetime import UTC, datetime
from typing import Any

import numpy as np
from tinker_local.backend.adapters.adapter import AdapterState
from tinker_local.backend.storage.records import CheckpointKind, CheckpointRecord
from tinker_local.types import LoraConfig

START = datetime(2026, 1, 1, tzinfo=UTC)
RUN = "5f1c9d5e-0000:train:0"


def make_state(seed: int, *, optimizer: bool = True, width: int = 64) -> AdapterState:
    rng = np.random.default_rng(seed)
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    tensors = {
        name.format("A"): rng.normal(size=(4, width)).astype(np.float32),
        name.format("B"): rng.normal(size=(width, 4)).astype(np.float32),
    }
    moments = {
        f"{moment}.{key}": rng.normal(size=tensor.shape).astype(np.float32)
        for moment in ("exp_avg", "exp_avg_sq")
        for key, tensor in tensors.items()
    }
    return AdapterState(
        base_model="org/base",
        lora_config=LoraConfig(rank=4, seed=seed, train_mlp=False),
        target_modules=("q_proj",),
        tensors=tensors,
        optimizer=moments if optimizer else None,
        step=seed if optimizer else 0,
    )


def make_record(name: str, *, run: str = RUN, kind: CheckpointKind = "weights", **changes: Any) -> CheckpointRecord:
    values = {
        "base_model": "org/base",
        "lora_config": LoraConfig(rank=4, train_mlp=False),
        "created_at": START,
        "size_bytes": 0,
        "has_optimizer": False,
        **changes,
    }
    return CheckpointRecord(run, kind, name, **values)


def same_tensors(a: AdapterState, b: AdapterState) -> bool:
    """Whether two states hold the same bits."""
    pairs = [(a.tensors, b.tensors), (a.optimizer or {}, b.optimizer or {})]
    return a.step == b.step and all(
        x.keys() == y.keys() and all(x[key].tobytes() == y[key].tobytes() for key in x) for x, y in pairs
    )
