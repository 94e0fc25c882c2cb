"""What follows the MLP in a layer of Gemma 4, forward and backward.

    out = s (x + norm'(P (gelu(G x) * e)))        e: what the layer reads of `RowContext.per_layer`; or out = s x

G and P are frozen matrices, which adapters do not train, and s is one number. Legend: T tokens, H hidden size, P width
of what a layer reads beside hidden states.
"""

from collections.abc import Set
from dataclasses import dataclass
from typing import ClassVar

import torch
from tinker_local.backend.training.kernels.kernels import Activation
from tinker_local.backend.training.lora.lora import Target
from tinker_local.backend.training.model.decoders.written_out.block import (
    LAYER_END,
    LayerPart,
    NormAfter,
    RowContext,
    present,
)
from tinker_local.backend.training.model.decoders.written_out.mlp_block import activation_of
from tinker_local.backend.training.run.block_memory import BlockMemory
from tinker_local.backend.weights.frozen_matrix import FrozenMatrix


@dataclass(frozen=True, slots=True, eq=False)
class PerLayer:
    """`gate` [P, H], `up` [H, P], and the norm `after`."""

    gate: FrozenMatrix
    up: FrozenMatrix
    after: NormAfter
    activation: Activation


@dataclass(frozen=True, slots=True, eq=False)
class LayerEndBlock:
    """The end of layer `index` of the model. `scale` [1]: s. `per_layer`: None if the layer reads nothing beside hidden
    states."""

    index: int
    hidden: int
    scale: torch.Tensor
    per_layer: PerLayer | None

    module: ClassVar[str] = LAYER_END
    parameters: ClassVar[Set[str]] = frozenset({"per_layer_input_gate.weight", "per_layer_projection.weight"})
    norm_after: ClassVar[bool] = True

    @classmethod
    def recognises(cls, part: LayerPart) -> bool:
        """See `Block.recognises`."""
        return True

    @classmethod
    def take(cls, part: LayerPart) -> "LayerEndBlock":
        """See `Block.take`."""
        layer, after, per_layer = part.module, NormAfter.take(part), None
        if after is not None:
            gate, up = (part.make([each]) for each in (layer.per_layer_input_gate, layer.per_layer_projection))
            per_layer = PerLayer(gate, up, after, activation_of(layer, part.path))
        return cls(layer.layer_idx, layer.hidden_size, layer.layer_scalar.detach(), per_layer)

    @property
    def targets(self) -> tuple[Target, ...]:
        """None: adapters do not train it."""
        return ()

    def start(self, x: torch.Tensor, context: RowContext) -> "LayerEndPass":
        """Create a pass over `x` [T, H]."""
        return LayerEndPass(self, context, x)

    def memory(self, tokens: int, columns: int, itemsize: int) -> BlockMemory:
        """See `Block.memory`."""
        outputs = tokens * self.hidden * itemsize
        if self.per_layer is None:
            return BlockMemory(lean=0, large=0, transient=outputs)
        gates = 2 * tokens * self.per_layer.gate.outputs * itemsize
        return BlockMemory(lean=0, large=gates + outputs, transient=3 * outputs + 2 * gates)


@dataclass(slots=True, eq=False)
class LayerEndPass:
    """`gated` [T, 2 P]: G x, then e. `update` [T, H]: before the norm after."""

    block: LayerEndBlock
    context: RowContext
    x: torch.Tensor
    gated: torch.Tensor | None = None
    update: torch.Tensor | None = None

    def forward(self) -> torch.Tensor:
        block, per_layer = self.block, self.block.per_layer
        if per_layer is None:
            return self.x * block.scale
        self.restore()
        return per_layer.after.add(self.context.kernels, self.x, present(self.update)).mul_(block.scale)

    def drop_large(self) -> None:
        self.gated = self.update = None

    def restore(self) -> None:
        per_layer, c = self.block.per_layer, self.context
        if per_layer is None or self.update is not None:
            return
        read = present(c.per_layer)[:, self.block.index]
        self.gated = torch.cat([per_layer.gate.times(self.x), read], dim=-1)
        self.update = per_layer.up.times(c.kernels.glu(self.gated, per_layer.activation))

    def backward(self, grad: torch.Tensor) -> torch.Tensor:
        per_layer, c = self.block.per_layer, self.context
        grad_x = grad * self.block.scale
        if per_layer is None:
            return grad_x
        grad_update = per_layer.after.backward(c.kernels, grad_x, present(self.update))
        grad_active = per_layer.up.back(grad_update)
        grad_gated, _ = c.kernels.glu_backward(grad_active, present(self.gated), per_layer.activation)
        return per_layer.gate.add_back(grad_x, grad_gated[:, : per_layer.gate.outputs])
