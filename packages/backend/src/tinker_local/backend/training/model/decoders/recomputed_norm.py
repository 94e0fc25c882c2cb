"""A norm of transformers that keeps its input alone. Autograd keeps a float32 copy, twice as large as bfloat16."""

from collections.abc import Callable
from typing import Any

import torch

_ELEMENTS = 1 << 23
"""Numbers that the backward normalizes again at a time: 2,048 rows of 4,096, or 65,536 heads of 128. A fixed number of
rows would cut the norm of heads into hundreds of parts, each too small for a GPU."""


@torch.no_grad()
def is_norm(module: Any) -> bool:
    """Whether `module` maps each row [..., D] to one of the same shape by itself, with weights [D] alone. Without
    values (on the meta device) only shapes are compared."""
    weights = list(module.parameters())
    if not weights or any(module.children()) or any(weight.dim() != 1 for weight in weights):
        return False
    like = weights[0]
    x = torch.linspace(-2, 2, 2 * len(like), dtype=like.dtype, device=like.device).view(2, -1)
    try:
        both = module(x)
        rows = [module(row[None]) for row in x]
    except (RuntimeError, TypeError):  # it takes something else
        return False
    if not isinstance(both, torch.Tensor) or both.shape != x.shape:
        return False
    return both.is_meta or bool(torch.equal(both, torch.cat(rows)))


class RecomputedNorm(torch.autograd.Function):
    """`norm(x)`, [..., D]; the backward computes it again, some rows at a time. Its weights get no gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, norm: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.norm = norm
        return norm(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        found = torch.empty_like(x, memory_format=torch.contiguous_format)
        count = max(1, _ELEMENTS // x.shape[-1])
        for rows, grad_rows, out in zip(*(each.flatten(0, -2).split(count) for each in (x, grad, found)), strict=True):
            with torch.enable_grad():
                leaf = rows.detach().requires_grad_()
                normalized = ctx.norm(leaf)
            out.copy_(torch.autograd.grad(normalized, leaf, grad_rows)[0])
        return found, None
