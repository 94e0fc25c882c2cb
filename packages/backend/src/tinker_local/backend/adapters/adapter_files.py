"""An adapter as files: PEFT's layout, which PEFT and vLLM load, and the optimizer's state beside it.

adapter_model.safetensors   tensors by PEFT's names: float32, or bfloat16 if they were captured so
adapter_config.json         PEFT's configuration
optimizer.safetensors       the optimizer's state tensors as `STATE.NAME` (AdamW: `exp_avg.NAME`, `exp_avg_sq.NAME`);
                            its metadata has the count of updates and the optimizer's type (adamw if it has none)
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from tinker_local.backend.adapters.adapter import AdapterState
from tinker_local.backend.adapters.adapter_tensors import as_torch
from tinker_local.types import InvalidRequestError, LoraConfig

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
OPTIMIZER = "optimizer.safetensors"
AGE = ".age"
"""The end of the names of encrypted files."""

READ_AT_ONCE = 2**26

Tensors = Mapping[str, npt.NDArray[Any]]

_FLOAT32: Mapping[str, type[np.number[Any]]] = {"F32": np.float32}
_CAPTURED: Mapping[str, type[np.number[Any]]] = {"F32": np.float32, "BF16": np.uint16}


def write_adapter(folder: Path, state: AdapterState) -> None:
    """Write `state` into the existing, empty `folder`. InvalidRequestError, and nothing is written, if `read_adapter`
    would refuse it."""
    if fault := _fault({WEIGHTS: state.tensors, OPTIMIZER: state.optimizer or {}}):
        raise InvalidRequestError(f"nothing was saved, because it could not be loaded: {fault}")
    _save(folder / WEIGHTS, state.tensors, {"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(state.peft_config(), indent=2))
    if state.optimizer is not None:
        metadata = {"format": "pt", "step": str(state.step), "optimizer": state.optimizer_type}
        _save(folder / OPTIMIZER, state.optimizer, metadata)


def read_adapter(folder: Path, base_model: str, lora_config: LoraConfig, *, optimizer: bool) -> AdapterState:
    """What `write_adapter` wrote in float32; with `optimizer`, the optimizer's state too (FileNotFoundError if there is
    none). InvalidRequestError if values are not finite."""
    config = json.loads((folder / CONFIG).read_text())
    tensors = _load(folder / WEIGHTS)
    if fault := _fault({WEIGHTS: tensors}):
        raise InvalidRequestError(fault)
    states = _load(folder / OPTIMIZER) if optimizer else None
    if fault := _fault({OPTIMIZER: states or {}}):
        raise InvalidRequestError(f"{fault}; load its weights alone")
    return AdapterState(
        base_model=base_model,
        lora_config=lora_config,
        target_modules=tuple(config["target_modules"]),
        tensors=tensors,
        optimizer=states,
        step=int(_optimizer_metadata(folder)["step"]) if optimizer else 0,
        optimizer_type=optimizer_type(folder) if optimizer else "adamw",
    )


def read_captured(folder: Path) -> AdapterState:
    """What `write_adapter` wrote, in the dtype in which it was captured, without the optimizer's state. Of its
    `lora_config` only the rank is known."""
    config = json.loads((folder / CONFIG).read_text())
    return AdapterState(
        base_model=config["base_model_name_or_path"],
        lora_config=LoraConfig(rank=config["r"]),
        target_modules=tuple(config["target_modules"]),
        tensors=_load(folder / WEIGHTS, _CAPTURED),
    )


def fault_of(folder: Path) -> str:
    """Why the adapter in `folder`, or its optimizer's state, cannot be loaded although its files are whole; empty if it
    can, or is encrypted."""
    files = [file for file in (WEIGHTS, OPTIMIZER) if (folder / file).is_file()]
    return next((fault for file in files if (fault := _fault({file: _load(folder / file, _CAPTURED)}))), "")


def _fault(files: Mapping[str, Tensors]) -> str:
    """The first tensor, by file, with values that are not finite, in words; empty if there is none."""
    for file, tensors in files.items():
        for name, array in tensors.items():
            if not _is_finite(array):
                values = as_torch(np.ascontiguousarray(array)).float().numpy() if array.dtype == np.uint16 else array
                return f"{file}: {name}: {int((~np.isfinite(values)).sum())} of {array.size} values are not finite"
    return ""


def _is_finite(array: npt.NDArray[Any]) -> bool:
    """Whether all of it is; float32 without a copy, and the bits of bfloat16 as uint16."""
    if not array.size:
        return True
    if array.dtype == np.uint16:
        return not bool(((array & 0x7F80) == 0x7F80).any())
    return bool(np.isfinite(array.min()) and np.isfinite(array.max()))


def optimizer_type(folder: Path) -> str:
    """The type of the optimizer that trained the adapter; older files, which lack it, are of AdamW."""
    return _optimizer_metadata(folder).get("optimizer", "adamw") if (folder / OPTIMIZER).exists() else "adamw"


def _optimizer_metadata(folder: Path) -> dict[str, str]:
    with safe_open(folder / OPTIMIZER, framework="numpy") as file:
        return dict(file.metadata())


def adapter_bytes(state: AdapterState) -> int:
    """The approximate size of what `write_adapter` writes."""
    return sum(tensor.nbytes for tensors in (state.tensors, state.optimizer or {}) for tensor in tensors.values())


def _load(path: Path, dtypes: Mapping[str, type[np.number[Any]]] = _FLOAT32) -> dict[str, npt.NDArray[Any]]:
    """The tensors of a file; those of `dtypes` become arrays as they are. Reads it without holding the GIL, which
    `safetensors` does for as long as the disk takes.

    SafetensorError for a file that is not whole.
    """
    with safe_open(path, framework="numpy"):
        pass  # it has checked the header and all places
    with path.open("rb", buffering=0) as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        content = np.empty(path.stat().st_size - file.tell(), np.uint8)
        read = 0
        while read < content.size:
            read += file.readinto(content.data[read : read + READ_AT_ONCE])
    header.pop("__metadata__", None)
    if any(place["dtype"] not in dtypes for place in header.values()):
        return dict(load_file(path))
    return {
        name: content[slice(*place["data_offsets"])].view(dtypes[place["dtype"]]).reshape(place["shape"])
        for name, place in header.items()
    }


def _save(path: Path, tensors: Mapping[str, npt.NDArray[Any]], metadata: Mapping[str, Any]) -> None:
    # safetensors writes an array's memory as it is, without checking the order; make it C order.
    if any(array.dtype == np.uint16 for array in tensors.values()):
        from safetensors.torch import save_file as save_torch  # loads torch, which fakes do not need

        ordered = {name: as_torch(np.ascontiguousarray(array)) for name, array in tensors.items()}
        save_torch(ordered, path, metadata=metadata)
    else:
        save_file({name: np.ascontiguousarray(t, np.float32) for name, t in tensors.items()}, path, metadata=metadata)
