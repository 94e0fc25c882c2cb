"""Differences between torch 2.11 and 2.13 and between devices."""

from typing import Any

import torch


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
