"""The seam between the trainer and an architecture: embeddings to hidden states, and the gradient back to the adapters.

Two implementations: `decoders/written_out` computes forward and backward itself and is the fast one;
`decoders/autograd.py` runs the modules of transformers. Legend: T tokens, H hidden size, V image positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from tinker_local.backend.training.attention import Segments
from tinker_local.backend.training.lora import Target
from tinker_local.backend.training.lora_batch import LoraBatch
from tinker_local.backend.training.recompute_policy import ActivationMemory, RecomputePolicy


@dataclass(frozen=True, slots=True, eq=False)
class PackedRow:
    """One micro-batch as a row without padding. `embeds` [T, H] (a decoder may keep it, and does not change it),
    `position_ids` [1, T] or [3, 1, T] as the family's rotary module takes them, `segments` the lengths of the
    sequences. `deepstack`: added to the hidden states at `image_rows` [V] after the first layers, [V, H] each."""

    embeds: torch.Tensor
    position_ids: torch.Tensor
    segments: Segments
    image_rows: torch.Tensor | None = None
    deepstack: Sequence[torch.Tensor] = ()

    def add_deepstack(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """`hidden` [T, H], the output of layer `layer`, with the image features that belong there added in place."""
        if layer < len(self.deepstack) and self.image_rows is not None:
            hidden.index_add_(0, self.image_rows, self.deepstack[layer].to(hidden.dtype))
        return hidden


class DecoderPass(Protocol):
    """A forward pass and what its backward needs."""

    @property
    def hidden(self) -> torch.Tensor:
        """[T, H], after the last norm."""

    def backward(self, grad_hidden: torch.Tensor) -> torch.Tensor:
        """From the gradient by `hidden` [T, H] to the one by the embeddings [T, H]; writes the gradients of the
        adapters into the `LoraBatch`. Uses up this pass and `grad_hidden`."""


class Decoder(Protocol):
    """The layers of one base model, with frozen weights. Keeps nothing between calls."""

    @property
    def targets(self) -> Sequence[Target]:
        """The matrices that adapters can train, in the model's order."""

    def forward(self, row: PackedRow, lora: LoraBatch, policy: RecomputePolicy | None) -> DecoderPass:
        """Hidden states of `row` under the adapters of `lora`; `policy` says what each layer keeps for the backward
        (None: there will be no backward)."""

    def memory(self, tokens: int, columns: int) -> ActivationMemory:
        """What the activations of `tokens` take; `columns`: total rank of the adapters, R."""
