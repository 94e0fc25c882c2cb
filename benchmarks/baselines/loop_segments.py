"""Attention of sequences packed into one row, as a user would register it with transformers."""

import inspect
from typing import Any

import torch
from transformers import AttentionInterface

NAME = "hand_written_segments"


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    lengths: tuple[int, ...],
    bounds: torch.Tensor,
    scaling: float,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """`query` [1, heads, T, D], `key` and `value` [1, kv heads, T, D]; `lengths` sum to T and `bounds` (int32) are
    their running sum from 0. Returns [1, T, heads, D]."""
    assert attention_mask is None
    if query.is_cuda:
        return _varlen(query, key, value, bounds, max(lengths), scaling), None
    rows, start = [], 0
    for length in lengths:
        own = [tensor[:, :, start : start + length] for tensor in (query, key, value)]
        rows.append(
            torch.nn.functional.scaled_dot_product_attention(*own, is_causal=True, scale=scaling, enable_gqa=True)
        )
        start += length
    return torch.cat(rows, dim=2).transpose(1, 2), None


def _varlen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: torch.Tensor, longest: int, scaling: float
) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = (tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value))
    known = inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {"scale": scaling}
    options |= {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    if "enable_gqa" in known:
        options["enable_gqa"] = True
    else:
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    return varlen_attn(q, k, v, bounds, bounds, longest, longest, **options)[None]


def segment_arguments(lengths: list[int], device: torch.device) -> dict[str, Any]:
    """What the model's forward needs besides tokens and positions."""
    starts = torch.tensor([0, *lengths], dtype=torch.int32, device=device)
    return {"lengths": tuple(lengths), "bounds": starts.cumsum(0, dtype=torch.int32)}


def register() -> None:
    """Register the name with transformers; without a mask function of that name it builds no mask."""
    AttentionInterface.register(NAME, attention)
