"""Routed experts of transformers' models: which modules they are, and their forward with adapters.

Legend: T tokens, H hidden size, E experts, K experts of a token, I intermediate size.
"""

from collections.abc import Sequence
from typing import Any

import torch
from tinker_local.backend.families.family import Experts
from tinker_local.backend.training.experts import (
    ExpertsKept,
    ExpertWeights,
    Routing,
    down,
    experts_backward,
    gate_and_up,
)
from tinker_local.backend.training.kernels import TorchKernels
from tinker_local.backend.training.lora import Target
from tinker_local.backend.training.lora_batch import LowRank

_KERNELS = TorchKernels()


@torch.no_grad()
def is_experts(module: Any) -> bool:
    """Whether `module` maps rows, experts and scores to Σ s D (silu(G x) * (U x)) and has no other weights. Without
    values (on the meta device) it is assumed to, if it has these parts."""
    shapes = {name: tuple(weight.shape) for name, weight in module.named_parameters()}
    if shapes.keys() != {"gate_up_proj", "down_proj"} or any(len(shape) != 3 for shape in shapes.values()):
        return False
    count, height, hidden = shapes["gate_up_proj"]
    if shapes["down_proj"] != (count, hidden, height // 2):
        return False
    weight = module.gate_up_proj
    if weight.is_meta:
        return True
    x = torch.linspace(-2, 2, 2 * hidden, dtype=weight.dtype, device=weight.device).view(2, -1)
    experts = torch.tensor([[0, count - 1], [count - 1, 0]], device=weight.device)
    scores = torch.tensor([[0.75, 0.25], [0.5, 0.5]], dtype=weight.dtype, device=weight.device)
    ours = packed_experts(module, x, experts, scores, None, None)
    theirs = module(x, experts, scores)
    return bool((ours - theirs).norm() <= 0.02 * theirs.norm())


def expert_targets(path: str, group: str, index: int, module: Any, names: Experts) -> list[Target]:
    """What adapters train of the experts `module` at `path`, block `index` of its kind: gate and up in the group
    `group`.gate_up, down in `group`.down."""
    count, hidden, width = module.down_proj.shape
    return [
        Target(f"{path}.{names.gate}", f"{group}.gate_up", names.gate, index, hidden, width, "mlp", count, "A"),
        Target(f"{path}.{names.up}", f"{group}.gate_up", names.up, index, hidden, width, "mlp", count, "A"),
        Target(f"{path}.{names.down}", f"{group}.down", names.down, index, width, hidden, "mlp", count, "B"),
    ]


def packed_experts(
    module: Any,
    x: torch.Tensor,
    experts: torch.Tensor,
    scores: torch.Tensor,
    low_gate_up: LowRank | None,
    low_down: LowRank | None,
) -> torch.Tensor:
    """The output [T, H] of the experts `module` for rows `x` [T, H], which go to `experts` [T, K] with `scores`."""
    output: torch.Tensor = _Experts.apply(
        x, scores, experts, module.gate_up_proj, module.down_proj, low_gate_up, low_down
    )
    return output


class _Experts(torch.autograd.Function):
    """Connects `training.experts` to autograd. The backward writes the adapters' gradients to `LowRank`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        scores: torch.Tensor,
        experts: torch.Tensor,
        weight_gate_up: torch.Tensor,
        weight_down: torch.Tensor,
        low_gate_up: LowRank | None,
        low_down: LowRank | None,
    ) -> torch.Tensor:
        x, scores = x.detach(), scores.detach()
        weights, routing = ExpertWeights(weight_gate_up, weight_down), Routing.of(experts, len(weight_down))
        h, gate_up = gate_and_up(x, routing, weights, low_gate_up)
        mid, output = down(gate_up, scores, routing, weights, low_down, _KERNELS)
        ctx.save_for_backward(x, scores, weight_gate_up, weight_down, gate_up, h, mid, routing.tokens, routing.places)
        ctx.groups, ctx.low_ranks = routing.groups, (low_gate_up, low_down)
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, scores, weight_gate_up, weight_down, gate_up, h, mid, tokens, places = ctx.saved_tensors
        low_gate_up, low_down = ctx.low_ranks
        grad_x, grad_scores = experts_backward(
            grad,
            x,
            scores,
            Routing(tokens, places, ctx.groups),
            ExpertWeights(weight_gate_up, weight_down),
            ExpertsKept(gate_up, h, mid),
            low_gate_up,
            low_down,
            _KERNELS,
        )
        return grad_x, grad_scores, None, None, None, None, None


def in_order(targets: Sequence[Target], modules: Any, path: str) -> list[Target]:
    """`targets` in the order of the modules of the decoder `modules` at `path`; of one module in the given order."""
    order = {f"{path}.{name}": place for place, (name, _) in enumerate(modules.named_modules())}
    return sorted(targets, key=lambda target: order.get(target.path) or order[target.path.rpartition(".")[0]])
