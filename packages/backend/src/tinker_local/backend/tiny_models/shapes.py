"""Sizes of the tiny models."""

from dataclasses import dataclass

# What vLLM 0.32's CPU attention has kernels for.
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)


@dataclass(frozen=True, slots=True)
class TextShape:
    """Sizes of a language model. Attention is `num_heads` x `head_dim` wide, which may differ from `hidden_size`.

    `weight_scale`: standard deviation of a linear layer's output for inputs of RMS 1. Greater than 1, so that logits of
    the random model differ and a greedy choice is never a tie.
    """

    hidden_size: int = 64
    intermediate_size: int = 128
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    max_position_embeddings: int = 8192
    weight_scale: float = 1.6

    def __post_init__(self) -> None:
        if self.head_dim not in CPU_HEAD_SIZES:
            raise ValueError(f"head_dim is {self.head_dim}; vLLM on CPU knows {', '.join(map(str, CPU_HEAD_SIZES))}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads ({self.num_heads}) is not a multiple of num_kv_heads ({self.num_kv_heads})")


@dataclass(frozen=True, slots=True)
class VisionShape:
    """Sizes of a vision tower.

    `patch_size`: pixels per side of a patch (the family's own if None); `merge_size` x `merge_size` patches become one
    token. `position_grid`: side of the square grid of learnt positions (Qwen3-VL). `deepstack_layers`: layers whose
    output is also added to the language model's first layers (Qwen3-VL). `min_pixels`, `max_pixels`: area to which the
    image processor scales.
    """

    hidden_size: int = 64
    intermediate_size: int = 128
    num_layers: int = 2
    num_heads: int = 2
    patch_size: int | None = None
    merge_size: int = 2
    position_grid: int = 8
    deepstack_layers: tuple[int, ...] = (0,)
    min_pixels: int = 32 * 32
    max_pixels: int = 512 * 512
    weight_scale: float = 1.0
