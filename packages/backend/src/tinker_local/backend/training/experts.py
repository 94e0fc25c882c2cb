"""Routed experts with adapters, forward and backward, for all adapters of a packed row at once.

    out = Σ_k s_k D_e (silu(G_e x) * (U_e x))        e: the k-th expert of the token, s_k: its score

Adapters have the layout of the hosted service: all experts share A of gate and up, and B of down. So h = A x of gate
and up is computed once per token, before it goes to its K experts, and B of down is applied once, to the weighted sum
of what its experts' A gave. Frozen matrices need no gradient; scores do, because the router reads what adapters change.

Legend: T tokens, H hidden size, E experts, K experts of a token, S = T K pairs of both, sorted by expert, I
intermediate size, R columns of adapters.
"""

from dataclasses import dataclass

import torch
from tinker_local.backend.training import compat_torch
from tinker_local.backend.training.grouped_products import RowGroups
from tinker_local.backend.training.kernels import Kernels
from tinker_local.backend.training.lora_batch import LowRank


@dataclass(frozen=True, slots=True, eq=False)
class ExpertWeights:
    """Of one layer: `gate_up` [E, 2 I, H], gate first; `down` [E, H, I]."""

    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Routing:
    """Which pairs go where. `tokens` int64 [S]: of each pair. `places` int64 [T, K]: of each token's pairs."""

    tokens: torch.Tensor
    places: torch.Tensor
    groups: RowGroups

    @classmethod
    def of(cls, experts: torch.Tensor, count: int) -> "Routing":
        """For the `experts` [T, K] of tokens, of `count`."""
        order = experts.flatten().argsort(stable=True)
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order), device=order.device)
        ends = (experts.flatten()[:, None] == torch.arange(count, device=order.device)).sum(0).cumsum(0)
        return cls(order // experts.shape[1], places.view(experts.shape), RowGroups(ends.to(torch.int32)))

    def sums(self, pairs: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
        """The sum of each token's `pairs`, [S, n] -> [T, n], with `weights` [T, K] if there are any."""
        of_tokens = pairs[self.places]
        return of_tokens.sum(1) if weights is None else (weights[:, None] @ of_tokens)[:, 0]


@dataclass(slots=True, eq=False)
class ExpertsKept:
    """What the backward reads. `gate_up` [S, 2 I]; `h` [T, 2, R], of gate and up; `mid` [T, 1, R]: the weighted sum of
    A of down. None without adapters."""

    gate_up: torch.Tensor
    h: torch.Tensor | None
    mid: torch.Tensor | None


def gate_and_up(
    x: torch.Tensor, routing: Routing, weights: ExpertWeights, low_rank: LowRank | None
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """h [T, 2, R] of the adapters, and both projections [S, 2 I], of `x` [T, H]."""
    gate_up = routing.groups.multiply(x[routing.tokens], weights.gate_up.transpose(1, 2))
    if low_rank is None:
        return None, gate_up
    h = low_rank.down(x)
    of_pairs = h[routing.tokens]
    for place, (b, half) in enumerate(zip(low_rank.b, gate_up.chunk(2, dim=-1), strict=True)):
        routing.groups.add_product(half, of_pairs[:, place].contiguous(), b.transpose(1, 2))
    return h, gate_up


def down(
    gate_up: torch.Tensor,
    scores: torch.Tensor,
    routing: Routing,
    weights: ExpertWeights,
    low_rank: LowRank | None,
    kernels: Kernels,
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """`mid` [T, 1, R] of the adapters, and the experts' output [T, H]. `scores` [T, K]."""
    activated = kernels.swiglu(gate_up)
    output = routing.sums(routing.groups.multiply(activated, weights.down.transpose(1, 2)), scores)
    if low_rank is None:
        return None, output
    mid = middle(activated, scores, routing, low_rank)
    return mid, output.addmm_(mid[:, 0], low_rank.b[0].T)


def middle(activated: torch.Tensor, scores: torch.Tensor, routing: Routing, low_rank: LowRank) -> torch.Tensor:
    """The weighted sum of A of down, [T, 1, R], of `activated` [S, I]."""
    found = routing.groups.multiply(activated, low_rank.a.transpose(1, 2))
    return low_rank.masked(routing.sums(found, scores)[:, None])


def experts_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    scores: torch.Tensor,
    routing: Routing,
    weights: ExpertWeights,
    kept: ExpertsKept,
    low_gate_up: LowRank | None,
    low_down: LowRank | None,
    kernels: Kernels,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of `x` [T, H] and `scores` [T, K] from that of the output [T, H]. Writes those of the adapters, and
    overwrites what was kept."""
    groups, tokens = routing.groups, routing.tokens
    # By the activations, before the scores.
    grad_activated = groups.multiply(grad[tokens], weights.down)
    grad_mid = None
    if low_down is not None:
        assert kept.mid is not None, "kept or recomputed before the backward"
        compat_torch.mm_into_float32(grad.T, kept.mid[:, 0], low_down.grad_b[0])
        grad_mid = low_down.masked((grad @ low_down.b[0])[:, None])[:, 0][tokens]
        groups.add_product(grad_activated, grad_mid, low_down.a)
    # The score's gradient is the product of the output's with what the expert gave, here one matmul earlier.
    products = grad_activated * kernels.swiglu(kept.gate_up)
    grad_scores = products.sum(-1, dtype=_wide(products))[routing.places].to(scores.dtype)
    del products
    of_pairs = scores.new_empty(len(tokens))
    of_pairs[routing.places.flatten()] = scores.flatten()
    grad_gate_up, activated = kernels.swiglu_backward(grad_activated.mul_(of_pairs[:, None]), kept.gate_up)
    if low_down is not None and grad_mid is not None:
        assert low_down.grad_a is not None
        groups.write_outer(grad_mid.mul_(of_pairs[:, None]), activated, low_down.grad_a)
    del activated, grad_activated, grad_mid
    grad_x = routing.sums(groups.multiply(grad_gate_up, weights.gate_up))
    if low_gate_up is not None:
        assert kept.h is not None, "kept or recomputed before the backward"
        h, halves = kept.h[tokens], grad_gate_up.chunk(2, dim=-1)
        grad_h = torch.empty_like(kept.h)
        for place, (b, half) in enumerate(zip(low_gate_up.b, halves, strict=True)):
            grad_h[:, place] = routing.sums(groups.multiply(half, b))
            groups.write_outer(half, h[:, place].contiguous(), low_gate_up.grad_b[place])
        low_gate_up.masked(grad_h)
        low_gate_up.write_a_gradient(grad_h, x)
        grad_x.addmm_(grad_h.flatten(1), low_gate_up.a)
    return grad_x, grad_scores


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
