"""Rotary positions on the CPU, for models that give queries and keys as heads.

vLLM's operator for CPUs reads queries [T, heads, size] wrongly: beyond position 0 they come out as nothing that was
asked for. LFM2's layers give them so; others give [T, heads * size].
"""

import functools
from typing import Any

import torch


def read_heads() -> None:
    """Let vLLM's rotary positions on a CPU take queries and keys as heads, in engines built from now on."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    original: Any = RotaryEmbedding.forward_cpu
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def forward_cpu(
        self: Any,
        positions: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor | None = None,
        *args: Any,
        **more: Any,
    ) -> Any:
        flat_key = None if key is None else key.flatten(1)
        turned, turned_key = original(self, positions, query.flatten(1), flat_key, *args, **more)
        return turned.view(query.shape), None if key is None else turned_key.view(key.shape)

    RotaryEmbedding.forward_cpu = forward_cpu
