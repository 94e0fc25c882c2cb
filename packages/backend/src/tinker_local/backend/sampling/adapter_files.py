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
    if not shapes:
        raise InvalidRequestError(f"{where}: {WEIGHTS_FILE} holds no tensors")
    for name, shape in shapes.items():
        module, matrix, _ = name.rsplit(".", 2)
        other = {"lora_A": "lora_B", "lora_B": "lora_A"}.get(matrix)
        if other is None or f"{module}.{other}.weight" not in shapes:
            raise InvalidRequestError(f"{where}: {name} is no LoRA matrix, or the other one of its pair is missing")
        if len(shape) != 2 or shape[matrix == "lora_B"] != rank:
            raise InvalidRequestError(f"{where}: {name} is of shape {shape}, but {CONFIG_FILE} says rank {rank}")
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
    """InvalidRequestError unless all tensors of the folder reached modules of their size, and all are finite.

    `manager`: vLLM's `LoRAModelManager`, where the adapter is registered under `lora_id`; `q_proj`, `k_proj` and
    `v_proj` have become one entry `qkv_proj` by then, and so on.
    """
    where = f"sampler version {version.name}"
    weights = manager.get_adapter(lora_id).loras
    ignored = sorted(set(weights) - set(manager.modules))
    if ignored:
        raise InvalidRequestError(f"{where}: vLLM has no module for the tensors of {', '.join(ignored)}")
    taken = 0
    for name, module in weights.items():
        for (a, b), (slot_a, slot_b) in zip(_pairs(module), _slots(manager.modules[name]), strict=True):
            if a is None or b is None:  # the adapter has only some of those that vLLM packs into one
                continue
            # vLLM would copy a smaller matrix into a corner of its buffer.
            if a.shape[1] != slot_a.shape[-1] or b.shape[0] != slot_b.shape[-2]:
                raise InvalidRequestError(
                    f"{where}: {name} is {a.shape[1]} to {b.shape[0]} wide in the adapter, and "
                    f"{slot_a.shape[-1]} to {slot_b.shape[-2]} in the model"
                )
            if not (bool(a.isfinite().all()) and bool(b.isfinite().all())):
                raise InvalidRequestError(f"{where}: the tensors of {name} hold NaN or infinity")
            taken += 2
    if taken != shape.tensors:
        raise InvalidRequestError(f"{where}: vLLM took {taken} of its {shape.tensors} tensors")


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
