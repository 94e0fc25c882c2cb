"""An adapter as files: PEFT's layout, which PEFT and vLLM load, and the optimizer's moments beside it.

adapter_model.safetensors   tensors by PEFT's names: float32, or bfloat16 if they were captured so
adapter_config.json         PEFT's configuration
optimizer.safetensors       `exp_avg.NAME` and `exp_avg_sq.NAME`; the count of updates is in its metadata
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from tinker_local.backend.adapter_tensors import as_torch
from tinker_local.backend.training.interface import AdapterState
from tinker_local.types import LoraConfig

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
OPTIMIZER = "optimizer.safetensors"


def write_adapter(folder: Path, state: AdapterState) -> None:
    """Write `state` into the existing, empty `folder`."""
    _save(folder / WEIGHTS, state.tensors, {"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(state.peft_config(), indent=2))
    if state.optimizer is not None:
        _save(folder / OPTIMIZER, state.optimizer, {"format": "pt", "step": str(state.step)})


def read_adapter(folder: Path, base_model: str, lora_config: LoraConfig, *, optimizer: bool) -> AdapterState:
    """What `write_adapter` wrote; with `optimizer`, the moments too (FileNotFoundError if there are none)."""
    config = json.loads((folder / CONFIG).read_text())
    moments, step = None, 0
    if optimizer:
        with safe_open(folder / OPTIMIZER, framework="numpy") as file:
            step = int(file.metadata()["step"])
        moments = load_file(folder / OPTIMIZER)
    return AdapterState(
        base_model=base_model,
        lora_config=lora_config,
        target_modules=tuple(config["target_modules"]),
        tensors=load_file(folder / WEIGHTS),
        optimizer=moments,
        step=step,
    )


def adapter_bytes(state: AdapterState) -> int:
    """About the bytes that `write_adapter` takes."""
    return sum(tensor.nbytes for tensors in (state.tensors, state.optimizer or {}) for tensor in tensors.values())


def _save(path: Path, tensors: Mapping[str, npt.NDArray[Any]], metadata: Mapping[str, Any]) -> None:
    # safetensors writes the memory of an array in whatever order it lies, without an error: C order it must be.
    if any(array.dtype == np.uint16 for array in tensors.values()):
        from safetensors.torch import save_file as save_torch  # which loads torch; fakes need none

        ordered = {name: as_torch(np.ascontiguousarray(array)) for name, array in tensors.items()}
        save_torch(ordered, path, metadata=metadata)
    else:
        save_file({name: np.ascontiguousarray(t, np.float32) for name, t in tensors.items()}, path, metadata=metadata)
