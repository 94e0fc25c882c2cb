"""The size of a run: a real model's shape on a GPU, or everything tiny."""

import dataclasses
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class TextShape:
    """Sizes of a Qwen3 decoder; embeddings and LM head are not tied."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    positions: int = 40960


@dataclass(frozen=True, slots=True)
class VisionShape:
    """Sizes of Qwen3-VL's vision tower (patches of 16 pixels, merged 2 x 2)."""

    depth: int
    hidden: int
    intermediate: int
    heads: int
    deepstack: tuple[int, ...]
    position_grid: int = 48


@dataclass(frozen=True, slots=True)
class Scale:
    """Shapes of the models and amounts of work. Lengths in tokens.

    `kv_cache_bytes` holds all `requests` to their end, so that no engine has to preempt one.

    `sequences` of about `median_length` tokens, clipped to `shortest` and `longest`, are one step of text training.
    `small_runs`: tokens in a step of one of several small clients. `patience`: seconds after which a timing stops
    repeating.
    """

    name: Literal["full", "4b", "tiny"]
    text: TextShape
    vision: VisionShape
    rank: int
    sequences: int
    median_length: int
    shortest: int
    longest: int
    micro_batch_tokens: int
    recompute_micro_batch_tokens: int
    long_sequence: int
    adapters: int
    small_runs: tuple[int, int]
    images: int
    image_side: int
    image_text: int
    step_sequences: int
    step_length: int
    requests: int
    prompt_tokens: int
    output_tokens: int
    kv_cache_bytes: int
    handovers: int
    warmup: int
    repeats: int
    patience: float

    @property
    def step_tokens(self) -> int:
        """Tokens of the step that is sent over HTTP."""
        return self.step_sequences * self.step_length


FULL = Scale(
    name="full",
    text=TextShape(4096, 12288, 36, 32, 8, 128, 151936),
    vision=VisionShape(27, 1152, 4304, 16, (8, 16, 24)),
    rank=32,
    sequences=64,
    median_length=500,
    shortest=64,
    longest=2048,
    micro_batch_tokens=8192,
    recompute_micro_batch_tokens=16384,
    long_sequence=32768,
    adapters=8,
    small_runs=(512, 64),
    images=64,
    image_side=448,
    image_text=64,
    step_sequences=8,
    step_length=512,
    requests=512,
    prompt_tokens=256,
    output_tokens=512,
    kv_cache_bytes=56 * 2**30,
    handovers=10,
    warmup=2,
    repeats=3,
    patience=12.0,
)

FOUR_B = dataclasses.replace(
    FULL,
    name="4b",
    text=TextShape(2560, 9728, 36, 32, 8, 128, 151936),
    requests=64,
    output_tokens=256,
    kv_cache_bytes=6 * 2**30,
    micro_batch_tokens=2048,
)
"""Of `stacks.py`: two servers fit on one GPU of 80 GB."""

TINY = Scale(
    name="tiny",
    text=TextShape(64, 128, 2, 4, 2, 32, 512, 4096),
    vision=VisionShape(2, 64, 128, 2, (0,), 8),
    rank=8,
    sequences=8,
    median_length=20,
    shortest=8,
    longest=64,
    micro_batch_tokens=128,
    recompute_micro_batch_tokens=256,
    long_sequence=512,
    adapters=3,
    small_runs=(32, 8),
    images=3,
    image_side=64,
    image_text=8,
    step_sequences=4,
    step_length=16,
    requests=8,
    prompt_tokens=8,
    output_tokens=8,
    kv_cache_bytes=64 * 2**20,
    handovers=2,
    warmup=1,
    repeats=1,
    patience=1.0,
)

TEXT_32B = TextShape(5120, 25600, 64, 64, 8, 128, 151936)

SCALES: dict[str, Scale] = {scale.name: scale for scale in (FULL, FOUR_B, TINY)}
