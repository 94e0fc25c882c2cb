"""Routed experts of transformers' models: which modules they are, and their forward with adapters.

Legend: T tokens, H hidden size, E experts, K experts of a token, I intermediate size.
"""

from typing import Any

import torch
from tinker_local.backend.families.family import Experts
from tinker_local.backend.training.kernels.kernels import TorchKernels, activated
from tinker_local.backend.training.lora.lora import Target
from tinker_local.backend.training.lora.lora_batch import LowRank
from tinker_local.backend.training.model.experts import (
    GELU,
    SILU,
    ClampedGating,
    ExpertsKept,
    ExpertWeights,
    Gating,
    Routing,
    down,
    experts_backward,
    gate_and_up,
)
from tinker_local.backend.weights.dense import DenseStack
from tinker_local.backend.weights.frozen_matrix import FrozenStack
from tinker_local.backend.weights.joined_names import EXPERTS_DOWN, EXPERTS_GATE_UP
from tinker_local.backend.weights.packed_stack import PackedExperts, Stacks

_KERNELS = TorchKernels()


def weights_of(module: Any) -> ExpertWeights | None:
    """The weights of transformers' `module`, as views, if it has the parts of routed experts and no others, or of the
    packed module in its place."""
    gate_up: FrozenStack
    down: FrozenStack
    if isinstance(module, PackedExperts):
        gate_up, down = (getattr(module, name).stack() for name in (EXPERTS_GATE_UP, EXPERTS_DOWN))
    elif (stacks := Stacks.of(module)) is not None:
        gate_up, down = DenseStack(stacks.gate_up), DenseStack(stacks.down)
    else:
        return None
    return ExpertWeights(gate_up, down, _bias(module, EXPERTS_GATE_UP), _bias(module, EXPERTS_DOWN), _gating_of(module))


def _gating_of(module: Any) -> Gating:
    """By what transformers' `module` computes; of one without an activation, SiLU."""
    if hasattr(module, "limit"):
        return ClampedGating(module.alpha, module.limit)
    x = torch.linspace(-4, 4, 65, device="cpu")
    gelu = hasattr(module, "act_fn") and torch.allclose(module.act_fn(x), activated(x, "gelu_tanh"), rtol=0, atol=1e-6)
    return GELU if gelu else SILU


def _bias(module: Any, name: str) -> torch.Tensor | None:
    """That of the stack `name`, if it has one."""
    bias: torch.Tensor | None = getattr(module, f"{name}_bias", None)
    return None if bias is None else bias.detach()


@torch.no_grad()
def is_experts(module: Any) -> bool:
    """Whether `module` maps rows, experts and scores to what `training.experts` computes of its weights. Without values
    (on the meta device) it is assumed to, if it has these parts."""
    weights = weights_of(module)
    if weights is None:
        return False
    gate_up, place = weights.gate_up, {"dtype": weights.gate_up.dtype, "device": weights.gate_up.device}
    if gate_up.device.type == "meta":
        return True
    x = torch.linspace(-2, 2, 2 * gate_up.inputs, **place).view(2, -1)
    experts = torch.tensor([[0, gate_up.count - 1], [gate_up.count - 1, 0]], device=gate_up.device)
    scores = torch.tensor([[0.75, 0.25], [0.5, 0.5]], **place)
    ours = packed_experts(weights, x, experts, scores, None, None)
    theirs = module(x, experts, scores)
    return bool((ours - theirs).norm() <= 0.02 * theirs.norm())


@torch.no_grad()
def scores_are_softmax(router: Any, *choice: torch.Tensor) -> bool:
    """Whether the scores that `router` gives are the softmax of its chosen experts' logits, and of no others. Without
    values (on the meta device) it is assumed to. `choice`: what it takes beside its input."""
    weight = router.weight
    if weight.is_meta:
        return True
    x = torch.linspace(-1, 1, 2 * weight.shape[1], dtype=weight.dtype, device=weight.device).view(2, -1)
    # If one logit is far above the others, they all give the same scores.
    x /= router(x, *choice)[0].abs().max().clamp_min(1e-3)
    logits, scores, experts = router(x, *choice)
    ours = logits.gather(1, experts).softmax(-1)
    return bool((ours - scores).norm() <= 0.02 * scores.norm())


def expert_targets(path: str, group: str, index: int, module: Any, names: Experts) -> list[Target]:
    """What adapters train of the experts `module` at `path`, block `index` of its kind: gate and up in the group
    `group`.gate_up, down in `group`.down."""
    weights = weights_of(module)
    assert weights is not None
    count, hidden, width = weights.down.count, weights.down.outputs, weights.down.inputs
    return [
        Target(f"{path}.{names.gate}", f"{group}.gate_up", names.gate, index, hidden, width, "mlp", count, "A"),
        Target(f"{path}.{names.up}", f"{group}.gate_up", names.up, index, hidden, width, "mlp", count, "A"),
        Target(f"{path}.{names.down}", f"{group}.down", names.down, index, width, hidden, "mlp", count, "B"),
    ]


def packed_experts(
    weights: ExpertWeights,
    x: torch.Tensor,
    experts: torch.Tensor,
    scores: torch.Tensor,
    low_gate_up: LowRank | None,
    low_down: LowRank | None,
) -> torch.Tensor:
    """The output [T, H] of experts with `weights` for rows `x` [T, H], which go to `experts` [T, K] with `scores`."""
    output: torch.Tensor = _Experts.apply(x, scores, experts, weights, low_gate_up, low_down)
    return output


class _Experts(torch.autograd.Function):
    """Connects `training.experts` to autograd. The backward writes the adapters' gradients to `LowRank`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        scores: torch.Tensor,
        experts: torch.Tensor,
        weights: ExpertWeights,
        low_gate_up: LowRank | None,
        low_down: LowRank | None,
    ) -> torch.Tensor:
        x, scores = x.detach(), scores.detach()
        routing = Routing.of(experts, weights.down.count, None, _KERNELS)
        h, gate_up = gate_and_up(x, routing, weights, low_gate_up, _KERNELS)
        mid, output = down(gate_up, h, scores, routing, weights, low_gate_up, low_down, _KERNELS)
        places = routing.of_tokens, routing.order, routing.places, routing.bounds
        ctx.save_for_backward(x, scores, gate_up, h, mid, *places)
        ctx.weights, ctx.low_ranks = weights, (low_gate_up, low_down)
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, scores, gate_up, h, mid, *places = ctx.saved_tensors
        low_gate_up, low_down = ctx.low_ranks
        grad_x, grad_scores = experts_backward(
            grad,
            x,
            scores,
            Routing(*places),
            ctx.weights,
            ExpertsKept(gate_up, h, mid),
            low_gate_up,
            low_down,
            _KERNELS,
        )
        return grad_x, grad_scores, None, None, None, None
