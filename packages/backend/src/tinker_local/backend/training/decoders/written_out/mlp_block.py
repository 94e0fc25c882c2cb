"""A gated MLP (SwiGLU), forward and backward.

    out = y + D (silu(G m) * (U m))        m = norm(y)

Each of G, U, D is a frozen matrix plus the adapters' low rank. Legend: T tokens, H hidden size, I intermediate size,
p projections of a group, R columns of adapters.
"""

from dataclasses import dataclass
from typing import Any

import torch
from tinker_local.backend.training.block_memory import BlockMemory, mlp_memory
from tinker_local.backend.training.decoders.written_out.block import RowContext, joined, norm_weight, present
from tinker_local.backend.training.lora import Target
from tinker_local.backend.training.lora_batch import project, project_backward, project_onto, through


@dataclass(frozen=True, slots=True, eq=False)
class MlpBlock:
    """The weights of MLP block `index`: `gate_up` [2 I, H], joined, gate first; `down` [H, I]; `norm` [H]."""

    index: int
    norm: torch.Tensor
    epsilon: float
    gate_up: torch.Tensor
    down: torch.Tensor
    targets: tuple[Target, ...]

    @classmethod
    def take(cls, index: int, path: str, norm: Any, mlp: Any) -> "MlpBlock":
        """Make the block from transformers' modules `norm` and `mlp` (at `path`). Joins gate and up: the modules' own
        parameters become views."""
        weight, epsilon = norm_weight(norm)
        groups = {"gate_up": ("gate_proj", "up_proj"), "down": ("down_proj",)}
        return cls(
            index=index,
            norm=weight,
            epsilon=epsilon,
            gate_up=joined([mlp.gate_proj, mlp.up_proj]),
            down=mlp.down_proj.weight.detach(),
            targets=tuple(
                Target.of(f"{path}.{name}", f"mlp.{group}", index, getattr(mlp, name), "mlp")
                for group, names in groups.items()
                for name in names
            ),
        )

    def start(self, x: torch.Tensor, context: RowContext) -> "MlpPass":
        """Create a pass over `x` [T, H]."""
        return MlpPass(self, context, x)

    def memory(self, tokens: int, columns: int, itemsize: int) -> BlockMemory:
        """See `Block.memory`."""
        return mlp_memory(tokens, columns, itemsize, intermediate=len(self.gate_up) // 2)


@dataclass(slots=True, eq=False)
class MlpPass:
    """`gate_up` [T, 2 I]; `h_gate_up` [T, 2, R] and `h_down` [T, 1, R]: h of the adapters."""

    block: MlpBlock
    context: RowContext
    x: torch.Tensor
    gate_up: torch.Tensor | None = None
    h_gate_up: torch.Tensor | None = None
    h_down: torch.Tensor | None = None

    def forward(self) -> torch.Tensor:
        block, c = self.block, self.context
        a = c.kernels.swiglu(self._gate_up())
        self.h_down, output = project_onto(self.x, a, block.down, c.lora.group("mlp.down", block.index))
        return output

    def drop_large(self) -> None:
        self.gate_up = None

    def restore(self) -> None:
        if self.gate_up is None:
            self._gate_up()
        low_rank = self.context.lora.group("mlp.down", self.block.index)
        if self.h_down is None and low_rank is not None:
            self.h_down = low_rank.down(self.context.kernels.swiglu(present(self.gate_up)))

    def backward(self, grad: torch.Tensor) -> torch.Tensor:
        block, c = self.block, self.context
        low_rank = c.lora.group("mlp.down", block.index)
        grad_h = None if low_rank is None else low_rank.up_gradient(present(self.h_down), (grad,))
        grad_a = through(grad, block.down, low_rank, grad_h)
        grad_gate_up, a = c.kernels.swiglu_backward(grad_a, present(self.gate_up))
        if low_rank is not None and grad_h is not None:
            low_rank.write_a_gradient(grad_h, a)
        del grad_a, a
        m = c.kernels.rms_norm(self.x, block.norm, block.epsilon)
        low_rank = c.lora.group("mlp.gate_up", block.index)
        grad_m = project_backward(grad_gate_up, m, block.gate_up, low_rank, self.h_gate_up, _halves)
        return c.kernels.rms_norm_backward(grad_m, self.x, block.norm, block.epsilon, grad)

    def _gate_up(self) -> torch.Tensor:
        block, c = self.block, self.context
        m = c.kernels.rms_norm(self.x, block.norm, block.epsilon)
        low_rank = c.lora.group("mlp.gate_up", block.index)
        self.h_gate_up, self.gate_up = project(m, block.gate_up, None, low_rank, _halves)
        return self.gate_up


def _halves(joint: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(joint.chunk(2, dim=-1))
