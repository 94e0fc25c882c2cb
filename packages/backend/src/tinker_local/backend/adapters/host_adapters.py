"""Adapter versions in host memory: read from a folder or from the trainer's capture, and checked."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tinker_local.backend.adapters.adapter import AdapterVersion
from tinker_local.backend.adapters.adapter_files import CONFIG, WEIGHTS
from tinker_local.backend.adapters.adapter_tensors import FlatTensors, as_torch
from tinker_local.backend.adapters.checksums import check_files
from tinker_local.types import InvalidRequestError, NotFoundError


@dataclass(frozen=True, slots=True, eq=False)
class HostAdapter:
    """PEFT's `config`, and read-only A [rank, in] and B [out, rank] by PEFT's names; of experts A [E, rank, in] and
    B [E, out, rank], with 1 in place of E for what they share. `flat`: their concatenation, if all of them are views of
    one vector."""

    rank: int
    config: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]
    flat: torch.Tensor | None = None


def host_adapter(version: AdapterVersion, max_rank: int) -> HostAdapter:
    """The adapter of `version`, from memory if its folder is not written yet. Blocks.

    NotFoundError if the folder is gone, InvalidRequestError for an adapter that cannot be served.
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
        config, tensors = _read(version, where)
    rank = _rank(config, where)
    if rank > max_rank:
        raise InvalidRequestError(f"{where}: rank {rank}, but the sampler serves ranks up to {max_rank}")
    _check_pairs(tensors, rank, where)
    return HostAdapter(rank, config, tensors, flat)


def _read(version: AdapterVersion, where: str) -> tuple[Any, Mapping[str, torch.Tensor]]:
    """Config and tensors in the folder of `version`."""
    for name in (CONFIG, WEIGHTS):
        if not (version.path / name).is_file():
            raise NotFoundError(f"{where}: there is no {name} in its folder, {version.path}")
    try:
        if not version.just_written:
            check_files(version.path, (CONFIG, WEIGHTS), where)
        return _config(version.path / CONFIG, where), _tensors(version.path / WEIGHTS, where)
    except (OSError, InvalidRequestError) as error:
        if version.path.is_dir():
            raise
        raise NotFoundError(f"{where}: its folder {version.path} was removed while it was read") from error


def _views(tensors: FlatTensors) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    flat = as_torch(tensors.flat)
    places = tensors.places.items()
    return flat, {name: flat[start : start + math.prod(shape)].view(shape) for name, (start, shape) in places}


def _config(file: Path, where: str) -> Any:
    try:
        return json.loads(file.read_text())
    except ValueError as error:
        raise InvalidRequestError(f"{where}: {CONFIG} cannot be read: {error!r}") from error


def _rank(config: Any, where: str) -> int:
    if not isinstance(config, dict) or "r" not in config:
        raise InvalidRequestError(f"{where}: {CONFIG} cannot be read: it has no r")
    # vLLM 0.26 silently ignores these two; the trainer never writes them.
    for name in ("rank_pattern", "alpha_pattern"):
        if config.get(name):
            raise InvalidRequestError(f"{where}: {name} in {CONFIG} is not supported")
    rank = config["r"]
    if type(rank) is not int or rank < 1:
        raise InvalidRequestError(f"{where}: r is {rank!r} in {CONFIG}, not an integer >= 1")
    return rank


def _tensors(file: Path, where: str) -> Mapping[str, torch.Tensor]:
    """The tensors of a file, mapped into memory."""
    import safetensors

    try:
        with safetensors.safe_open(file, framework="pt") as tensors:
            return {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
    except safetensors.SafetensorError as error:
        raise InvalidRequestError(f"{where}: {WEIGHTS} cannot be read: {error}") from error


def _check_pairs(tensors: Mapping[str, torch.Tensor], rank: int, where: str) -> None:
    if not tensors:
        raise InvalidRequestError(f"{where}: {WEIGHTS} holds no tensors")
    for name, tensor in tensors.items():
        module, matrix, _ = name.rsplit(".", 2)
        other = {"lora_A": "lora_B", "lora_B": "lora_A"}.get(matrix)
        if other is None or f"{module}.{other}.weight" not in tensors:
            raise InvalidRequestError(f"{where}: {name} is not a LoRA matrix, or the other one of its pair is missing")
        shape = list(tensor.shape)
        if len(shape) not in (2, 3) or shape[-1 if matrix == "lora_B" else -2] != rank:
            raise InvalidRequestError(f"{where}: {name} is of shape {shape}, but {CONFIG} says rank {rank}")
