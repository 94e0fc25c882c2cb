"""Bytes of activations in the written-out decoder, from the sizes of its layers alone. Imports no torch, so that
`tinker-local models` plans without it.

Legend: T tokens, H hidden size, N query heads, M key-value heads, D head size, I intermediate size, R columns of
adapters.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tinker_local.backend.training.run.recompute_policy import ActivationMemory, LayerMemory

CUDA_LOGITS, CPU_LOGITS = 2**28, 2**26
"""Maximum number of logits in memory at once by default: on a GPU enough rows for matmuls at full speed."""


@dataclass(frozen=True, slots=True)
class BlockMemory:
    """Bytes that a block keeps in addition to its input (`lean`), that `drop_large` frees (`large`), and that its
    backward allocates on top (`transient`)."""

    lean: int
    large: int
    transient: int

    def beside(self, other: "BlockMemory") -> "BlockMemory":
        """Of two blocks in the place of one, whose backwards run one after the other."""
        transient = max(self.transient, other.transient)
        return BlockMemory(self.lean + other.lean, self.large + other.large, transient)

    def with_norm_after(self, outputs: int) -> "BlockMemory":
        """The same with a norm of what the block adds, which is `outputs` bytes: kept, and its gradient made."""
        return BlockMemory(self.lean + outputs, self.large, self.transient + outputs)


@dataclass(frozen=True, slots=True)
class TowerSizes:
    """Of a vision tower that adapters train. `widths`: inputs and outputs of all its projections. Bytes of each image
    position: what a micro-batch has `kept` of it until its gradient comes back, and what its `backward` then takes."""

    widths: int
    kept: int
    backward: int


def attention_memory(
    tokens: int, columns: int, itemsize: int, *, heads: int, kv_heads: int, head_size: int, gates: int = 0
) -> BlockMemory:
    """Kept: qkv, attended, logsumexp and the adapters' h. The backward adds query, key, value and gradients. `gates`:
    heads whose output has a gate, which is kept too; what it let through is computed again."""
    projected = tokens * (heads + 2 * gates + 2 * kv_heads) * head_size * itemsize
    kept = projected + attended_bytes(tokens, itemsize, heads=heads, head_size=head_size)
    return BlockMemory(lean=kept + tokens * 4 * columns * itemsize, large=0, transient=3 * kept)


def attended_bytes(tokens: int, itemsize: int, *, heads: int, head_size: int) -> int:
    """What attention puts out: attended and logsumexp."""
    return tokens * heads * (head_size * itemsize + 4)


def worth_keeping(keys: float, window: int | None, hidden: int) -> bool:
    """Whether what attention puts out is kept before the rest of `Keep.LEAN`: whether it costs more arithmetic per byte
    to compute again. Each position sees `keys` on average, at most `window`.

    Attention takes 4 N D `keys` FLOP for 2 N D bytes in 16 bits, so 2 `keys` for a byte. The projections of queries,
    keys, values and output take about 4 H^2 for 4 H bytes, so H for a byte (where N D = H and M is small)."""
    return 2 * (keys if window is None else min(keys, window)) > hidden


def attention_widths(config: Mapping[str, Any]) -> tuple[int, int]:
    """Query heads and KV heads, times the head size, from the fields of a text config of transformers. The most of
    any layer, where fields differ between layers."""
    layers = [config, *({**config, **own} for own in (config.get("per_layer_config") or {}).values())]
    found = [_widths(layer) for layer in layers]
    return max(queries for queries, _ in found), max(keys for _, keys in found)


def _widths(config: Mapping[str, Any]) -> tuple[int, int]:
    heads = config["num_attention_heads"]
    head_size = config.get("head_dim") or config["hidden_size"] // heads
    return heads * head_size, (config.get("num_key_value_heads") or heads) * head_size


def exchange_bytes(q_width: int, kv_width: int, itemsize: int) -> int:
    """Of each of its positions, what the backward of attention takes in addition on a rank that shares rows: what it
    sends and receives, at most the queries, keys, values, output and its gradient."""
    return 3 * (q_width + kv_width) * itemsize


def fork_bytes(q_width: int, kv_width: int, itemsize: int) -> int:
    """Of each position of a row in which sequences share their beginning, what the backward of attention takes in
    addition: copies of queries, keys, values, output and its gradient, and the gradients of one part of the keys."""
    return 4 * (q_width + kv_width) * itemsize


def mlp_memory(tokens: int, columns: int, itemsize: int, *, intermediate: int) -> BlockMemory:
    """gate and up take half of a layer's time to recompute and more than half of its memory. The backward adds
    silu(G m) * (U m) and its gradient; the gradient of gate and up overwrites these."""
    gate_up = tokens * 2 * intermediate * itemsize
    return BlockMemory(lean=tokens * 3 * columns * itemsize, large=gate_up, transient=gate_up)


def experts_memory(
    tokens: int, columns: int, itemsize: int, *, chosen: int, hidden: int, width: int, widths: int = 3
) -> BlockMemory:
    """Of routed experts, `chosen` for each position and each `width` wide. gate and up of each pair of both are large.
    The backward has two copies of the hidden state of each pair, and `widths` tensors as wide as an expert."""
    pairs = tokens * chosen
    return BlockMemory(
        lean=tokens * 3 * columns * itemsize + pairs * (4 * 8 + itemsize),  # four indices, and a score
        large=pairs * 2 * width * itemsize,
        transient=pairs * (2 * hidden + widths * width + 3 * columns) * itemsize,
    )


def decoder_memory(
    layers: Sequence[Sequence[BlockMemory]], inputs: int, attended: Sequence[int] = ()
) -> ActivationMemory:
    """Of `layers` of blocks; `inputs`: bytes of T rows of H. A layer's backward takes all its activations, plus the
    most that the backward of one of its blocks takes. `attended`: see `LayerMemory`, of each layer."""
    kept: list[LayerMemory] = []
    backward = 0
    for blocks, alone in zip(layers, attended or [0] * len(layers), strict=True):
        lean = sum(block.lean for block in blocks) + (len(blocks) - 1) * inputs
        large = sum(block.large for block in blocks)
        backward = max(backward, lean + large + max(block.transient for block in blocks))
        kept.append(LayerMemory(lean, large, alone))
    return ActivationMemory(backward + 3 * inputs + (len(kept) + 1) * inputs, kept)
