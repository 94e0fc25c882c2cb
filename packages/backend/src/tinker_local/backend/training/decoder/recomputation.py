"""What a layer keeps of its forward for the backward, and what it computes again: chosen by the memory there is.

Legend: T tokens, H hidden size, N query heads, M key-value heads, D head size, I intermediate size.
"""

from enum import Enum

import torch
from tinker_local.backend.training.decoder.layer import LayerActivations
from tinker_local.backend.training.decoder.weights import DecoderWeights


class Keep(Enum):
    """`ALL`: nothing is computed again. `NO_GATE_UP`: the first half of the MLP is, half a layer's work for more than
    half of its memory. `INPUT`: the whole layer is."""

    INPUT = 0
    NO_GATE_UP = 1
    ALL = 2


def drop(kept: LayerActivations, keep: Keep) -> LayerActivations:
    """What is left of a layer's activations."""
    if keep is Keep.INPUT:
        return LayerActivations(kept.x)
    if keep is Keep.NO_GATE_UP:
        kept.gate_up = None
    return kept


def plan(weights: DecoderWeights, tokens: int, columns: int, itemsize: int, budget: int) -> list[Keep]:
    """What each layer keeps of `tokens`, so that all that is kept, and what one layer's backward needs beside it, takes
    at most `budget` bytes (as far as that goes: the inputs are always kept).

    `columns`: of the adapters, R. What costs most to compute again per byte is kept first.
    """
    layers = len(weights.layers)
    gate_up, rest, always = _sizes(weights, tokens, columns, itemsize)
    free = budget - always
    most_rest = max(0, min(layers, free // rest))
    most_gate_up = max(0, min(most_rest, (free - most_rest * rest) // gate_up)) if most_rest == layers else 0
    return [
        Keep.ALL if layer < most_gate_up else Keep.NO_GATE_UP if layer < most_rest else Keep.INPUT
        for layer in range(layers)
    ]


def everything(weights: DecoderWeights, tokens: int, columns: int, itemsize: int) -> int:
    """The budget with which `plan` lets every layer keep all of `tokens`."""
    gate_up, rest, always = _sizes(weights, tokens, columns, itemsize)
    return always + len(weights.layers) * (gate_up + rest)


def _sizes(weights: DecoderWeights, tokens: int, columns: int, itemsize: int) -> tuple[int, int, int]:
    """Bytes of one layer's gate and up, of the rest that it may keep, and of what there is whatever is kept: the inputs
    of all layers and one layer in its backward."""
    gate_up = tokens * 2 * weights.intermediate * itemsize
    heads = tokens * (2 * weights.q_width + 2 * weights.kv_width) * itemsize + tokens * weights.heads * 4
    rest = heads + tokens * (weights.hidden + 7 * columns) * itemsize
    inputs = tokens * weights.hidden * itemsize
    # In its backward a layer has all its activations, the gradients by gate and up in place of them, a, m and their
    # gradients, or query, key, value and theirs.
    transient = gate_up + rest + max(gate_up, 3 * heads) + 3 * inputs
    return gate_up, rest, transient + (len(weights.layers) + 1) * inputs


def free_bytes(device: torch.device) -> int | None:
    """What can be allocated on `device` now, with what torch's allocator holds unused; None: no need to ask."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(free + unused)
