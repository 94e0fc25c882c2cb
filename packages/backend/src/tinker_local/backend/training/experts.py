"""Routed experts with adapters, forward and backward, for all adapters of a packed row at once.

    out = Σ_k s_k (D_e gated(G_e x, U_e x) + c_e)        e: the k-th expert of the token, s_k: its score

`gated` is silu(g) * u or a clamped variant; G, U and D may have biases, which are frozen as they are.
Adapters have the layout of the hosted service: all experts share A of gate and up, and B of down. So h = A x of gate
and up is computed once per token, before it goes to its K experts, and B of down is applied once, to the weighted sum
of what its experts' A gave. Frozen matrices need no gradient; scores do, because the router reads what adapters change.

Legend: T tokens, H hidden size, E experts, K experts of a token, S = T K pairs of both, sorted by expert, I
intermediate size, R columns of adapters.
"""

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from tinker_local.backend.training import compat_torch
from tinker_local.backend.training.grouped_products import RowGroups
from tinker_local.backend.training.kernels import Kernels
from tinker_local.backend.training.lora_batch import LowRank


class Gating(Protocol):
    """What experts make of gate and up."""

    widths: ClassVar[int]
    """How many tensors [S, I] the backward of a block has at once."""

    def halves(self, gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of gate and up, [S, I] each, of both, [S, 2 I]."""

    def forward(self, gate_up: torch.Tensor, kernels: Kernels) -> torch.Tensor:
        """[S, 2 I] -> [S, I]."""

    def backward(
        self, grad: torch.Tensor, gate_up: torch.Tensor, shares: torch.Tensor, kernels: Kernels
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """From the gradient of `shares` [S] times the output: those of `gate_up` and of `shares`, and between them the
        output without its share. May overwrite `grad` and `gate_up`."""


class SiluGating:
    """silu(g) * u; gate comes first."""

    widths: ClassVar[int] = 3

    def halves(self, gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = gate_up.chunk(2, dim=-1)
        return gate, up

    def forward(self, gate_up: torch.Tensor, kernels: Kernels) -> torch.Tensor:
        return kernels.swiglu(gate_up)

    def backward(
        self, grad: torch.Tensor, gate_up: torch.Tensor, shares: torch.Tensor, kernels: Kernels
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return kernels.routed_swiglu_backward(grad, gate_up, shares)


SILU = SiluGating()


@dataclass(frozen=True, slots=True)
class ClampedGating:
    """(u + 1) * g sigmoid(alpha g), with g at most `limit` and u between -`limit` and `limit`, as gpt-oss has it; gate
    and up take turns, number by number."""

    widths: ClassVar[int] = 9
    alpha: float
    limit: float

    def halves(self, gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return gate_up[..., ::2], gate_up[..., 1::2]

    def forward(self, gate_up: torch.Tensor, kernels: Kernels) -> torch.Tensor:
        gate, up = self._clamped(gate_up)
        return (up + 1) * (gate * torch.sigmoid(self.alpha * gate))

    def backward(
        self, grad: torch.Tensor, gate_up: torch.Tensor, shares: torch.Tensor, kernels: Kernels
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        gate, up = self._clamped(gate_up)
        sigmoid = torch.sigmoid(self.alpha * gate)
        active, factor = gate * sigmoid, up + 1
        output = factor * active
        grad_shares = (grad * output).sum(-1, dtype=_wide(grad))
        grad = grad.mul_(shares[:, None])
        result = torch.empty_like(gate_up)
        grad_gate, grad_up = self.halves(result)
        raw_gate, raw_up = self.halves(gate_up)
        grad_up.copy_((grad * active).masked_fill_(raw_up.abs() > self.limit, 0))
        slope = sigmoid + self.alpha * active * (1 - sigmoid)
        grad_gate.copy_((grad * factor * slope).masked_fill_(raw_gate > self.limit, 0))
        return result, output, grad_shares

    def _clamped(self, gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = self.halves(gate_up)
        return gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)


@dataclass(frozen=True, slots=True, eq=False)
class ExpertWeights:
    """Of one layer: `gate_up` [E, 2 I, H], as `gating` has it; `down` [E, H, I]; biases [E, 2 I] and [E, H], or None.
    Matrices may be transposed views."""

    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    gating: Gating = SILU


@dataclass(frozen=True, slots=True, eq=False)
class Routing:
    """Which pairs go where. `tokens` and `experts` int64 [S]: of each pair. `places` int64 [T, K]: of each token's
    pairs."""

    tokens: torch.Tensor
    experts: torch.Tensor
    places: torch.Tensor
    groups: RowGroups

    @classmethod
    def of(cls, experts: torch.Tensor, count: int) -> "Routing":
        """For the `experts` [T, K] of tokens, of `count`."""
        flat = experts.flatten()
        order = flat.argsort(stable=True)
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order), device=order.device)
        ends = (flat[:, None] == torch.arange(count, device=order.device)).sum(0).cumsum(0)
        groups = RowGroups(ends.to(torch.int32))
        return cls(order // experts.shape[1], flat[order], places.view(experts.shape), groups)

    @property
    def of_tokens(self) -> torch.Tensor:
        """The experts of each token, int64 [T, K]."""
        return self.experts[self.places]


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
    if weights.gate_up_bias is not None:
        gate_up += weights.gate_up_bias[routing.experts]
    if low_rank is None:
        return None, gate_up
    h = low_rank.down(x)
    of_pairs = h[routing.tokens]
    for place, (b, half) in enumerate(zip(low_rank.b, weights.gating.halves(gate_up), strict=True)):
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
    activated = weights.gating.forward(gate_up, kernels)
    of_pairs = routing.groups.multiply(activated, weights.down.transpose(1, 2))
    output = kernels.weighted_sum(of_pairs, routing.places, scores)
    if weights.down_bias is not None:
        shares = scores.new_zeros(len(scores), len(weights.down)).scatter_(1, routing.of_tokens, scores)
        output.addmm_(shares, weights.down_bias)
    if low_rank is None:
        return None, output
    mid = middle(activated, scores, routing, low_rank, kernels)
    return mid, output.addmm_(mid[:, 0], low_rank.b[0].T)


def middle(
    activated: torch.Tensor, scores: torch.Tensor, routing: Routing, low_rank: LowRank, kernels: Kernels
) -> torch.Tensor:
    """The weighted sum of A of down, [T, 1, R], of `activated` [S, I]."""
    found = routing.groups.multiply(activated, low_rank.a.transpose(1, 2))
    return low_rank.masked(kernels.weighted_sum(found, routing.places, scores)[:, None])


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
    of_pairs = scores.new_empty(len(tokens))
    of_pairs[routing.places.flatten()] = scores.flatten()
    # The score's gradient is the product of the output's with what the expert gave, here one matmul earlier.
    grad_gate_up, activated, grad_shares = weights.gating.backward(grad_activated, kept.gate_up, of_pairs, kernels)
    grad_scores = grad_shares[routing.places].to(scores.dtype)
    if weights.down_bias is not None:
        grad_scores += (grad @ weights.down_bias.T).gather(1, routing.of_tokens)
    if low_down is not None and grad_mid is not None:
        assert low_down.grad_a is not None
        groups.write_outer(grad_mid.mul_(of_pairs[:, None]), activated, low_down.grad_a)
    del activated, grad_activated, grad_mid
    grad_x = kernels.weighted_sum(groups.multiply(grad_gate_up, weights.gate_up), routing.places, None)
    if low_gate_up is not None:
        assert kept.h is not None, "kept or recomputed before the backward"
        h, halves = kept.h[tokens], weights.gating.halves(grad_gate_up)
        grad_h = torch.empty_like(kept.h)
        for place, (b, half) in enumerate(zip(low_gate_up.b, halves, strict=True)):
            grad_h[:, place] = kernels.weighted_sum(groups.multiply(half, b), routing.places, None)
            groups.write_outer(half, h[:, place].contiguous(), low_gate_up.grad_b[place])
        low_gate_up.masked(grad_h)
        low_gate_up.write_a_gradient(grad_h, x)
        grad_x.addmm_(grad_h.flatten(1), low_gate_up.a)
    return grad_x, grad_scores


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
