"""The frozen weights of a trainer, lent to a sampler of the same process."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, slots=True, eq=False)
class LentWeights:
    """`tensors` of the trainer, by their names in a model's files. They never change, which `verify` checks: a write
    would change what both engines compute, and comparing them would not show it."""

    tensors: Mapping[str, torch.Tensor]
    _sums: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._sums.update({name: checksum(tensor) for name, tensor in self.tensors.items()})

    def verify(self) -> None:
        """RuntimeError if a tensor is not what it was."""
        changed = [name for name, tensor in self.tensors.items() if checksum(tensor) != self._sums[name]]
        if changed:
            more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            raise RuntimeError(f"the frozen weights have changed in memory: {changed[0]}{more}")


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(tensor: torch.Tensor) -> int:
    """The sum of the bits of all numbers, as integers of their size, modulo 2^64."""
    return int(tensor.view(_INTEGERS[tensor.element_size()]).sum(dtype=torch.int64))
