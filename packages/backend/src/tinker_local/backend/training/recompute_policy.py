"""Activation checkpointing: which activations a layer keeps for its backward, chosen by the memory there is."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch


class Keep(Enum):
    """What a layer keeps. `INPUT`: its input, and computes the rest again. `LEAN`: all but what is large and cheap to
    compute again. `ALL`: everything."""

    INPUT = 0
    LEAN = 1
    ALL = 2


RecomputePolicy = Sequence[Keep]
"""One per layer."""


@dataclass(frozen=True, slots=True)
class LayerMemory:
    """Bytes that one layer keeps beside its input: with `Keep.LEAN`, and what `Keep.ALL` adds."""

    lean: int
    large: int


@dataclass(frozen=True, slots=True)
class ActivationMemory:
    """Bytes of one micro-batch. `always`: what no policy saves, the inputs of all layers and one layer's backward."""

    always: int
    layers: Sequence[LayerMemory]

    @property
    def everything(self) -> int:
        """The budget with which every layer keeps all."""
        return self.always + sum(layer.lean + layer.large for layer in self.layers)

    def policy(self, budget: int | None) -> RecomputePolicy:
        """What each layer keeps so that all of it takes at most `budget` bytes (None: no limit); `always` is taken even
        if it exceeds the budget. What costs most to compute again per byte is kept first."""
        if budget is None:
            return [Keep.ALL] * len(self.layers)
        policy = [Keep.INPUT] * len(self.layers)
        free = budget - self.always
        for keep, sizes in (
            (Keep.LEAN, [layer.lean for layer in self.layers]),
            (Keep.ALL, [layer.large for layer in self.layers]),
        ):
            for index, size in enumerate(sizes):
                if size > free:
                    return policy
                policy[index] = keep
                free -= size
        return policy


def free_bytes(device: torch.device) -> int | None:
    """What can be allocated on `device` now, including what torch's allocator holds unused; None: no need to ask."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(free + unused)
