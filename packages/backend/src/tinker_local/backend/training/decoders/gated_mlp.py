"""down(act(gate) * up), the second half of a gated MLP of transformers, in less memory than autograd takes.

Autograd keeps four tensors [T, I] and has six at once in the backward. Here gate and up are kept, and the backward
overwrites them with their gradients and the product's gradient with the product: three at once. The sums are the same.
Legend: T tokens, I intermediate size, H hidden size.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from tinker_local.backend.training.lora_batch import LowRank, project, through, whole

_ROWS = 2048
"""Rows of the elementwise operations at a time."""


@torch.no_grad()
def is_gated(mlp: Any) -> bool:
    """Whether the module `mlp` computes down_proj(act_fn(gate_proj(x)) * up_proj(x)) and nothing else. Without values
    (on the meta device) it is assumed to, if it has these parts."""
    if not all(isinstance(getattr(mlp, name, None), torch.nn.Linear) for name in ("gate_proj", "up_proj", "down_proj")):
        return False
    if not callable(getattr(mlp, "act_fn", None)):
        return False
    weight = mlp.gate_proj.weight
    if weight.is_meta:
        return True
    x = torch.linspace(-2, 2, 2 * weight.shape[1], dtype=weight.dtype, device=weight.device).view(1, 2, -1)
    return bool(torch.equal(mlp(x), mlp.down_proj(mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x))))


class GatedDown(torch.autograd.Function):
    """act(gate) * up through `weight` [H, I], `bias` and the adapters. `gate`, `up` [1, T, I]; returns [1, T, H]. The
    backward overwrites `gate` and `up`, and writes the adapters' gradients to `LowRank`, outside autograd."""

    @staticmethod
    def forward(
        ctx: Any,
        gate: torch.Tensor,
        up: torch.Tensor,
        act: Callable[[torch.Tensor], torch.Tensor],
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        low_rank: LowRank | None,
    ) -> torch.Tensor:
        product = torch.empty_like(up).flatten(0, -2)
        for gate_rows, up_rows, rows in _parts(gate, up, product):
            torch.mul(act(gate_rows), up_rows, out=rows)
        h, output = project(product, weight, bias, low_rank, whole)
        ctx.save_for_backward(gate, up, weight, h)
        ctx.act, ctx.low_rank = act, low_rank
        return output.unflatten(0, gate.shape[:-1])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gate, up, weight, h = ctx.saved_tensors
        low_rank, rows = ctx.low_rank, grad.flatten(0, -2)
        grad_h = None if low_rank is None else low_rank.up_gradient(h, (rows,))
        product = through(rows, weight, low_rank, grad_h)  # its gradient, until `_overwrite`
        for part in _parts(gate, up, product):
            _overwrite(ctx.act, *part)
        if low_rank is not None and grad_h is not None:
            low_rank.write_a_gradient(grad_h, product)
        return gate.detach(), up.detach(), None, None, None, None


def _parts(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Views of the same `_ROWS` rows of all `tensors`, [..., I]."""
    return zip(*(tensor.detach().flatten(0, -2).split(_ROWS) for tensor in tensors), strict=True)


def _overwrite(
    act: Callable[[torch.Tensor], torch.Tensor], gate: torch.Tensor, up: torch.Tensor, grad: torch.Tensor
) -> None:
    """Write the gradients of `gate` and `up` to them and the product to `grad`, which was its gradient."""
    with torch.enable_grad():
        leaf = gate.detach().requires_grad_()
        active = act(leaf)
    (grad_gate,) = torch.autograd.grad(active, leaf, grad * up)
    active = active.detach()
    product = active * up
    torch.mul(grad, active, out=up)
    gate.copy_(grad_gate)
    grad.copy_(product)
