"""What differs between torch 2.11 and 2.13, in one place."""

import inspect

import torch

_VARLEN_DTYPES = (torch.bfloat16, torch.float16)


def varlen_attention_works(query: torch.Tensor) -> bool:
    """Whether torch's variable-length attention takes this tensor: CUDA, 16 bit (its flash kernels know no other)."""
    return bool(query.is_cuda) and query.dtype in _VARLEN_DTYPES


def varlen_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: torch.Tensor, longest: int, scaling: float
) -> torch.Tensor:
    """Causal attention of each segment with itself. `query` [T, heads, D], `key` and `value` [T, kv heads, D],
    `bounds` int32 [segments + 1]; returns [T, heads, D].

    torch 2.11 has no `enable_gqa` here, so key and value heads are repeated.
    """
    from torch.nn.attention.varlen import varlen_attn

    options = {"scale": scaling, "window_size": (-1, 0)}  # (-1, 0): everything before, nothing after
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and "enable_gqa" in inspect.signature(varlen_attn).parameters:
        options["enable_gqa"] = True
    elif groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    return varlen_attn(query, key, value, bounds, bounds, longest, longest, **options)
