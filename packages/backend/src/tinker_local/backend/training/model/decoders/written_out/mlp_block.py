"""A gated MLP (SwiGLU, or with GELU in place of SiLU), forward and backward.

    out = y + norm'(D (silu(G m) * (U m) * s))        m = norm(y)

Each of G, U, D is a frozen matrix plus the adapters' low rank; norm' is optional. s is 1, or sigmoid(g m) for an expert
that all positions take beside others (`experts_block.py`). Legend: T tokens, H hidden size, I intermediate size, p
projections of a group, R columns of adapters.
"""

from collections.abc import Set
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from tinker_local.backend.training.kernels.kernels import ACTIVATIONS, Activation, activated
from tinker_local.backend.training.lora.lora import Target
from tinker_local.backend.training.lora.lora_batch import project, project_backward, project_onto, through, whole
from tinker_local.backend.training.model.decoders.written_out.block import (
    LayerPart,
    NormAfter,
    RowContext,
    norm_weight,
    present,
)
from tinker_local.backend.training.run.block_memory import BlockMemory, mlp_memory
from tinker_local.backend.weights.frozen_matrix import FrozenMatrix
from tinker_local.backend.weights.joined_names import GATE_UP
from tinker_local.types import UnsupportedError


@dataclass(frozen=True, slots=True, eq=False)
class MlpBlock:
    """The weights of MLP block `index`: `gate_up` [2 I, H], gate first; `down` [H, I]; `norm` [H]; `scale`
    [1, H]: g, or None. `kind`: what the names of its groups begin with. `after`: norm', if the family has it. Gate and
    up are two projections for adapters, or one where they are one module of the family."""

    index: int
    norm: torch.Tensor
    epsilon: float
    gate_up: FrozenMatrix
    down: FrozenMatrix
    targets: tuple[Target, ...]
    kind: str = "mlp"
    scale: FrozenMatrix | None = None
    activation: Activation = "silu"
    after: NormAfter | None = None

    module: ClassVar[str] = "mlp"
    parameters: ClassVar[Set[str]] = frozenset(
        {"gate_proj.weight", "up_proj.weight", "gate_up_proj.weight", "down_proj.weight"}
    )
    norm_after: ClassVar[bool] = True

    @classmethod
    def recognises(cls, part: LayerPart) -> bool:
        """See `Block.recognises`."""
        return all(hasattr(part.module, name) for name in (*_gate_up(part.module), "down_proj"))

    @classmethod
    def take(cls, part: LayerPart) -> "MlpBlock":
        """See `Block.take`."""
        return cls.of(
            part, f"mlp{part.variant}", activation=activation_of(part.module, part.path), after=NormAfter.take(part)
        )

    @classmethod
    def of(
        cls,
        part: LayerPart,
        kind: str = "mlp",
        scale: FrozenMatrix | None = None,
        activation: Activation = "silu",
        after: NormAfter | None = None,
    ) -> "MlpBlock":
        """Make the block from a part."""
        weight, epsilon = norm_weight(part.before)
        groups = {"gate_up": _gate_up(part.module), "down": ("down_proj",)}
        return cls(
            index=part.index,
            norm=weight,
            epsilon=epsilon,
            gate_up=part.make([getattr(part.module, name) for name in groups["gate_up"]]),
            down=part.make([part.module.down_proj]),
            targets=tuple(
                Target.of(f"{part.path}.{name}", f"{kind}.{group}", part.index, getattr(part.module, name), "mlp")
                for group, names in groups.items()
                for name in names
            ),
            kind=kind,
            scale=scale,
            activation=activation,
            after=after,
        )

    def start(self, x: torch.Tensor, context: RowContext) -> "MlpPass":
        """Create a pass over `x` [T, H]."""
        return MlpPass(self, context, x)

    def parts(self, gate_up: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Split the joined output [T, 2 I] into those of the projections."""
        return whole(gate_up) if len(self.targets) == 2 else tuple(gate_up.chunk(2, dim=-1))

    def memory(self, tokens: int, columns: int, itemsize: int) -> BlockMemory:
        """See `Block.memory`."""
        found = mlp_memory(tokens, columns, itemsize, intermediate=self.gate_up.outputs // 2)
        return found if self.after is None else found.with_norm_after(tokens * len(self.norm) * itemsize)


@dataclass(slots=True, eq=False)
class MlpPass:
    """`gate_up` [T, 2 I]; `s` [T, 1], None for 1; `h_gate_up` [T, p, R] and `h_down` [T, 1, R]: h of the adapters.
    `update` [T, H]: before the norm after."""

    block: MlpBlock
    context: RowContext
    x: torch.Tensor
    gate_up: torch.Tensor | None = None
    s: torch.Tensor | None = None
    h_gate_up: torch.Tensor | None = None
    h_down: torch.Tensor | None = None
    update: torch.Tensor | None = None

    def forward(self, onto: torch.Tensor | None = None) -> torch.Tensor:
        """`onto`: what the MLP's output is added to, if it is not x."""
        block, c = self.block, self.context
        a = self._active(self._gate_up())
        onto = self.x if onto is None else onto
        if block.after is not None:
            return block.after.add(c.kernels, onto, self._update(a))
        low_rank = c.lora.group(f"{block.kind}.down", block.index)
        self.h_down, output = project_onto(onto, a, block.down, low_rank)
        return output

    def drop_large(self) -> None:
        self.gate_up = None

    def restore(self) -> None:
        gate_up = self._gate_up() if self.gate_up is None else self.gate_up
        if self.block.after is not None and self.update is None:
            self._update(self._active(gate_up))
        low_rank = self.context.lora.group(f"{self.block.kind}.down", self.block.index)
        if self.h_down is None and low_rank is not None:
            self.h_down = low_rank.down(self._active(gate_up))

    def backward(self, grad: torch.Tensor, onto: torch.Tensor | None = None) -> torch.Tensor:
        """`onto`: what the gradient through the MLP is added to, if it is not `grad`."""
        block, c = self.block, self.context
        low_rank = c.lora.group(f"{block.kind}.down", block.index)
        grad_output = grad
        if block.after is not None:
            grad_output, self.update = block.after.backward(c.kernels, grad, present(self.update)), None
        grad_h = None if low_rank is None else low_rank.up_gradient(present(self.h_down), (grad_output,))
        grad_scaled = through(grad_output, block.down, low_rank, grad_h)
        del grad_output
        grad_a = grad_scaled if self.s is None else grad_scaled * self.s
        grad_gate_up, a = c.kernels.glu_backward(grad_a, present(self.gate_up), block.activation)
        if low_rank is not None and grad_h is not None:
            low_rank.write_a_gradient(grad_h, self._scaled(a))
        grad_g = None
        if self.s is not None:  # `glu_backward` has overwritten `grad_a`, and not `grad_scaled`
            wide = (grad_scaled * a).sum(-1, keepdim=True, dtype=torch.promote_types(a.dtype, torch.float32))
            grad_g = (wide * self.s * (1 - self.s)).to(a.dtype)
        del grad_scaled, grad_a, a
        m = c.kernels.rms_norm(self.x, block.norm, block.epsilon)
        low_rank = c.lora.group(f"{block.kind}.gate_up", block.index)
        grad_m = project_backward(grad_gate_up, m, block.gate_up, low_rank, self.h_gate_up, block.parts)
        if grad_g is not None and block.scale is not None:
            block.scale.add_back(grad_m, grad_g)
        return c.kernels.rms_norm_backward(grad_m, self.x, block.norm, block.epsilon, grad if onto is None else onto)

    def _gate_up(self) -> torch.Tensor:
        block, c = self.block, self.context
        m = c.kernels.rms_norm(self.x, block.norm, block.epsilon)
        low_rank = c.lora.group(f"{block.kind}.gate_up", block.index)
        self.h_gate_up, self.gate_up = project(m, block.gate_up, None, low_rank, block.parts)
        if block.scale is not None:
            self.s = block.scale.times(m).sigmoid()
        return self.gate_up

    def _active(self, gate_up: torch.Tensor) -> torch.Tensor:
        """What the down projection reads, [T, I]."""
        return self._scaled(self.context.kernels.glu(gate_up, self.block.activation))

    def _update(self, active: torch.Tensor) -> torch.Tensor:
        """What the norm after reads, [T, H]."""
        block, low_rank = self.block, self.context.lora.group(f"{self.block.kind}.down", self.block.index)
        self.h_down, self.update = project(active, block.down, None, low_rank, whole)
        return self.update

    def _scaled(self, a: torch.Tensor) -> torch.Tensor:
        return a if self.s is None else a * self.s


def activation_of(mlp: Any, where: str) -> Activation:
    """Of the gate of transformers' `mlp`, by what it computes: names in configs differ, and some are not used."""
    x, activation = torch.linspace(-4, 4, 65), getattr(mlp, "act_fn", None) or mlp.activation_fn
    for name in ACTIVATIONS:
        if torch.allclose(activation(x), activated(x, name), rtol=0, atol=1e-6):
            return name
    raise UnsupportedError(f"{where}: {type(activation).__name__} is none of {', '.join(ACTIVATIONS)}")


def _gate_up(mlp: Any) -> tuple[str, ...]:
    """What transformers calls the projections of gate and up."""
    return ("gate_up_proj",) if hasattr(mlp, "gate_up_proj") else GATE_UP.parts
