"""Adapters of parts of a module's rows (see `SplitRows`) as one adapter of the module, which PEFT and vLLM know."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from tinker_local.backend.families.family import SplitRows
from tinker_local.types import InvalidRequestError

Tensors = Mapping[str, npt.NDArray[Any]]


def joined_parts(tensors: Tensors, split: Mapping[str, SplitRows], where: str) -> dict[str, npt.NDArray[Any]]:
    """`tensors` by PEFT's names, with one A and B in place of those of parts: n parts of rank r give A [n r, in], one
    below the other, and B [out, n r] with their B on the diagonal. InvalidRequestError if parts are missing."""
    found = dict(tensors)
    for module, rows in split.items():
        first = f".{rows.projections[0]}.lora_A.weight"
        for parent in [name.removesuffix(first) for name in tensors if name.endswith(first)]:
            names = {factor: [f"{parent}.{part}.lora_{factor}.weight" for part in rows.projections] for factor in "AB"}
            missing = [name for factor in "AB" for name in names[factor] if name not in tensors]
            if missing:
                raise InvalidRequestError(f"{where}: has {parent}{first}, and lacks {', '.join(missing)}")
            a, b = ([found.pop(name) for name in names[factor]] for factor in "AB")
            found[f"{parent}.{module}.lora_A.weight"] = np.concatenate(a)
            found[f"{parent}.{module}.lora_B.weight"] = _diagonal(b)
    return found


def _diagonal(blocks: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    joint = np.zeros((sum(len(block) for block in blocks), sum(block.shape[1] for block in blocks)), np.float32)
    row = column = 0
    for block in blocks:
        joint[row : row + len(block), column : column + block.shape[1]] = block
        row, column = row + len(block), column + block.shape[1]
    return joint
