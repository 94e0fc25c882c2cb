"""The interface of a block: x + f(norm(x)), or x + norm'(f(norm(x))), forward and backward.

A layer is a sequence of blocks. To add a kind, add a file beside `attention_block.py` and its class to `BLOCKS` in
`take_layers.py`; docs/extending.md has one.

Legend: T tokens, H hidden size, D head size, R columns of adapters.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from tinker_local.backend.families.family import Experts
from tinker_local.backend.training.kernels.kernels import Kernels
from tinker_local.backend.training.lora.lora import Target
from tinker_local.backend.training.lora.lora_batch import LoraBatch
from tinker_local.backend.training.model.attention_rule import AttentionRule
from tinker_local.backend.training.model.segments import Segments, wide_dtype
from tinker_local.backend.training.model.taken_routes import LayerRoutes
from tinker_local.backend.training.run.block_memory import BlockMemory
from tinker_local.backend.weights.frozen_matrix import MakeMatrix

Kept = TypeVar("Kept")

Angles = tuple[torch.Tensor, torch.Tensor]
"""cos and sin."""

LAYER_END = "end"
"""The name of the part of a layer that follows its MLP, whose module is the layer itself."""


@dataclass(frozen=True, slots=True, eq=False)
class RowContext:
    """Shared by all blocks of a micro-batch. `angles`: cos and sin [T, rotary] of the positions, for the first `rotary`
    of the D numbers of a head, by the kind of layer; under None if all layers have the same. `query_angles`: the same
    for queries, with what multiplies them. `per_layer` [T, layers, P]: what layers read beside hidden states, if they
    do. `lent`: keys and values that later layers of a kind read, too, from the forward of the layer that has them to
    its backward. `routes`: the experts that blocks take, of those that do not choose them all."""

    kernels: Kernels
    segments: Segments
    angles: Mapping[str | None, Angles]
    query_angles: Mapping[str | None, Angles]
    lora: LoraBatch
    per_layer: torch.Tensor | None = None
    lent: dict[str | None, "LentKeys"] = field(default_factory=dict)
    routes: Mapping[object, LayerRoutes] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class LentKeys:
    """`key` and `value` [T, M, D] of one layer, and the gradients that reach them from the layers that read them, in
    float32 (float64 stays)."""

    key: torch.Tensor
    value: torch.Tensor
    grad_key: torch.Tensor | None = None
    grad_value: torch.Tensor | None = None

    def add(self, grad_key: torch.Tensor, grad_value: torch.Tensor) -> None:
        """Add the gradients of one layer that has read them, which may be overwritten."""
        if self.grad_key is None or self.grad_value is None:
            wide = wide_dtype(grad_key)
            self.grad_key, self.grad_value = grad_key.to(wide), grad_value.to(wide)
        else:
            self.grad_key += grad_key
            self.grad_value += grad_value

    def gradients(self, grad_key: torch.Tensor, grad_value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """All gradients of key and value, with those of the layer that has them."""
        self.add(grad_key, grad_value)
        return present(self.grad_key).to(grad_key.dtype), present(self.grad_value).to(grad_value.dtype)


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


@dataclass(frozen=True, slots=True, eq=False)
class LayerPart:
    """What a block is made of: transformers' `module`, called `name` in its layer and at `path` of the model; the norm
    `before` it, and the one `after` it if the family has such (of a layer's end there is none before). `index`: of the
    blocks of its class and `variant`, in the model. `variant`: empty for parts with projections as wide as those of the
    first one; what follows the names of the other parts' groups, since targets of a group are equally large.
    `rule`, known when a block is taken, and `rotary`: of its attention (see `AttentionBlock`). `experts`: how the
    family names routed experts, if it has any. `make`: makes frozen matrices."""

    name: str
    path: str
    module: Any
    before: Any
    after: Any | None
    index: int
    rule: AttentionRule | None
    rotary: str | None
    experts: Experts | None
    make: MakeMatrix
    variant: str = ""


class Block(Protocol):
    """The frozen weights of one block."""

    module: ClassVar[str]
    """What transformers calls its module in a layer: "mlp", what stands in the place of attention, or `LAYER_END`."""

    parameters: ClassVar[Set[str]]
    """The parameters of that module with which it computes, all or some of them. A module with others is refused."""

    norm_after: ClassVar[bool]
    """Whether it computes a norm after."""

    @classmethod
    def recognises(cls, part: LayerPart) -> bool:
        """Whether `part`, whose `name` is `module`, is of this kind, and not of another one of that name. Weights have
        no values yet where ranks hold parts of them."""

    @classmethod
    def take(cls, part: LayerPart) -> "Block":
        """Make the block. UnsupportedError says what it cannot compute."""

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
    is made in float32, where it loses nothing. Gemma 4's multiply by w, in float32."""
    if hasattr(norm, "variance_epsilon"):
        return norm.weight.detach(), norm.variance_epsilon
    weight = norm.weight.detach().to(torch.promote_types(norm.weight.dtype, torch.float32))
    return weight if hasattr(norm, "with_scale") else 1 + weight, norm.eps


@dataclass(frozen=True, slots=True, eq=False)
class NormAfter:
    """A norm of what a block adds to its input, as Gemma has it: its weight [H] and epsilon."""

    weight: torch.Tensor
    epsilon: float

    @classmethod
    def take(cls, part: LayerPart) -> "NormAfter | None":
        """From transformers' module, if `part` has one."""
        return None if part.after is None else cls(*norm_weight(part.after))

    def add(self, kernels: Kernels, x: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
        """`x` plus the norm of `update`, [T, H] each."""
        return kernels.rms_norm(update, self.weight, self.epsilon).add_(x)

    def backward(self, kernels: Kernels, grad: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
        """The gradient of `update` from that of the sum, which is not overwritten."""
        return kernels.rms_norm_backward(grad, update, self.weight, self.epsilon, None)
