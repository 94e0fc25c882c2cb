"""The interface of a block: x + f(norm(x)), or x + norm'(f(norm(x))), forward and backward.

A layer is a sequence of blocks. To add a kind of block, add a file beside `attention_block.py` and `mlp_block.py`.
Legend: T tokens, H hidden size, D head size, R columns of adapters.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from tinker_local.backend.training.kernels.kernels import Kernels
from tinker_local.backend.training.lora.lora import Target
from tinker_local.backend.training.lora.lora_batch import LoraBatch
from tinker_local.backend.training.model.attention import Segments
from tinker_local.backend.training.run.block_memory import BlockMemory
from tinker_local.backend.weights.frozen_matrix import DenseMatrix, FrozenMatrix

Kept = TypeVar("Kept")


@dataclass(frozen=True, slots=True, eq=False)
class RowContext:
    """Shared by all blocks of a micro-batch. `angles`: cos and sin [T, rotary] of the positions, for the first `rotary`
    of the D numbers of a head, by the kind of layer; under None if all layers have the same."""

    kernels: Kernels
    segments: Segments
    angles: Mapping[str | None, tuple[torch.Tensor, torch.Tensor]]
    lora: LoraBatch


class BlockPass(Protocol):
    """The activations of one block on one micro-batch, between forward and backward."""

    x: torch.Tensor
    """The block's input, [T, H]."""

    def forward(self) -> torch.Tensor:
        """Compute the output [T, H]; keep everything that the backward reads."""

    def drop_large(self) -> None:
        """Drop activations that are large and cheap to recompute."""

    def restore(self) -> None:
        """Recompute the activations that the backward reads and that were not kept."""

    def backward(self, grad: torch.Tensor) -> torch.Tensor:
        """The gradient of the input from that of the output, both [T, H]. Writes the adapters' gradients. Call
        `restore` first. Consumes the activations: gradients may overwrite them."""


class Block(Protocol):
    """The frozen weights of one block."""

    @property
    def targets(self) -> Sequence[Target]:
        """The matrices of this block that adapters can train."""

    def start(self, x: torch.Tensor, context: RowContext) -> BlockPass:
        """Create a pass over `x` [T, H], without computing anything."""

    def memory(self, tokens: int, columns: int, itemsize: int) -> BlockMemory:
        """Bytes that activations of `tokens` take, at `itemsize` bytes per number, with R `columns` of adapters."""


def present(value: Kept | None) -> Kept:
    """`value`, which has been kept or recomputed."""
    assert value is not None, "kept or recomputed before the backward"
    return value


def norm_weight(norm: Any) -> tuple[torch.Tensor, float]:
    """What transformers' RMS norm multiplies by, [H], and its epsilon. Qwen3.5's and Gemma's multiply by 1 + w: the sum
    is made in float32, where it loses nothing."""
    if hasattr(norm, "variance_epsilon"):
        return norm.weight.detach(), norm.variance_epsilon
    return 1 + norm.weight.detach().to(torch.promote_types(norm.weight.dtype, torch.float32)), norm.eps


@dataclass(frozen=True, slots=True, eq=False)
class NormAfter:
    """A norm of what a block adds to its input, as Gemma has it: its weight [H] and epsilon."""

    weight: torch.Tensor
    epsilon: float

    @classmethod
    def take(cls, norm: Any) -> "NormAfter":
        """From transformers' module."""
        return cls(*norm_weight(norm))

    def add(self, kernels: Kernels, x: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
        """`x` plus the norm of `update`, [T, H] each."""
        return kernels.rms_norm(update, self.weight, self.epsilon).add_(x)

    def backward(self, kernels: Kernels, grad: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
        """The gradient of `update` from that of the sum, which is not overwritten."""
        return kernels.rms_norm_backward(grad, update, self.weight, self.epsilon, None)


def joined(modules: Sequence[torch.nn.Linear]) -> FrozenMatrix:
    """The modules' matrices, one below the other; the modules' parameters become views of it."""
    matrix = concatenated([module.weight.detach() for module in modules])
    start = 0
    for module in modules:
        rows = module.weight.shape[0]
        module.weight = torch.nn.Parameter(matrix[start : start + rows], requires_grad=False)
        start += rows
    return DenseMatrix(matrix)


def concatenated(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate contiguous `parts` by rows: a view, if they lie side by side in memory."""
    first, end = parts[0], parts[0].storage_offset()
    for part in parts:
        if part.untyped_storage()._cdata != first.untyped_storage()._cdata or part.storage_offset() != end:
            return torch.cat([*parts])
        end += part.numel()
    return first.as_strided((sum(len(part) for part in parts), *first.shape[1:]), first.stride())
