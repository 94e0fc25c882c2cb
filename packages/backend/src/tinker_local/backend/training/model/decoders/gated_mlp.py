"""down(act(gate) * up), the second half of a gated MLP of transformers, in less memory than autograd takes.

Autograd keeps four tensors [T, I] and has six at once in the backward. Here gate and up are kept, and the backward
overwrites them with their gradients. The product and its gradient exist for a few rows at a time: two tensors at once.
Legend: T tokens, I intermediate size, H hidden size.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from tinker_local.backend.training.lora.lora_batch import LowRank, project, through, whole
from tinker_local.backend.weights.frozen_matrix import FrozenMatrix

_ROWS = 2048
"""Rows whose product, or gradient of it, is in memory at a time; enough to keep a GPU busy."""


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
    """act(gate) * up through `matrix` [H, I], `bias` and the adapters. `gate`, `up` [1, T, I]; returns [1, T, H]. The
    backward overwrites `gate` and `up`, and writes the adapters' gradients to `LowRank`, outside autograd."""

    @staticmethod
    def forward(
        ctx: Any,
        gate: torch.Tensor,
        up: torch.Tensor,
        act: Callable[[torch.Tensor], torch.Tensor],
        matrix: FrozenMatrix,
        bias: torch.Tensor | None,
        low_rank: LowRank | None,
    ) -> torch.Tensor:
        found = gate.new_empty(*gate.shape[:-1], matrix.outputs)
        output, hs = found.flatten(0, -2), list[torch.Tensor]()
        for part, gate_rows, up_rows in _parts(gate, up):
            of_rows = None if low_rank is None else low_rank.rows(part)
            h_rows, output[part] = project(act(gate_rows) * up_rows, matrix, bias, of_rows, whole)
            if h_rows is not None:
                hs.append(h_rows)
        h = torch.cat(hs) if hs else None
        ctx.save_for_backward(gate, up, h)
        ctx.act, ctx.matrix, ctx.low_rank = act, matrix, low_rank
        return found

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gate, up, h = ctx.saved_tensors
        low_rank, rows = ctx.low_rank, grad.flatten(0, -2)
        grad_h = None if low_rank is None else low_rank.up_gradient(h, (rows,))
        for part, gate_rows, up_rows, grad_rows in _parts(gate, up, rows):
            of_rows = None if grad_h is None else grad_h[part]
            product = through(grad_rows, ctx.matrix, low_rank, of_rows)  # its gradient, until `_overwrite`
            _overwrite(ctx.act, gate_rows, up_rows, product)
            if low_rank is not None and of_rows is not None:
                (low_rank.add_a_gradient if part.start else low_rank.write_a_gradient)(of_rows, product)
        return gate.detach(), up.detach(), None, None, None, None


def _parts(*tensors: torch.Tensor) -> Iterator[tuple[Any, ...]]:
    """Slices of `_ROWS` rows, each with the views of all `tensors`, [..., I], there."""
    flat = [tensor.detach().flatten(0, -2) for tensor in tensors]
    for start in range(0, len(flat[0]), _ROWS):
        part = slice(start, start + _ROWS)
        yield part, *(tensor[part] for tensor in flat)


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
