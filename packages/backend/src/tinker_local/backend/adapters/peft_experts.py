"""Adapters of routed experts in the form that PEFT has for them: of a parameter that holds all experts of a layer.

PEFT (`target_parameters`, since 0.19.1) changes a parameter by B_e A_e for each expert e. Its A is [E r, in], expert by
expert; of its B, [out, r E], the columns of all experts for the first of r ranks come first. What experts share here is
repeated. gate and up are one parameter, so theirs has rank 2 r: both A, one below the other, and a B in two blocks.

Legend: E experts, H hidden size, I intermediate size, r rank.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from tinker_local.backend.adapters.adapter import FACTORS
from tinker_local.backend.families.family import Experts
from tinker_local.backend.weights.joined_names import EXPERTS_DOWN, EXPERTS_GATE_UP
from tinker_local.types import InvalidRequestError

Tensors = Mapping[str, npt.NDArray[Any]]

PEFT_VERSION = "0.19.1"
"""The first with this form: 0.17 to 0.19.0 exchange rows and columns of models that keep matrices as [out, in]."""

_OF_ONE_EXPERT = re.compile(r"\.experts\.\d+\.")


def check_experts_together(names: Iterable[str], experts: Experts | None, file: str) -> None:
    """InvalidRequestError if one of the tensors `names` of `file` is of one expert, of a model that has `experts`."""
    single = next((name for name in names if _OF_ONE_EXPERT.search(name)), None)
    if experts is not None and single is not None:
        raise InvalidRequestError(
            f"{file}: {single} is a module of one expert, as the cookbook's build_lora_adapter writes them; in "
            "transformers the experts of a layer are one module, and PEFT leaves such tensors out silently in most "
            "families. Give the checkpoint or the download that it was made of, which `tinker-local export` converts"
        )


def target_parameters(tensors: Tensors, names: Experts | None) -> list[str]:
    """PEFT's `target_parameters` for `tensors` of an adapter here; empty if it trained no experts."""
    if names is None:
        return []
    parents = {module.rpartition(".")[2] for module in _modules(tensors, names)}
    return [f"{parent}.{parameter}" for parent in sorted(parents) for parameter in (EXPERTS_GATE_UP, EXPERTS_DOWN)]


def as_parameters(tensors: Tensors, names: Experts) -> dict[str, npt.NDArray[np.float32]]:
    """`tensors` of an adapter here, with those of experts in PEFT's form."""
    found = {name: np.asarray(array, np.float32) for name, array in tensors.items()}
    for module in _modules(tensors, names):
        (a_gate, b_gate), (a_up, b_up), (a_down, b_down) = (
            [found.pop(f"{module}.{name}.lora_{factor}.weight") for factor in FACTORS] for name in names.names
        )
        count, width, rank = b_gate.shape
        b = np.zeros((count, 2 * width, 2 * rank), np.float32)
        for rows, columns, block in zip(_halves(names, width), _halves(None, rank), (b_gate, b_up), strict=True):
            b[:, rows, columns] = block
        of_gate_up, of_down = _paths(module)
        found[f"{of_gate_up}.lora_A.weight"] = np.tile(np.concatenate([a_gate[0], a_up[0]]), (count, 1))
        found[f"{of_gate_up}.lora_B.weight"] = b.transpose(1, 2, 0).reshape(2 * width, -1)
        found[f"{of_down}.lora_A.weight"] = a_down.reshape(count * rank, width)
        found[f"{of_down}.lora_B.weight"] = np.repeat(b_down[0], count, axis=1)
    return found


def from_parameters(tensors: Tensors, names: Experts, parent: str, rank: int, file: str) -> dict[str, npt.NDArray[Any]]:
    """`tensors` of an adapter in PEFT's form, of rank `rank`, with those of experts as they are here. `parent`: the
    last name of modules of experts. InvalidRequestError, which names a tensor of `file`, if experts do not share what
    they share here."""
    found = dict(tensors)
    ending = f".{parent}.base_layer.lora_A.weight"
    modules = [name.removesuffix(ending) + f".{parent}" for name in tensors if name.endswith(ending)]
    if not modules:
        raise InvalidRequestError(
            f"{file}: holds no tensor …{ending}, though target_parameters names {parent}.{EXPERTS_GATE_UP}"
        )
    for module in modules:
        given = [f"{path}.lora_{factor}.weight" for path in _paths(module) for factor in FACTORS]
        if missing := [name for name in given if name not in tensors]:
            raise InvalidRequestError(f"{file}: has {given[0]}, and lacks {', '.join(missing)}")
        for name in given:
            if found[name].ndim != 2 or 0 in found[name].shape:
                raise InvalidRequestError(f"{file}: {name}: has shape {list(found[name].shape)}, not of a matrix")
        a, b, a_down, b_down = (found.pop(name) for name in given)
        count = len(a_down) // rank
        wanted = [(2 * rank * count, a.shape[1]), (2 * a_down.shape[1], 2 * rank * count)]
        wanted += [(rank * count, a_down.shape[1]), (a.shape[1], rank * count)]
        for name, array, shape in zip(given, (a, b, a_down, b_down), wanted, strict=True):
            if array.shape != shape:
                raise InvalidRequestError(
                    f"{file}: {name}: has shape {list(array.shape)}, and r {rank} with {count} experts wants "
                    f"{list(shape)}; PEFT before {PEFT_VERSION} has another form, which is not read"
                )
        a = a.reshape(count, 2 * rank, -1)
        b = b.reshape(len(b), 2 * rank, count).transpose(2, 0, 1)
        b_down = b_down.reshape(len(b_down), rank, count)
        for name, array, first in ((given[0], a, a[:1]), (given[3], b_down, b_down[..., :1])):
            if not (array == first).all():
                raise InvalidRequestError(
                    f"{file}: {name}: differs between experts; here all experts share A of gate and up, and B of down"
                )
        width, left = b.shape[1] // 2, b.copy()
        for part, rows, columns in zip((names.gate, names.up), _halves(names, width), _halves(None, rank), strict=True):
            found[f"{module}.{part}.lora_A.weight"] = a[:1, columns]
            found[f"{module}.{part}.lora_B.weight"] = b[:, rows, columns]
            left[:, rows, columns] = 0
        if left.any():
            raise InvalidRequestError(
                f"{file}: {given[1]}: is not 0 beside its two blocks, so that gate and up do not have ranks for "
                f"themselves, as they have here"
            )
        found[f"{module}.{names.down}.lora_A.weight"] = a_down.reshape(count, rank, width)
        found[f"{module}.{names.down}.lora_B.weight"] = b_down[None, ..., 0]
    return found


def _modules(tensors: Tensors, names: Experts) -> list[str]:
    """The paths of modules of experts that an adapter here trained."""
    ending = f".{names.gate}.lora_A.weight"
    found = [name.removesuffix(ending) for name in tensors if name.endswith(ending)]
    return [module for module in found if names.has(f"{module}.{names.gate}")]


def _paths(module: str) -> tuple[str, str]:
    """Where PEFT has the adapters of `gate_up_proj` and of `down_proj`: it wraps the module for the first parameter,
    and what it has then for the second."""
    return f"{module}.base_layer", module


def _halves(names: Experts | None, size: int) -> tuple[slice, slice]:
    """The numbers of gate and of up among 2 `size`."""
    if names is not None and names.interleaved:
        return slice(0, None, 2), slice(1, None, 2)
    return slice(0, size), slice(size, 2 * size)
