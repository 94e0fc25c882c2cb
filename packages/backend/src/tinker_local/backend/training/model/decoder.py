"""The interface between the trainer and an architecture: embeddings to hidden states, and gradients back to adapters.

There are two implementations: `decoders/written_out` has a hand-written forward and backward, which is faster;
`decoders/autograd.py` runs the modules of transformers. Legend: T tokens, H hidden size, V image positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from tinker_local.backend.options import DecoderName
from tinker_local.backend.training.lora.lora import Target
from tinker_local.backend.training.lora.lora_batch import LoraBatch
from tinker_local.backend.training.model.segments import Segments
from tinker_local.backend.training.model.taken_routes import RowRoutes
from tinker_local.backend.training.rotations import Rotations
from tinker_local.backend.training.routes import RoutedLayers
from tinker_local.backend.training.run.recompute_policy import ActivationMemory, RecomputePolicy
from tinker_local.backend.weights.large_weights import RESIDENT, Walk


@dataclass(frozen=True, slots=True, eq=False)
class PackedRow:
    """One micro-batch as a row without padding.

    `embeds` [T, H]: decoders may keep but not change it. `position_ids` [1, T] or [3, 1, T], as the family's rotary
    module takes them. `segments`: the lengths of the sequences; if several ranks share the row, those of all of it, and
    all else is of the T positions of this rank. `deepstack`: [V, H] each, added at `image_rows` [V] to the output of
    the layers whose numbers are in `after`; -1: to what enters the first. `grad_deepstack`: receives their gradients in
    a backward; empty if none needs them.
    `per_layer` [T, layers, P]: embeddings of the tokens that layers read beside hidden states (`per_layer.py`), if they
    do. `routes`: the experts that are taken, where that is not left to the routers.
    """

    embeds: torch.Tensor
    position_ids: torch.Tensor
    segments: Segments
    image_rows: torch.Tensor | None = None
    deepstack: Sequence[torch.Tensor] = ()
    grad_deepstack: Sequence[torch.Tensor] = ()
    per_layer: torch.Tensor | None = None
    after: Sequence[int] = ()
    routes: RowRoutes | None = None

    def has_deepstack(self, layer: int) -> bool:
        """Whether image features are added after layer `layer`."""
        return layer in self.after and self.image_rows is not None

    def add_deepstack(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """Add the image features of layer `layer` to its output `hidden` [T, H], in place."""
        if layer in self.after and self.image_rows is not None:
            hidden.index_add_(0, self.image_rows, self.deepstack[self.after.index(layer)].to(hidden.dtype))
        return hidden

    def write_deepstack_gradient(self, layer: int, grad: torch.Tensor) -> None:
        """Write the gradient of the image features of layer `layer` from that of its output, [T, H]."""
        if layer in self.after and self.grad_deepstack and self.image_rows is not None:
            torch.index_select(grad, 0, self.image_rows, out=self.grad_deepstack[self.after.index(layer)])


class DecoderPass(Protocol):
    """A forward pass, with what its backward needs."""

    @property
    def hidden(self) -> torch.Tensor:
        """Hidden states after the last norm, [T, H]."""

    def backward(self, grad_hidden: torch.Tensor) -> torch.Tensor:
        """The gradient of the embeddings [T, H] from that of `hidden` [T, H]. Writes the adapters' gradients to the
        `LoraBatch`, and those of image features to `PackedRow.grad_deepstack`. Consumes this pass and `grad_hidden`.
        Walks back through the layers."""


class Decoder(Protocol):
    """The layers of one base model, with frozen weights. Stateless between calls. `name`: as `--decoder` has it.
    `least_segment`: how many positions a shorter segment takes the memory of, in a row with segments as long. `routed`:
    the layers of which `PackedRow.routes` may say which experts are taken; None: of none."""

    name: DecoderName
    least_segment: int
    routed: RoutedLayers | None

    @property
    def targets(self) -> Sequence[Target]:
        """The matrices that adapters can train, in the model's order."""

    def forward(
        self, row: PackedRow, lora: LoraBatch, policy: RecomputePolicy | None, walk: Walk = RESIDENT
    ) -> DecoderPass:
        """Hidden states of `row` with the adapters of `lora`. `policy`: what each layer keeps for the backward (None:
        no backward follows). Enters every layer of `walk` before it reads its weights, also in the backward."""

    def memory(self, tokens: int, columns: int, keys: float = 0) -> ActivationMemory:
        """The memory that activations of `tokens` take. `columns`: total rank of the adapters, R. `keys`: how many each
        position sees, on average, which decides what is kept first."""

    def rotations(self, layers: Sequence[int] | None, position_ids: torch.Tensor) -> Rotations:
        """What attention of `layers` (None: of all that have any) gets at `position_ids`, as in `PackedRow`. Reads no
        large weights."""
