"""Attention of Gemma 4: as in `attention_block.py`, but values have a norm without weights, and keys or values may come
from elsewhere, forward and backward.

    attend(rope(norm(Q n)), rope(norm(K n)), norm_v(V n))        norm_v(v) = v / rms(v)

In some models V is K in layers without a window: values are what keys are before their norm and positions. In others
the last layers have neither, and read keys and values of the last layer of their kind that has them. Legend as in
`attention_block.py`.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from tinker_local.backend.families.family import LoraNames
from tinker_local.backend.training.lora.lora import Target
from tinker_local.backend.training.model.decoders.written_out.attention_block import AttentionBlock, AttentionPass
from tinker_local.backend.training.model.decoders.written_out.block import (
    LayerPart,
    LentKeys,
    NormAfter,
    RowContext,
    norm_weight,
)
from tinker_local.backend.training.rotations import constant_row
from tinker_local.backend.training.run.block_memory import BlockMemory
from tinker_local.types import UnsupportedError


@dataclass(frozen=True, slots=True, eq=False)
class Gemma4AttentionBlock(AttentionBlock):
    """`qkv` has the rows of `projections`: those of query, key and value that the layer has. `ones` [D]. `lends`:
    whether later layers read its keys and values.

    Adapters do not train a key projection that is the value's, too: vLLM would add what they make to keys alone.
    """

    projections: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    lends: bool = False
    ones: torch.Tensor = field(default_factory=lambda: torch.ones(0))

    parameters: ClassVar[Set[str]] = frozenset(
        {f"{name}_proj.weight" for name in "qkvo"} | {"q_norm.weight", "k_norm.weight"}
    )

    @classmethod
    def recognises(cls, part: LayerPart) -> bool:
        """See `Block.recognises`."""
        return hasattr(part.module, "is_kv_shared_layer")

    @classmethod
    def take(cls, part: LayerPart) -> "Gemma4AttentionBlock":
        """See `Block.take`."""
        assert part.rule is not None, "it attends"
        attention, kind = part.module, f"attention{part.variant}"
        weight, epsilon = norm_weight(part.before)
        size = attention.head_dim
        projections = ["q_proj"]
        if not attention.is_kv_shared_layer:
            projections += ["k_proj"] if attention.v_proj is None else ["k_proj", "v_proj"]
        trained = [name for name in projections if not LoraNames.keys_are_values(attention, name)]
        lends = attention.store_full_length_kv and attention.config.num_kv_shared_layers > 0
        norms = {
            name: norm_weight(getattr(attention, name)) for name in ("q_norm", "k_norm") if hasattr(attention, name)
        }
        if {own for _, own in norms.values()} != {epsilon}:
            raise UnsupportedError(f"{part.path}: its norms have another epsilon than that before it")
        groups = {"qkv": trained, "output": ["o_proj"]}
        return cls(
            index=part.index,
            norm=weight,
            epsilon=epsilon,
            qkv=part.make([getattr(attention, name) for name in projections]),
            qkv_bias=None,
            q_norm=norms["q_norm"][0],
            k_norm=norms["k_norm"][0] if "k_norm" in norms else None,
            output=part.make([attention.o_proj]),
            output_bias=None,
            heads=attention.q_proj.out_features // size,
            kv_heads=attention.k_proj.out_features // size if len(projections) > 1 else 0,
            head_size=size,
            gated=False,
            norms_all=False,
            pairs=False,
            rule=part.rule,
            targets=tuple(
                Target.of(f"{part.path}.{name}", f"{kind}.{group}", part.index, getattr(attention, name), "attn")
                for group, names in groups.items()
                for name in names
            ),
            after=NormAfter.take(part),
            rotary=part.rotary,
            kind=kind,
            projections=tuple(projections),
            partly=trained != projections,
            lends=lends,
            ones=torch.ones_like(norms["q_norm"][0]),
        )

    def start(self, x: torch.Tensor, context: RowContext) -> "Gemma4AttentionPass":
        """Create a pass over `x` [T, H]."""
        return Gemma4AttentionPass(self, context, x)

    def memory(self, tokens: int, columns: int, itemsize: int) -> BlockMemory:
        """See `Block.memory`. The backward makes a norm of values besides, in float32."""
        found = AttentionBlock.memory(self, tokens, columns, itemsize)
        values = tokens * self.kv_heads * self.head_size
        return BlockMemory(found.lean, found.large, found.transient + 2 * values * max(itemsize, 4))

    def lent_memory(self, tokens: int, itemsize: int) -> int:
        """Bytes of keys and values that are kept for later layers, with their gradients."""
        return 2 * tokens * self.kv_heads * self.head_size * (itemsize + max(itemsize, 4)) if self.lends else 0

    def rotated(self, context: RowContext) -> tuple[torch.Tensor, torch.Tensor]:
        """See `AttentionBlock.rotated`. A layer without keys has its query in their place."""
        row = torch.from_numpy(constant_row(self.qkv.outputs, self.head_size)).to(self.qkv.device, self.qkv.dtype)
        qkv = row.expand(sum(context.segments.lengths), -1).contiguous()
        turned = Gemma4AttentionPass(self, context, qkv).turned
        angles, query_angles = context.angles[self.rotary], context.query_angles[self.rotary]
        query, key, *_ = self.heads_of(qkv) if self.kv_heads else [*self.heads_of(qkv)] * 2
        return turned(query, self.ones, query_angles)[:, 0], turned(key, self.ones, angles)[:, 0]

    def parts(self, qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The rows of the joined output that adapters train, by projection."""
        found = self._split(qkv)
        return found[:1] if self.partly else found

    def heads_of(self, qkv: torch.Tensor) -> Sequence[torch.Tensor]:
        """The joined output by `projections`, [T, N, D] or [T, M, D] each."""
        return [part.unflatten(-1, (-1, self.head_size)) for part in self._split(qkv)]

    def _split(self, qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        widths = [self.heads, *[self.kv_heads] * (len(self.projections) - 1)]
        return tuple(qkv.split([heads * self.head_size for heads in widths], dim=-1))


@dataclass(slots=True, eq=False)
class Gemma4AttentionPass(AttentionPass):
    """`qkv` [T, ...] has what `projections` of the block give."""

    block: Gemma4AttentionBlock

    def query_key_value(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The inputs of attention, [T, N, D], [T, M, D] and [T, M, D]."""
        block, lent = self.block, self.context.lent
        query, *own = block.heads_of(qkv)
        query = self.turned(query, block.q_norm, self.context.query_angles[block.rotary])
        if not own:
            return query, lent[block.rotary].key, lent[block.rotary].value
        if block.lends and block.rotary in lent:  # computed again, for the backward
            return query, lent[block.rotary].key, lent[block.rotary].value
        angles = self.context.angles[block.rotary]
        key, value = self.turned(own[0], block.k_norm, angles), self._normed(own[-1])
        if block.lends:
            lent[block.rotary] = LentKeys(key, value)
        return query, key, value

    def write_gradient(
        self,
        grad_qkv: torch.Tensor,
        qkv: torch.Tensor,
        grad_query: torch.Tensor,
        grad_key: torch.Tensor,
        grad_value: torch.Tensor,
    ) -> None:
        """See `AttentionPass.write_gradient`. A layer without keys adds to the gradients of those that it has read."""
        block, lent = self.block, self.context.lent
        (to_query, *to_own), (raw_query, *raw_own) = block.heads_of(grad_qkv), block.heads_of(qkv)
        self.turn_back(grad_query, raw_query, block.q_norm, self.context.query_angles[block.rotary], to_query)
        if not raw_own:
            lent[block.rotary].add(grad_key, grad_value)
            return
        if block.lends:
            grad_key, grad_value = lent.pop(block.rotary).gradients(grad_key, grad_value)
        self.turn_back(grad_key, raw_own[0], block.k_norm, self.context.angles[block.rotary], to_own[0])
        of_value = self._normed_backward(grad_value, raw_own[-1])
        if len(to_own) == 1:
            to_own[0].add_(of_value)
        else:
            to_own[1].copy_(of_value)

    def _normed(self, heads: torch.Tensor) -> torch.Tensor:
        """`heads` [T, M, D], each divided by the root of its mean square."""
        block, rows = self.block, heads.reshape(-1, heads.shape[-1]).contiguous()
        return self.context.kernels.rms_norm(rows, block.ones, block.epsilon).view(heads.shape)

    def _normed_backward(self, grad: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
        """The gradient of `heads` [T, M, D] from that of what `_normed` makes of them."""
        block, (rows, grad_rows) = self.block, (each.reshape(-1, each.shape[-1]).contiguous() for each in (heads, grad))
        found = self.context.kernels.rms_norm_backward(grad_rows, rows, block.ones, block.epsilon, None)
        return found.view(heads.shape)
