"""An adapter of experts, added to the tensors that files of the base model have of them.

Legend: E experts, H hidden size, I intermediate size, r rank.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from tinker_local.backend.adapters.adapter import LORA_ALPHA
from tinker_local.backend.adapters.adapter_tensors import as_torch
from tinker_local.backend.exporting.trained import Trained
from tinker_local.backend.families.family import Experts
from tinker_local.backend.weights.joined_names import EXPERTS_DOWN, EXPERTS_GATE_UP
from tinker_local.types import InvalidRequestError

if TYPE_CHECKING:
    import torch

Merge = Callable[["torch.Tensor"], "torch.Tensor"]
"""A tensor of the base model to the same with the adapter, in the same dtype."""


def expert_modules(trained: Trained) -> list[str]:
    """The modules of experts that the adapter trained. InvalidRequestError if it has a part of their projections."""
    names = trained.base.family.lora.experts
    if names is None:
        return []
    found: dict[str, list[str]] = {}
    for path in trained.paths:
        module, _, last = path.rpartition(".")
        if names.has(path):
            found.setdefault(module, []).append(last)
    for module, lasts in found.items():
        if set(lasts) != set(names.names):
            raise InvalidRequestError(f"the adapter has {', '.join(lasts)} of {module}, not all of {names.names}")
    return list(found)


def merges(trained: Trained, module: str, prefix: str, *, whole: bool) -> Mapping[str, Merge]:
    """For each tensor in files of the experts `module`: what adds the adapter. `prefix`: how their names begin;
    `whole`: whether the files have one of all experts, and not one of each."""
    names = trained.base.family.lora.experts
    assert names is not None
    gate, up, down = (f"{module}.{name}" for name in names.names)
    if whole:
        return {
            f"{prefix}{EXPERTS_GATE_UP}": partial(_add_to_all, trained, names, (gate, up)),
            f"{prefix}{EXPERTS_DOWN}": partial(_add_to_all, trained, names, (down,)),
        }
    count = max(len(factor) for factor in trained.factors(gate))
    return {
        f"{prefix}{expert}.{name}.weight": partial(_add, trained, path, expert)
        for expert in range(count)
        for name, path in zip(names.in_files, (gate, up, down), strict=True)
    }


def _change(trained: Trained, path: str, expert: int) -> "torch.Tensor":
    """alpha / r B A of one expert, float32 [out, in]."""
    a, b = (as_torch(factor) for factor in trained.factors(path))
    a, b = (factor[expert if len(factor) > 1 else 0] for factor in (a, b))
    return (b @ a).mul_(LORA_ALPHA / trained.config.rank)


def _add(trained: Trained, path: str, expert: int, tensor: "torch.Tensor") -> "torch.Tensor":
    return tensor.float().add_(_change(trained, path, expert)).to(tensor.dtype)


def _add_to_all(trained: Trained, names: Experts, paths: tuple[str, ...], tensor: "torch.Tensor") -> "torch.Tensor":
    """`tensor` [E, out of all `paths`, in], or transposed."""
    merged = tensor.clone()
    for expert, matrix in enumerate(merged):
        rows, count = matrix.T if names.transposed else matrix, len(paths)
        for place, path in enumerate(paths):
            part = rows[place::count] if names.interleaved else rows.chunk(count)[place]
            part.copy_(part.float() + _change(trained, path, expert))
    return merged
