"""Checks of an adapter: what was captured or lies in its folder before vLLM gets it, and what vLLM made of it.

vLLM ignores tensors that match no module of its own without a word, and would then sample from the base model.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tinker_local.backend.adapter_tensors import FlatTensors, as_torch
from tinker_local.backend.sampling.interface import AdapterVersion
from tinker_local.types import InvalidRequestError, NotFoundError

WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"


@dataclass(frozen=True, slots=True, eq=False)
class HostAdapter:
    """An adapter in host memory: PEFT's `config`, and matrices A [rank, in] and B [out, rank] by PEFT's names, which
    must not be written to. `flat`: a vector of which all of them are views, one behind the other, if there is one."""

    rank: int
    config: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]
    flat: torch.Tensor | None = None


def read_adapter(version: AdapterVersion, max_rank: int) -> HostAdapter:
    """The adapter of `version`, from memory if its folder is not written yet.

    NotFoundError if the folder is gone, InvalidRequestError for an adapter that cannot be served. Blocks.
    """
    where = f"sampler version {version.name}"
    state = version.unwritten()
    config: Any
    tensors: Mapping[str, torch.Tensor]
    flat = None
    if state is not None:
        config = state.peft_config()
        if isinstance(state.tensors, FlatTensors):
            flat, tensors = _views(state.tensors)
        else:
            tensors = {name: as_torch(array) for name, array in state.tensors.items()}
    else:
        for name in (CONFIG_FILE, WEIGHTS_FILE):
            if not (version.path / name).is_file():
                raise NotFoundError(f"{where}: there is no {name} in its folder")
        config = _config(version.path / CONFIG_FILE, where)
        tensors = _tensors(version.path / WEIGHTS_FILE, where)
    rank = _rank(config, where)
    if rank > max_rank:
        raise InvalidRequestError(f"{where}: rank {rank}, but the sampler serves ranks up to {max_rank}")
    _check_pairs(tensors, rank, where)
    return HostAdapter(rank, config, tensors, flat)


def _views(tensors: FlatTensors) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    flat = as_torch(tensors.flat)
    places = tensors.places.items()
    return flat, {name: flat[start : start + math.prod(shape)].view(shape) for name, (start, shape) in places}


def _config(file: Path, where: str) -> Any:
    try:
        return json.loads(file.read_text())
    except ValueError as error:
        raise InvalidRequestError(f"{where}: {CONFIG_FILE} cannot be read: {error!r}") from error


def _rank(config: Any, where: str) -> int:
    if not isinstance(config, dict) or "r" not in config:
        raise InvalidRequestError(f"{where}: {CONFIG_FILE} cannot be read: it has no r")
    # vLLM 0.26 ignores these two silently, and nothing here writes them.
    for name in ("rank_pattern", "alpha_pattern"):
        if config.get(name):
            raise InvalidRequestError(f"{where}: {name} in {CONFIG_FILE} is not supported")
    rank = config["r"]
    if type(rank) is not int or rank < 1:
        raise InvalidRequestError(f"{where}: r is {rank!r} in {CONFIG_FILE}, not an integer >= 1")
    return rank


def _tensors(file: Path, where: str) -> Mapping[str, torch.Tensor]:
    """The tensors of a file, mapped into memory and not read yet."""
    import safetensors

    try:
        with safetensors.safe_open(file, framework="pt") as tensors:
            return {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
    except safetensors.SafetensorError as error:
        raise InvalidRequestError(f"{where}: {WEIGHTS_FILE} cannot be read: {error}") from error


def _check_pairs(tensors: Mapping[str, torch.Tensor], rank: int, where: str) -> None:
    if not tensors:
        raise InvalidRequestError(f"{where}: {WEIGHTS_FILE} holds no tensors")
    for name, tensor in tensors.items():
        module, matrix, _ = name.rsplit(".", 2)
        other = {"lora_A": "lora_B", "lora_B": "lora_A"}.get(matrix)
        if other is None or f"{module}.{other}.weight" not in tensors:
            raise InvalidRequestError(f"{where}: {name} is no LoRA matrix, or the other one of its pair is missing")
        shape = list(tensor.shape)
        if len(shape) != 2 or shape[matrix == "lora_B"] != rank:
            raise InvalidRequestError(f"{where}: {name} is of shape {shape}, but {CONFIG_FILE} says rank {rank}")


def check_adapter_taken(version: AdapterVersion, numbers: torch.Tensor, tensors: int, lora: Any, modules: Any) -> None:
    """InvalidRequestError unless all `tensors` of an adapter reached modules of their size, and all are finite.

    `lora`: vLLM's `LoRAModel`, packed (`q_proj`, `k_proj` and `v_proj` have become one entry `qkv_proj`, and so on).
    `modules`: those of vLLM that can take an adapter, by name. `numbers`: everything that is in `lora`, in one vector.
    """
    where = f"sampler version {version.name}"
    weights = lora.loras
    ignored = sorted(set(weights) - set(modules))
    if ignored:
        raise InvalidRequestError(f"{where}: vLLM has no module for the tensors of {', '.join(ignored)}")
    finite = all_finite(numbers)
    taken = 0
    for name, module in weights.items():
        for (a, b), (slot_a, slot_b) in zip(_pairs(module), _slots(modules[name]), strict=True):
            if a is None or b is None:  # the adapter has only some of those that vLLM packs into one
                continue
            # vLLM would copy a smaller matrix into a corner of its buffer.
            if a.shape[1] != slot_a.shape[-1] or b.shape[0] != slot_b.shape[-2]:
                raise InvalidRequestError(
                    f"{where}: {name} is {a.shape[1]} to {b.shape[0]} wide in the adapter, and "
                    f"{slot_a.shape[-1]} to {slot_b.shape[-2]} in the model"
                )
            if not finite and not (all_finite(a) and all_finite(b)):
                raise InvalidRequestError(f"{where}: the tensors of {name} hold NaN or infinity")
            taken += 2
    if taken != tensors:
        raise InvalidRequestError(f"{where}: vLLM took {taken} of its {tensors} tensors")


def all_finite(values: torch.Tensor) -> bool:
    """Whether no value is NaN or infinite, in one pass without a copy: NaN wins over both ends, as aminmax gives them
    (`isfinite` takes twenty times as long on a CPU)."""
    low, high = torch.aminmax(values)
    return bool(low.isfinite() and high.isfinite())


def _pairs(weights: Any) -> list[tuple[Any, Any]]:
    """A and B of a module; one pair for each of those that vLLM packs into one."""
    if isinstance(weights.lora_a, list):
        return list(zip(weights.lora_a, weights.lora_b, strict=True))
    return [(weights.lora_a, weights.lora_b)]


def _slots(module: Any) -> list[tuple[Any, Any]]:
    """The buffers [slots, 1, rank, in] and [slots, 1, out, rank] of vLLM's module, one pair for each packed one."""
    if isinstance(module.lora_a_stacked, tuple):
        return list(zip(module.lora_a_stacked, module.lora_b_stacked, strict=True))
    return [(module.lora_a_stacked, module.lora_b_stacked)]
