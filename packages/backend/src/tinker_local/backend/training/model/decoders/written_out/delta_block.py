"""Linear attention by the gated delta rule, forward and backward.

    y = x + O mix(QKV n, Z n, b n, a n)        n = norm(x)

Each of Q, K, V, Z, O is a frozen matrix plus the adapters' low rank; b and a are frozen. `kernels/delta_rule.py` has
what lies between. Legend: T tokens, H hidden size, M value heads, V their size, C = channels of QKV, p projections of a
group, R columns of adapters.
"""

from collections.abc import Set
from dataclasses import dataclass
from typing import ClassVar

import torch
from tinker_local.backend.training.kernels.delta_rule import (
    DeltaRule,
    MixInputs,
    by_key_head,
    in_parts,
    mix,
    mix_backward,
    transient_bytes,
)
from tinker_local.backend.training.lora.lora import Target
from tinker_local.backend.training.lora.lora_batch import project, project_backward, project_onto, whole
from tinker_local.backend.training.model.decoders.packed_delta_net import FORMS, is_by_key_head
from tinker_local.backend.training.model.decoders.written_out.block import LayerPart, RowContext, norm_weight, present
from tinker_local.backend.training.run.block_memory import BlockMemory
from tinker_local.backend.weights.frozen_matrix import FrozenMatrix
from tinker_local.backend.weights.joined_names import BA, QKVZ


@dataclass(frozen=True, slots=True, eq=False)
class DeltaBlock:
    """The weights of the linear attention of block `index`. Projections that read the same input are joined: `qkvz`
    [C + M V, H], and `ba` [2 M, H], which adapters do not train. `output` [H, M V]; `norm` [H]. `by_key_head`: whether
    the rows of `qkvz` and `ba` lie key head by key head, as in Qwen3-Next, whose adapters train `qkvz` as one."""

    index: int
    norm: torch.Tensor
    epsilon: float
    qkvz: FrozenMatrix
    ba: FrozenMatrix
    output: FrozenMatrix
    rule: DeltaRule
    targets: tuple[Target, ...]
    by_key_head: bool

    module: ClassVar[str] = "linear_attn"
    parameters: ClassVar[Set[str]] = frozenset().union(*FORMS)
    norm_after: ClassVar[bool] = False

    @classmethod
    def recognises(cls, part: LayerPart) -> bool:
        """See `Block.recognises`."""
        return True

    @classmethod
    def take(cls, part: LayerPart) -> "DeltaBlock":
        """See `Block.take`."""
        net, index = part.module, part.index
        weight, epsilon = norm_weight(part.before)
        heights = {
            "in_proj_q": net.key_dim,
            "in_proj_k": net.key_dim,
            "in_proj_v": net.value_dim,
            "in_proj_z": net.value_dim,
        }
        whole_rows = is_by_key_head(net)
        if whole_rows:
            heights = {"in_proj_qkvz": sum(heights.values())}
        inputs = [
            Target(f"{part.path}.{name}", "delta.qkvz", name, index, net.hidden_size, height, "attn")
            for name, height in heights.items()
        ]
        output = Target.of(f"{part.path}.out_proj", "delta.output", index, net.out_proj, "attn")
        return cls(
            index=index,
            norm=weight,
            epsilon=epsilon,
            qkvz=part.make([net.in_proj_qkvz] if whole_rows else QKVZ.modules(net)),
            ba=part.make([net.in_proj_ba] if whole_rows else BA.modules(net)),
            output=part.make([net.out_proj]),
            rule=DeltaRule.of(net),
            # In the order of transformers' modules, in which the same seed draws the same A in every decoder.
            targets=(*inputs, output) if whole_rows else (output, *inputs),
            by_key_head=whole_rows,
        )

    def start(self, x: torch.Tensor, context: RowContext) -> "DeltaPass":
        """Create a pass over `x` [T, H]."""
        return DeltaPass(self, context, x)

    def memory(self, tokens: int, columns: int, itemsize: int) -> BlockMemory:
        """Kept: the projections of the input, what `mix` made of them, and the adapters' h."""
        widths = self.qkvz.outputs + self.ba.outputs + self.output.inputs
        kept = tokens * (widths + 5 * columns) * itemsize
        return BlockMemory(lean=kept, large=0, transient=2 * kept + transient_bytes(tokens, self.rule))

    def parts(self, qkvz: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Split the joined output into q, k, v and z, or leave it whole, as adapters train it."""
        return tuple(qkvz.split([each.outputs for each in self.targets if each.group == "delta.qkvz"], dim=-1))

    def inputs(self, qkvz: torch.Tensor, ba: torch.Tensor) -> MixInputs:
        """The joined outputs as what `mix` takes."""
        if self.by_key_head:
            return in_parts(qkvz, ba, self.rule)
        z = self.output.inputs
        return MixInputs(*qkvz.split([self.qkvz.outputs - z, z], dim=-1), *ba.chunk(2, dim=-1))

    def joined(self, inputs: MixInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """The reverse."""
        if self.by_key_head:
            return by_key_head(inputs, self.rule)
        return torch.cat(inputs[:2], dim=-1), torch.cat(inputs[2:], dim=-1)


@dataclass(slots=True, eq=False)
class DeltaPass:
    """`qkvz` [T, C + M V], `ba` [T, 2 M]; `mixed` [T, M V]. `h_qkvz` [T, 4, R], `h_output` [T, 1, R]: h of the
    adapters."""

    block: DeltaBlock
    context: RowContext
    x: torch.Tensor
    qkvz: torch.Tensor | None = None
    ba: torch.Tensor | None = None
    mixed: torch.Tensor | None = None
    h_qkvz: torch.Tensor | None = None
    h_output: torch.Tensor | None = None

    def forward(self) -> torch.Tensor:
        block, lora = self.block, self.context.lora
        self._mix()
        low_rank = lora.group("delta.output", block.index)
        self.h_output, y = project_onto(self.x, present(self.mixed), block.output, low_rank)
        return y

    def drop_large(self) -> None:
        """Drop nothing: recomputing these projections costs as much as recomputing the whole layer."""

    def restore(self) -> None:
        if self.mixed is None:
            self._mix()
        low_rank = self.context.lora.group("delta.output", self.block.index)
        if self.h_output is None and low_rank is not None:
            self.h_output = low_rank.down(present(self.mixed))

    def backward(self, grad: torch.Tensor) -> torch.Tensor:
        block, c = self.block, self.context
        low_rank = c.lora.group("delta.output", block.index)
        grad_mixed = project_backward(grad, present(self.mixed), block.output, low_rank, self.h_output, whole)
        self.mixed = None
        inputs = block.inputs(present(self.qkvz), present(self.ba))
        grad_qkvz, grad_ba = block.joined(mix_backward(grad_mixed, inputs, c.segments, block.rule))
        del grad_mixed
        n = c.kernels.rms_norm(self.x, block.norm, block.epsilon)
        low_rank = c.lora.group("delta.qkvz", block.index)
        grad_n = project_backward(grad_qkvz, n, block.qkvz, low_rank, self.h_qkvz, block.parts)
        block.ba.add_back(grad_n, grad_ba)
        return c.kernels.rms_norm_backward(grad_n, self.x, block.norm, block.epsilon, grad)

    def _mix(self) -> None:
        block, c = self.block, self.context
        n = c.kernels.rms_norm(self.x, block.norm, block.epsilon)
        low_rank = c.lora.group("delta.qkvz", block.index)
        self.h_qkvz, self.qkvz = project(n, block.qkvz, None, low_rank, block.parts)
        self.ba = block.ba.times(n)
        self.mixed = mix(block.inputs(self.qkvz, self.ba), c.segments, block.rule)
