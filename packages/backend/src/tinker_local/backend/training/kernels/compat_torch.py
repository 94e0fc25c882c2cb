"""Differences between torch 2.11 and 2.13 and between devices."""

from typing import Any

import torch
from tinker_local.backend.training.model.segments import Bounds

_FLASH_DTYPES = (torch.bfloat16, torch.float16)


def flash_attention_works(query: torch.Tensor) -> bool:
    """Whether torch's flash attention supports this tensor: 16 bit on CUDA, head size a multiple of 8 and at most 256,
    and no gradient required, because the operators called here bypass autograd."""
    size = query.shape[-1]
    return query.is_cuda and query.dtype in _FLASH_DTYPES and size % 8 == 0 and size <= 256 and not query.requires_grad


def flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: Bounds,
    scaling: float,
    causal: bool,
    window: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of each segment to its keys. `query` [T, N, D], `key` and `value` [keys, M, D]; returns the output
    [T, N, D] and the logsumexp of the scores [N, T]. `causal`: the last position of a segment sees all of its keys, the
    one before it all but the last, and so on. `window`: how many positions each attends to, itself included.

    Calls the operators directly, because `torch.nn.attention.varlen` of 2.11 refuses fewer key-value than query heads.
    """
    output, logsumexp, _, _, _ = torch.ops.aten._flash_attention_forward(
        query, key, value, *_arguments(bounds), 0.0, causal, False, scale=scaling, **_window(window)
    )
    return output, logsumexp


def flash_attention_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    logsumexp: torch.Tensor,
    bounds: Bounds,
    scaling: float,
    causal: bool,
    window: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of query, key and value of `flash_attention`."""
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=query.device)
    grad_query, grad_key, grad_value = torch.ops.aten._flash_attention_backward(
        grad, query, key, value, output, logsumexp, *_arguments(bounds), 0.0, causal,
        no_dropout, torch.empty(0, device=query.device), scale=scaling, **_window(window),
    )  # fmt: skip
    return grad_query, grad_key, grad_value


def _arguments(bounds: Bounds) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    return bounds.queries, bounds.keys, bounds.longest_query, bounds.longest_keys


def _window(window: int | None) -> dict[str, int]:
    """The kernel's arguments for `window`: the number of positions before and after a position."""
    return {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}


def mm_into_float32(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """out = a @ b, accumulated and stored in the float32 of `out` (or in the common dtype of all three)."""
    if a.dtype == out.dtype:
        torch.mm(a, b, out=out)
    elif a.is_cuda:
        torch.mm(a, b, out_dtype=out.dtype, out=out)
    else:
        torch.mm(a.to(out.dtype), b.to(out.dtype), out=out)


def all_gather(output: torch.Tensor, input: torch.Tensor, group: Any, *, async_op: bool) -> Any:
    """Gather the `input` of all ranks of `group` into `output`, one after the other. 2.13 has it under a new name."""
    gather: Any = getattr(torch.distributed, "all_gather_single", None) or torch.distributed.all_gather_into_tensor
    return gather(output, input, group=group, async_op=async_op)


def grouped_mm_works(x: torch.Tensor) -> bool:
    """Whether torch multiplies rows of `x` by the matrices of their groups: bfloat16 on CUDA, since Ampere."""
    bfloat16_on_cuda = x.is_cuda and x.dtype == torch.bfloat16
    return bfloat16_on_cuda and bool(torch.cuda.get_device_capability(x.device) >= (8, 0))


def grouped_mm(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """a [S, k] and b [E, k, n] -> [S, n], rows of group e times b[e]; or a [m, S] and b [S, n] -> [E, m, n]. `ends`
    int32 [E]: where each group ends in S."""
    multiply = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm
    found: torch.Tensor = multiply(a, b, offs=ends)
    return found
