"""Activation checkpointing: choose which activations each layer keeps for its backward, within a memory budget."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class Keep(Enum):
    """What a layer keeps. `INPUT`: only its input; the rest is recomputed. `ATTENDED`: also what attention put out, so
    that all else but attention is recomputed. `LEAN`: all activations except those that are large and cheap to
    recompute. `ALL`: everything."""

    INPUT = 0
    ATTENDED = 1
    LEAN = 2
    ALL = 3


RecomputePolicy = Sequence[Keep]
"""One `Keep` per layer."""


@dataclass(frozen=True, slots=True)
class LayerMemory:
    """Bytes that one layer keeps in addition to its input: with `Keep.LEAN`, and what `Keep.ALL` adds. `attended`: the
    part of `lean` that `Keep.ATTENDED` keeps; 0 unless a byte of it saves more work than a byte of the rest."""

    lean: int
    large: int
    attended: int = 0


@dataclass(frozen=True, slots=True)
class ActivationMemory:
    """Bytes of one micro-batch. `always`: what every policy needs, all layers' inputs and one layer's backward."""

    always: int
    layers: Sequence[LayerMemory]

    @property
    def everything(self) -> int:
        """The smallest budget with which every layer keeps everything."""
        return self.always + sum(layer.lean + layer.large for layer in self.layers)

    def policy(self, budget: int | None) -> RecomputePolicy:
        """Choose what each layer keeps within `budget` bytes (None: no limit), which `always` alone may exceed. What
        costs most to recompute per byte is kept first."""
        if budget is None:
            return [Keep.ALL] * len(self.layers)
        policy = [Keep.INPUT] * len(self.layers)
        free = budget - self.always
        for keep, sizes in (
            (Keep.ATTENDED, [layer.attended for layer in self.layers]),
            (Keep.LEAN, [layer.lean - layer.attended for layer in self.layers]),
            (Keep.ALL, [layer.large for layer in self.layers]),
        ):
            for index, size in enumerate(sizes):
                if size > free:
                    return policy
                if size or keep is not Keep.ATTENDED:
                    policy[index] = keep
                free -= size
        return policy


def free_bytes(device: "torch.device") -> int | None:
    """Bytes that can be allocated on `device`, including the cache of torch's allocator, within the share of the
    device that torch allows this process; None if it is not a GPU."""
    if device.type != "cuda":
        return None
    import torch

    free, total = torch.cuda.mem_get_info(device)
    allocated = torch.cuda.memory_allocated(device)
    unused = torch.cuda.memory_reserved(device) - allocated
    allowed = torch.cuda.get_per_process_memory_fraction(device.index) * total - allocated
    return int(min(free + unused, allowed))
