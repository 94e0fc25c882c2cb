"""Checks of an adapter: its folder before vLLM reads it, and what vLLM made of it afterwards.

vLLM ignores tensors that match no module of its own without a word, and would then sample from the base model.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinker_local.backend.sampling.interface import AdapterVersion
from tinker_local.types import InvalidRequestError, NotFoundError

WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"


@dataclass(frozen=True, slots=True)
class AdapterShape:
    """What a folder says of itself: `tensors` is how many its file holds."""

    rank: int
    tensors: int


def check_adapter_folder(version: AdapterVersion, max_rank: int) -> AdapterShape:
    """Read the configuration and the names and shapes of the tensors, not the tensors.

    NotFoundError if the folder is gone, InvalidRequestError for one that cannot be served.
    """
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (version.path / name).is_file():
            raise NotFoundError(f"sampler version {version.name}: there is no {name} in its folder")
    where = f"sampler version {version.name}"
    rank = _rank(version.path / CONFIG_FILE, where)
    if rank > max_rank:
        raise InvalidRequestError(f"{where}: rank {rank}, but the sampler serves ranks up to {max_rank}")
    shapes = _tensor_shapes(version.path / WEIGHTS_FILE, where)
    for name, shape in shapes.items():
        if ".lora_A." in name and shape[0] != rank:
            raise InvalidRequestError(f"{where}: {name} has rank {shape[0]}, but {CONFIG_FILE} says {rank}")
    if not shapes:
        raise InvalidRequestError(f"{where}: {WEIGHTS_FILE} holds no tensors")
    return AdapterShape(rank, len(shapes))


def _rank(file: Path, where: str) -> int:
    try:
        config = json.loads(file.read_text())
        rank = config["r"]
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidRequestError(f"{where}: {CONFIG_FILE} cannot be read: {error!r}") from error
    # vLLM 0.26 ignores these two silently, and nothing here writes them.
    for name in ("rank_pattern", "alpha_pattern"):
        if config.get(name):
            raise InvalidRequestError(f"{where}: {name} in {CONFIG_FILE} is not supported")
    if type(rank) is not int or rank < 1:
        raise InvalidRequestError(f"{where}: r is {rank!r} in {CONFIG_FILE}, not an integer >= 1")
    return rank


def _tensor_shapes(file: Path, where: str) -> Mapping[str, list[int]]:
    import safetensors

    try:
        with safetensors.safe_open(file, framework="pt") as tensors:
            return {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118
    except safetensors.SafetensorError as error:
        raise InvalidRequestError(f"{where}: {WEIGHTS_FILE} cannot be read: {error}") from error


def check_adapter_taken(version: AdapterVersion, shape: AdapterShape, lora_id: int, manager: Any) -> None:
    """InvalidRequestError unless all tensors of the folder reached modules that apply them, and all are finite.

    `manager`: vLLM's `LoRAModelManager`, where the adapter is registered under `lora_id`; `q_proj`, `k_proj` and
    `v_proj` have become one entry `qkv_proj` by then, and so on.
    """
    where = f"sampler version {version.name}"
    weights = manager.get_adapter(lora_id).loras
    ignored = sorted(set(weights) - set(manager.modules))
    if ignored:
        raise InvalidRequestError(f"{where}: vLLM has no module for the tensors of {', '.join(ignored)}")
    tensors = [
        tensor
        for module in weights.values()
        for part in (module.lora_a, module.lora_b)
        for tensor in (part if isinstance(part, list) else [part])
        if tensor is not None
    ]
    if len(tensors) != shape.tensors:
        raise InvalidRequestError(f"{where}: vLLM took {len(tensors)} of its {shape.tensors} tensors")
    for name, module in weights.items():
        for part in (module.lora_a, module.lora_b):
            for tensor in part if isinstance(part, list) else [part]:
                if tensor is not None and not bool(tensor.isfinite().all()):
                    raise InvalidRequestError(f"{where}: the tensors of {name} hold NaN or infinity")
