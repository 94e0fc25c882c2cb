"""The frozen weights of a trainer, lent to a sampler of the same process."""

import zlib
from collections.abc import Mapping, Set
from dataclasses import dataclass, field

import torch


class CannotShareError(Exception):
    """Why a sampler cannot read a trainer's memory."""


@dataclass(frozen=True, slots=True, eq=False)
class LentWeights:
    """The `tensors` of a model's files, by name; those named in `lent` are in the trainer's memory. These never change,
    which `verify` checks: a write would change what both engines compute, and comparing them would not show it."""

    tensors: Mapping[str, torch.Tensor] = field(repr=False)
    lent: Set[str] = field(repr=False)
    _sums: dict[str, int] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self._sums.update({name: checksum(self.tensors[name]) for name in sorted(self.lent)})

    def storages(self) -> dict[int, torch.Tensor]:
        """One of the lent tensors in each piece of memory, by the address of its storage."""
        return {self.tensors[name].untyped_storage()._cdata: self.tensors[name] for name in self.lent}

    def verify(self) -> None:
        """RuntimeError if a tensor is not what it was."""
        changed = [name for name, before in self._sums.items() if checksum(self.tensors[name]) != before]
        if changed:
            more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            raise RuntimeError(f"the frozen weights have changed in memory: {changed[0]}{more}")


def checksum(tensor: torch.Tensor) -> int:
    """CRC-32 of the bytes of `tensor`, in the order of its elements."""
    return zlib.crc32(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy())
