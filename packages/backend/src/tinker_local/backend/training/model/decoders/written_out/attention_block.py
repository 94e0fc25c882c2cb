"""Attention with rotary positions, forward and backward.

    y = x + norm'(O (attend(s rope(norm(Q n)), rope(norm(K n)), V n) * sigmoid(G n)))        n = norm(x)

Each of Q, K, V, O is a frozen matrix plus the adapters' low rank; the norms of queries and keys, which are of each
head or of all heads together, and norm' are optional. So is the gate G: its rows are those of Q's matrix, head by head
after the query's. s is 1 or depends on the position (`query_scale`). Legend: T tokens, H hidden size, N query heads, M
key-value heads, D head size, g = 2 with a gate and else 1, p projections of a group, R columns of adapters.
"""

import sys
from collections.abc import Callable, Set
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from tinker_local.backend.training.lora.lora import Target
from tinker_local.backend.training.lora.lora_batch import project, project_backward, project_onto, whole
from tinker_local.backend.training.model.attention import attend, attend_backward
from tinker_local.backend.training.model.attention_rule import AttentionRule
from tinker_local.backend.training.model.decoders.written_out.block import (
    Angles,
    LayerPart,
    NormAfter,
    RowContext,
    norm_weight,
    present,
)
from tinker_local.backend.training.rotations import constant_row
from tinker_local.backend.training.run.block_memory import BlockMemory, attention_memory
from tinker_local.backend.weights.dense import concatenated
from tinker_local.backend.weights.frozen_matrix import FrozenMatrix
from tinker_local.backend.weights.joined_names import QKV
from tinker_local.types import UnsupportedError


@dataclass(frozen=True, slots=True, eq=False)
class AttentionBlock:
    """The weights of attention block `index`. Projections that read the same input are joined: `qkv`
    [(g N + 2 M) D, H]. `output` [H, N D]; `norm` [H]; `q_norm`, `k_norm` [D], or [N D] and [M D] if `norms_all`, biases
    and the norm `after` if the family has them. `pairs`: whether positions turn numbers that lie side by side, and not
    those of one half with those of the other. `rotary`: the kind of layer, if its positions have their own angles.
    `kind`: what the names of its groups begin with. `partly`: whether adapters leave out some rows of `qkv`."""

    index: int
    norm: torch.Tensor
    epsilon: float
    qkv: FrozenMatrix
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: FrozenMatrix
    output_bias: torch.Tensor | None
    heads: int
    kv_heads: int
    head_size: int
    gated: bool
    norms_all: bool
    pairs: bool
    rule: AttentionRule
    targets: tuple[Target, ...]
    after: NormAfter | None = None
    rotary: str | None = None
    kind: str = "attention"
    partly: bool = False

    module: ClassVar[str] = "self_attn"
    parameters: ClassVar[Set[str]] = frozenset(
        {f"{name}_proj.{kind}" for name in "qkvo" for kind in ("weight", "bias")}
        | {"q_norm.weight", "k_norm.weight", "sinks"}
    )
    norm_after: ClassVar[bool] = True

    @classmethod
    def recognises(cls, part: LayerPart) -> bool:
        """See `Block.recognises`."""
        return True

    @classmethod
    def take(cls, part: LayerPart) -> "AttentionBlock":
        """See `Block.take`."""
        assert part.rule is not None, "it attends"
        attention = part.module
        weight, epsilon = norm_weight(part.before)
        qkv = QKV.modules(attention)
        groups = {"qkv": QKV.parts, "output": ("o_proj",)}
        q_norm = _weight(attention, "q_norm")
        return cls(
            index=part.index,
            norm=weight,
            epsilon=epsilon,
            qkv=part.make(qkv),
            qkv_bias=None if qkv[0].bias is None else concatenated([module.bias.detach() for module in qkv]),
            q_norm=q_norm,
            k_norm=_weight(attention, "k_norm"),
            output=part.make([attention.o_proj]),
            output_bias=None if attention.o_proj.bias is None else attention.o_proj.bias.detach(),
            heads=attention.o_proj.in_features // attention.head_dim,
            kv_heads=attention.k_proj.out_features // attention.head_dim,
            head_size=attention.head_dim,
            gated=attention.q_proj.out_features == 2 * attention.o_proj.in_features,
            norms_all=q_norm is not None and len(q_norm) != attention.head_dim,
            pairs=_turns_pairs(attention),
            rule=part.rule,
            targets=tuple(
                Target.of(
                    f"{part.path}.{name}",
                    f"attention{part.variant}.{group}",
                    part.index,
                    getattr(attention, name),
                    "attn",
                )
                for group, names in groups.items()
                for name in names
            ),
            after=NormAfter.take(part),
            rotary=part.rotary,
            kind=f"attention{part.variant}",
        )

    def start(self, x: torch.Tensor, context: RowContext) -> "AttentionPass":
        """Create a pass over `x` [T, H]."""
        return AttentionPass(self, context, x)

    def memory(self, tokens: int, columns: int, itemsize: int) -> BlockMemory:
        """See `Block.memory`."""
        sizes = {"heads": self.heads, "kv_heads": self.kv_heads, "head_size": self.head_size}
        found = attention_memory(tokens, columns, itemsize, **sizes, gates=self.heads * self.gated)
        return found if self.after is None else found.with_norm_after(tokens * len(self.norm) * itemsize)

    def rotated(self, context: RowContext) -> tuple[torch.Tensor, torch.Tensor]:
        """Query and key [T, D] of the first head where the projections give `constant_row`."""
        q_norm, k_norm = (None if weight is None else torch.ones_like(weight) for weight in (self.q_norm, self.k_norm))
        row = torch.from_numpy(constant_row(self.qkv.outputs, self.head_size)).to(self.qkv.device, self.qkv.dtype)
        qkv = row.expand(sum(context.segments.lengths), -1).contiguous()
        query, key, _ = AttentionPass(replace(self, q_norm=q_norm, k_norm=k_norm), context, qkv).query_key_value(qkv)
        if self.pairs:
            rotary = context.angles[self.rotary][0].shape[-1]
            query, key = _side_by_side(query, rotary), _side_by_side(key, rotary)
        return query[:, 0], key[:, 0]

    def parts(self, qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Split the joined output into query [T, g N D], key and value [T, M D]."""
        widths = [
            (1 + self.gated) * self.heads * self.head_size,
            self.kv_heads * self.head_size,
            self.kv_heads * self.head_size,
        ]
        return tuple(qkv.split(widths, dim=-1))

    def split_heads(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Split the joined output into query [T, N, D], key and value [T, M, D]. With a gate, the query's heads lie 2 D
        apart."""
        query, key, value = (part.unflatten(-1, (-1, self.head_size)) for part in self.parts(qkv))
        return query[:, :: 1 + self.gated], key, value

    def gate(self, qkv: torch.Tensor) -> torch.Tensor:
        """The part of the joined output that gates what was attended, [T, N, D]."""
        return self.parts(qkv)[0].unflatten(-1, (-1, self.head_size))[:, 1::2]


@dataclass(slots=True, eq=False)
class AttentionPass:
    """`qkv` [T, (g N + 2 M) D]: before head norms and positions. `attended` [T, N, D], before the gate, and its
    `logsumexp`. `h_qkv` [T, 3, R], `h_output` [T, 1, R]: h of the adapters. `update` [T, H]: before the norm after."""

    block: AttentionBlock
    context: RowContext
    x: torch.Tensor
    qkv: torch.Tensor | None = None
    attended: torch.Tensor | None = None
    logsumexp: torch.Tensor | None = None
    h_qkv: torch.Tensor | None = None
    h_output: torch.Tensor | None = None
    update: torch.Tensor | None = None

    def forward(self) -> torch.Tensor:
        block, lora = self.block, self.context.lora
        self._attend()
        if block.after is not None:
            return block.after.add(self.context.kernels, self.x, self._update())
        low_rank = lora.group(f"{block.kind}.output", block.index)
        self.h_output, y = project_onto(self.x, self._gated(), block.output, low_rank, block.output_bias)
        return y

    def drop_large(self) -> None:
        """Drop nothing: no activation of attention is cheap to recompute."""

    def restore(self) -> None:
        self._attend()
        if self.block.after is not None and self.update is None:
            self._update()
        low_rank = self.context.lora.group(f"{self.block.kind}.output", self.block.index)
        if self.h_output is None and low_rank is not None:
            self.h_output = low_rank.down(self._gated())

    def backward(self, grad: torch.Tensor) -> torch.Tensor:
        block, c = self.block, self.context
        qkv, attended = present(self.qkv), present(self.attended)
        low_rank = c.lora.group(f"{block.kind}.output", block.index)
        grad_output = grad
        if block.after is not None:
            grad_output, self.update = block.after.backward(c.kernels, grad, present(self.update)), None
        grad_attended = project_backward(grad_output, self._gated(), block.output, low_rank, self.h_output, whole)
        del grad_output
        grad_qkv = torch.empty_like(qkv)
        if block.gated:
            sigmoid = block.gate(qkv).sigmoid()
            grad_attended = grad_attended.view_as(attended) * sigmoid
            torch.mul(grad_attended * attended, 1 - sigmoid, out=block.gate(grad_qkv))
            del sigmoid
        query, key, value = self.query_key_value(qkv)
        grad_query, grad_key, grad_value = attend_backward(
            grad_attended.view_as(attended), query, key, value, attended, self.logsumexp, c.segments, block.rule
        )
        self.write_gradient(grad_qkv, qkv, grad_query, grad_key, grad_value)
        n = c.kernels.rms_norm(self.x, block.norm, block.epsilon)
        low_rank = c.lora.group(f"{block.kind}.qkv", block.index)
        grad_n = project_backward(grad_qkv, n, block.qkv, low_rank, self.h_qkv, block.parts)
        return c.kernels.rms_norm_backward(grad_n, self.x, block.norm, block.epsilon, grad)

    def _update(self) -> torch.Tensor:
        """What the norm after reads, [T, H]."""
        block, lora = self.block, self.context.lora
        low_rank = lora.group(f"{block.kind}.output", block.index)
        self.h_output, self.update = project(self._gated(), block.output, block.output_bias, low_rank, whole)
        return self.update

    def _gated(self) -> torch.Tensor:
        """What the output projection reads, [T, N D]."""
        attended = present(self.attended)
        if self.block.gated:
            attended = attended * self.block.gate(present(self.qkv)).sigmoid()
        return attended.flatten(1)

    def _attend(self) -> None:
        """Compute what there is not: the projections, and what was attended."""
        block, c = self.block, self.context
        if self.qkv is None:
            n = c.kernels.rms_norm(self.x, block.norm, block.epsilon)
            low_rank = c.lora.group(f"{block.kind}.qkv", block.index)
            self.h_qkv, self.qkv = project(n, block.qkv, block.qkv_bias, low_rank, block.parts, partly=block.partly)
        if self.attended is None:
            self.attended, self.logsumexp = attend(*self.query_key_value(self.qkv), c.segments, block.rule)

    def query_key_value(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The inputs of attention, with head norms and positions: [T, N, D], [T, M, D] and [T, M, D]. Where positions
        turn pairs, the numbers of queries and keys are in another order, in which they have the same products."""
        block = self.block
        query, key, value = block.split_heads(qkv)
        angles, query_angles = self.context.angles[block.rotary], self.context.query_angles[block.rotary]
        return self.turned(query, block.q_norm, query_angles), self.turned(key, block.k_norm, angles), value

    def write_gradient(
        self,
        grad_qkv: torch.Tensor,
        qkv: torch.Tensor,
        grad_query: torch.Tensor,
        grad_key: torch.Tensor,
        grad_value: torch.Tensor,
    ) -> None:
        """Write to `grad_qkv` the gradient of `qkv` from those of what `query_key_value` makes of it."""
        block, c = self.block, self.context
        to_query, to_key, to_value = block.split_heads(grad_qkv)
        raw_query, raw_key, _ = block.split_heads(qkv)
        self.turn_back(grad_query, raw_query, block.q_norm, c.query_angles[block.rotary], to_query)
        self.turn_back(grad_key, raw_key, block.k_norm, c.angles[block.rotary], to_key)
        to_value.copy_(grad_value)

    def turned(self, heads: torch.Tensor, norm: torch.Tensor | None, angles: Angles) -> torch.Tensor:
        """`heads` [T, N, D] with their norm and positions."""
        block, kernels = self.block, self.context.kernels
        if block.norms_all and norm is not None:
            heads, norm = kernels.rms_norm(heads.flatten(1).contiguous(), norm, block.epsilon).view(heads.shape), None
        cos, sin = angles
        if block.pairs:
            heads = _in_halves(heads, cos.shape[-1])
            norm = None if norm is None else _in_halves(norm, cos.shape[-1])
        return kernels.norm_rope(heads, norm, block.epsilon, cos, sin)

    def turn_back(
        self, grad: torch.Tensor, heads: torch.Tensor, norm: torch.Tensor | None, angles: Angles, result: torch.Tensor
    ) -> None:
        """Write to `result` the gradient of `heads` [T, N, D] from that of what `turned` makes of them."""
        block, kernels = self.block, self.context.kernels
        cos, sin = angles
        all_heads = block.norms_all and norm is not None
        of_head = None if all_heads else norm
        if not (all_heads or block.pairs):
            kernels.norm_rope_backward(grad, heads, norm, block.epsilon, cos, sin, result)
            return
        raw = heads
        if block.pairs:
            raw = _in_halves(heads, cos.shape[-1])
            of_head = None if of_head is None else _in_halves(of_head, cos.shape[-1])
        turned = grad.new_empty(grad.shape)
        kernels.norm_rope_backward(grad, raw, of_head, block.epsilon, cos, sin, turned)
        if block.pairs:
            turned = _side_by_side(turned, cos.shape[-1])
        if all_heads:
            rows = turned.flatten(1), heads.flatten(1).contiguous()
            turned = kernels.rms_norm_backward(*rows, norm, block.epsilon, None).view(heads.shape)
        result.copy_(turned)


QueryScale = Callable[[torch.Tensor], torch.Tensor]
"""What multiplies the queries of positions [T], [T]."""


def query_scale(attention: Any) -> QueryScale | None:
    """Of transformers' module; None for queries that are as they were turned. Ministral 3's grow with the logarithm of
    their position."""
    formula = getattr(sys.modules[type(attention).__module__], "get_llama_4_attn_scale", None)
    if formula is None:
        return None
    rope = attention.config.rope_parameters
    given = [rope.get(name) for name in ("llama_4_scaling_beta", "original_max_position_embeddings")]
    if None in given:
        raise UnsupportedError(f"its queries depend on positions as rope_parameters says, which is {rope}")

    def scale(positions: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = formula(positions[None], *given)[0, 0, :, 0]
        return found

    return scale


def _turns_pairs(attention: Any) -> bool:
    """Whether the positions of transformers' module turn numbers that lie side by side."""
    module = sys.modules[type(attention).__module__]
    rotate = getattr(module, "rotate_half_llm", getattr(module, "rotate_half", None))  # the tower's has the usual name
    return rotate is not None and rotate(torch.arange(4, device="cpu")).tolist() == [-1, 0, -3, 2]


def _in_halves(x: torch.Tensor, rotary: int) -> torch.Tensor:
    """`x` [..., D] with every second of its first `rotary` numbers, then those between, then the rest."""
    turned, rest = x.split([rotary, x.shape[-1] - rotary], dim=-1)
    return torch.cat([turned[..., ::2], turned[..., 1::2], rest], dim=-1)


def _side_by_side(x: torch.Tensor, rotary: int) -> torch.Tensor:
    """The reverse."""
    turned, rest = x.split([rotary, x.shape[-1] - rotary], dim=-1)
    return torch.cat([turned.unflatten(-1, (2, rotary // 2)).transpose(-1, -2).flatten(-2), rest], dim=-1)


def _weight(attention: Any, name: str) -> torch.Tensor | None:
    norm = getattr(attention, name, None)
    return None if norm is None else norm_weight(norm)[0]
