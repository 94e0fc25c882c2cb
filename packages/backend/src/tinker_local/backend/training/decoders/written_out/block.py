"""What a block of a layer is: x + f(norm(x)), forward and backward.

A layer is a sequence of blocks. Another kind of block is another file beside `attention_block.py` and `mlp_block.py`.
Legend: T tokens, H hidden size, D head size, R columns of adapters.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from tinker_local.backend.training.attention import Segments
from tinker_local.backend.training.kernels import Kernels
from tinker_local.backend.training.lora import Target
from tinker_local.backend.training.lora_batch import LoraBatch


@dataclass(frozen=True, slots=True, eq=False)
class RowContext:
    """What all blocks of a micro-batch share. `cos`, `sin` [T, D]: rotary positions."""

    kernels: Kernels
    segments: Segments
    cos: torch.Tensor
    sin: torch.Tensor
    lora: LoraBatch


class BlockPass(Protocol):
    """One block on one micro-batch: its activations between forward and backward."""

    x: torch.Tensor
    """The block's input, [T, H]."""

    def forward(self) -> torch.Tensor:
        """The output [T, H]; keeps everything that the backward reads."""

    def drop_large(self) -> None:
        """Let go of what is large and cheap to compute again."""

    def restore(self) -> None:
        """Compute again what the backward reads and is not there."""

    def backward(self, grad: torch.Tensor) -> torch.Tensor:
        """The gradient by the input from that by the output, both [T, H]; writes the adapters' gradients. Call
        `restore` before. Uses up the activations, whose memory becomes that of gradients."""


@dataclass(frozen=True, slots=True)
class BlockMemory:
    """Bytes that a block keeps beside its input (`lean`), what `drop_large` lets go of (`large`), and what its backward
    takes beside these (`transient`)."""

    lean: int
    large: int
    transient: int


class Block(Protocol):
    """One block's frozen weights."""

    @property
    def targets(self) -> Sequence[Target]:
        """The matrices of this block that adapters can train."""

    def start(self, x: torch.Tensor, context: RowContext) -> BlockPass:
        """A pass over `x` [T, H]; computes nothing yet."""

    def memory(self, tokens: int, columns: int, itemsize: int) -> BlockMemory:
        """Bytes of the activations of `tokens`, of `itemsize` bytes a number, with R `columns` of adapters."""


def there(tensor: torch.Tensor | None) -> torch.Tensor:
    """`tensor`, which was kept or computed again before."""
    assert tensor is not None, "kept or computed again before the backward"
    return tensor


def joined(modules: Sequence[torch.nn.Linear]) -> torch.Tensor:
    """The modules' weights, concatenated by rows, in memory that the modules share from now on."""
    matrix = torch.cat([module.weight.detach() for module in modules])
    start = 0
    for module in modules:
        rows = module.weight.shape[0]
        module.weight = torch.nn.Parameter(matrix[start : start + rows], requires_grad=False)
        start += rows
    return matrix
