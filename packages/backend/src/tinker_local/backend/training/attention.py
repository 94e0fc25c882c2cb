"""Causal attention inside segments of one packed row, forward and backward.

A segment is one sequence's contiguous positions; the bounds are given explicitly, nothing is inferred from position ids
and no mask is ever built. Legend: T positions, N query heads, M key-value heads (N is a multiple of M), D head size.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from tinker_local.backend.training import compat_torch
from tinker_local.backend.training.transfer import to_device


@dataclass(frozen=True, slots=True)
class Run:
    """`count` neighbouring segments of the same `length`, from position `start` on."""

    start: int
    count: int
    length: int

    @property
    def stop(self) -> int:
        return self.start + self.count * self.length


@dataclass(frozen=True)
class Segments:
    """`lengths` of the segments that tile a row, in order, and the same on the device as attention kernels want it."""

    lengths: tuple[int, ...]
    device: torch.device

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """Neighbours of equal length taken together, so that they make one batched call."""
        runs, start = [], 0
        for length, group in itertools.groupby(self.lengths):
            run = Run(start, len(list(group)), length)
            runs.append(run)
            start = run.stop
        return tuple(runs)

    @cached_property
    def bounds(self) -> torch.Tensor:
        """int32 [segments + 1]: where each begins, and the end."""
        return to_device(np.array([0, *itertools.accumulate(self.lengths)], np.int32), self.device)

    @cached_property
    def longest(self) -> int:
        return max(self.lengths)


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: Segments, scaling: float
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`query` [T, N, D]; `key`, `value` [T, M, D], rows may be apart -> output [T, N, D], and what `attend_backward`
    needs beside it. T is the sum of the segments' lengths."""
    if compat_torch.flash_attention_works(query):
        return compat_torch.flash_attention(query, key, value, segments.bounds, segments.longest, scaling, causal=True)
    outputs = [_run_attention(query, key, value, run, scaling) for run in segments.runs]
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs)), None


def attend_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    logsumexp: torch.Tensor | None,
    segments: Segments,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients by query, key and value from that by the output, [T, N, D]; the rest as `attend` was given and gave."""
    if logsumexp is not None:
        return compat_torch.flash_attention_backward(
            grad, query, key, value, output, logsumexp, segments.bounds, segments.longest, scaling
        )
    with torch.enable_grad():
        leaves = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
        again, _ = attend(leaves[0], leaves[1], leaves[2], segments, scaling)
        by_query, by_key, by_value = torch.autograd.grad(again, leaves, grad)
    return by_query, by_key, by_value


def _run_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, run: Run, scaling: float
) -> torch.Tensor:
    """Attention of one run's segments as a batch, [count * length, N, D]."""
    batched = [
        tensor[run.start : run.stop].unflatten(0, (run.count, run.length)).transpose(1, 2)
        for tensor in (query, key, value)
    ]
    output = torch.nn.functional.scaled_dot_product_attention(
        *batched, is_causal=True, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
    )
    return output.transpose(1, 2).flatten(0, 1)


def supported_layers(layer_types: Sequence[str]) -> bool:
    """Whether all layers attend to everything before them."""
    return all(layer_type == "full_attention" for layer_type in layer_types)
