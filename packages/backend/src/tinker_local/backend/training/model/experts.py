"""Routed experts with adapters, forward and backward, for all adapters of a packed row at once.

    out = Σ_k s_k (D_e gated(G_e x, U_e x) + c_e)        e: the k-th expert of the token, s_k: its score

`gated` is silu(g) * u or a clamped variant; G, U and D may have biases, which are frozen as they are.
Adapters have the layout of the hosted service: all experts share A of gate and up, and B of down. So h = A x of gate
and up is computed once per token, before it goes to its K experts, and B of down is applied once, to the weighted sum
of what its experts' A gave. Frozen matrices need no gradient; scores do, because the router reads what adapters change.

For SwiGLU in 16 bits on CUDA, `triton_experts.py` computes all of it between the products with the frozen matrices.

Legend: T tokens, H hidden size, E experts, K experts of a token, S = T K pairs of both, sorted by expert and within an
expert by adapter, I intermediate size, N adapters, R columns of adapters.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Protocol

import torch
from tinker_local.backend.training.kernels import compat_torch
from tinker_local.backend.training.kernels.grouped_products import RowGroups
from tinker_local.backend.training.kernels.kernels import Activation, Kernels
from tinker_local.backend.training.lora.lora_batch import LowRank, Owners
from tinker_local.backend.weights.frozen_matrix import FrozenStack

if TYPE_CHECKING:
    from tinker_local.backend.training.kernels.triton_experts import OwnedRows, TritonExperts


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


class _GateFirst:
    """activation(g) * u; gate comes first."""

    activation: ClassVar[Activation]

    def halves(self, gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = gate_up.chunk(2, dim=-1)
        return gate, up

    def forward(self, gate_up: torch.Tensor, kernels: Kernels) -> torch.Tensor:
        return kernels.glu(gate_up, self.activation)


class SiluGating(_GateFirst):
    """silu(g) * u."""

    activation = "silu"
    widths: ClassVar[int] = 3

    def backward(
        self, grad: torch.Tensor, gate_up: torch.Tensor, shares: torch.Tensor, kernels: Kernels
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return kernels.routed_swiglu_backward(grad, gate_up, shares)


SILU = SiluGating()


class GeluGating(_GateFirst):
    """gelu(g) * u, by tanh."""

    activation = "gelu_tanh"
    widths: ClassVar[int] = 4

    def backward(
        self, grad: torch.Tensor, gate_up: torch.Tensor, shares: torch.Tensor, kernels: Kernels
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        output = self.forward(gate_up, kernels)
        grad_shares = (grad * output).sum(-1, dtype=_wide(grad))
        return kernels.glu_backward(grad.mul_(shares[:, None]), gate_up, self.activation)[0], output, grad_shares


GELU = GeluGating()


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
    """Of one layer: `gate_up` [E, 2 I, H], as `gating` has it; `down` [E, H, I]; biases [E, 2 I] and [E, H], or
    None."""

    gate_up: FrozenStack
    down: FrozenStack
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    gating: Gating = SILU


@dataclass(frozen=True, eq=False)
class Routing:
    """Which pairs go where. `of_tokens` int64 [T, K]: the experts of each token. `order` int64 [S]: the pairs, by
    expert and within an expert by adapter; pair t K + k is the k-th of token t. `places` int64 [T, K]: where in `order`
    each one is. `bounds` int32 [E N + 1]: where those of expert e and adapter n start, at e N + n, then S. `owners`: N.
    `owned`: the same rows for the fused kernels, if there are any."""

    of_tokens: torch.Tensor
    order: torch.Tensor
    places: torch.Tensor
    bounds: torch.Tensor
    owners: int = 1
    owned: "OwnedRows | None" = None

    @classmethod
    def of(cls, experts: torch.Tensor, count: int, owners: Owners | None, kernels: Kernels) -> "Routing":
        """For the `experts` [T, K] of tokens, of `count`."""
        of_tokens = None if owners is None else owners.of_tokens
        several = 1 if owners is None or of_tokens is None else len(owners.columns)
        if kernels.experts is not None:
            places, owned = kernels.experts.sort(experts, of_tokens, count, several)
            return cls(experts, owned.order, places, owned.bounds, several, owned)
        keys = experts if of_tokens is None else experts * several + of_tokens[:, None]
        keys, order = keys.flatten().sort(stable=True)
        places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        bounds = torch.searchsorted(keys, torch.arange(count * several + 1, device=keys.device), out_int32=True)
        return cls(experts, order, places.view(experts.shape), bounds, several)

    @cached_property
    def groups(self) -> RowGroups:
        """By expert."""
        return RowGroups(self.bounds[self.owners :: self.owners].contiguous())

    @cached_property
    def tokens(self) -> torch.Tensor:
        """Of each pair in order, int64 [S]."""
        return self.order // self.places.shape[1]

    @property
    def experts(self) -> torch.Tensor:
        """Of each pair in order, int64 [S]."""
        return self.of_tokens.flatten()[self.order]


@dataclass(slots=True, eq=False)
class ExpertsKept:
    """What the backward reads. `gate_up` [S, 2 I], as `gate_and_up` gives it; `h` [T, 2, R], of gate and up; `mid`
    [T, 1, R]: the weighted sum of A of down. None without adapters."""

    gate_up: torch.Tensor
    h: torch.Tensor | None
    mid: torch.Tensor | None


def gate_and_up(
    x: torch.Tensor, routing: Routing, weights: ExpertWeights, low_rank: LowRank | None, kernels: Kernels
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """h [T, 2, R] of the adapters, and both projections [S, 2 I], of `x` [T, H]; the fused kernels add the low rank
    later."""
    gate_up = weights.gate_up.times(kernels.spread(x, routing.places), routing.groups)
    if weights.gate_up_bias is not None:
        gate_up += weights.gate_up_bias[routing.experts]
    if low_rank is None:
        return None, gate_up
    h = low_rank.down(x)
    if _fused(weights, low_rank, kernels) is None:
        of_pairs = h[routing.tokens]
        for place, (b, half) in enumerate(zip(low_rank.b, weights.gating.halves(gate_up), strict=True)):
            routing.groups.add_product(half, of_pairs[:, place].contiguous(), b.transpose(1, 2))
    return h, gate_up


def down(
    gate_up: torch.Tensor,
    h: torch.Tensor | None,
    scores: torch.Tensor,
    routing: Routing,
    weights: ExpertWeights,
    low_gate_up: LowRank | None,
    low_down: LowRank | None,
    kernels: Kernels,
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """`mid` [T, 1, R] of the adapters, and the experts' output [T, H]. `gate_up` and `h`: of `gate_and_up`; `scores`
    [T, K]."""
    activated, mid = activate(gate_up, h, scores, routing, weights, low_gate_up, low_down, kernels)
    of_pairs = weights.down.times(activated, routing.groups)
    output = kernels.weighted_sum(of_pairs, routing.places, scores)
    if weights.down_bias is not None:
        shares = scores.new_zeros(len(scores), weights.down.count).scatter_(1, routing.of_tokens, scores)
        output.addmm_(shares, weights.down_bias)
    if low_down is None or mid is None:
        return None, output
    return mid, output.addmm_(mid[:, 0], low_down.b[0].T)


def activate(
    gate_up: torch.Tensor,
    h: torch.Tensor | None,
    scores: torch.Tensor,
    routing: Routing,
    weights: ExpertWeights,
    low_gate_up: LowRank | None,
    low_down: LowRank | None,
    kernels: Kernels,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The experts' activations [S, I], and the weighted sum of A of down, [T, 1, R]."""
    fused = _fused(weights, low_down, kernels)
    if fused is None:
        activated = weights.gating.forward(gate_up, kernels)
        if low_down is None:
            return activated, None
        found = routing.groups.multiply(activated, low_down.a.transpose(1, 2))
        return activated, low_down.masked(kernels.weighted_sum(found, routing.places, scores)[:, None])
    assert h is not None, "a low rank of down comes with one of gate and up"
    assert low_gate_up is not None
    assert low_down is not None
    assert routing.owned is not None
    activated, found = fused.activate(gate_up, h, routing.owned, low_gate_up, low_down)
    return activated, fused.sum_columns(found, routing.places, scores, low_gate_up)


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
    groups, places = routing.groups, routing.places
    # By the activations, before the scores.
    grad_activated = weights.down.back(kernels.spread(grad, places), groups)
    grad_mid = None
    if low_down is not None:
        assert kept.mid is not None, "kept or recomputed before the backward"
        compat_torch.mm_into_float32(grad.T, kept.mid[:, 0], low_down.grad_b[0])
        grad_mid = low_down.masked((grad @ low_down.b[0])[:, None])[:, 0]
    fused = _fused(weights, low_down, kernels)
    # A score's gradient is the product of the output's with what the expert gave; both take it one matmul earlier.
    if fused is None:
        shares = scores.flatten()[routing.order]
        grad_gate_up, grad_shares, grad_h = _backward_between(
            grad_activated, grad_mid, shares, routing, weights, kept, low_gate_up, low_down, kernels
        )
        grad_scores = grad_shares[places].to(scores.dtype)
    else:
        assert kept.h is not None, "kept or recomputed before the backward"
        assert grad_mid is not None, "a low rank of down comes with one of gate and up"
        assert low_gate_up is not None
        assert low_down is not None
        assert routing.owned is not None
        grad_gate_up, grad_scores, grad_rows = fused.backward(
            grad_activated, kept.gate_up, kept.h, grad_mid, scores, routing.owned, low_gate_up, low_down
        )
        grad_h = fused.sum_columns(grad_rows, places, None, low_gate_up)
        del grad_rows
    del grad_activated
    if weights.down_bias is not None:
        grad_scores += (grad @ weights.down_bias.T).gather(1, routing.of_tokens)
    grad_x = kernels.weighted_sum(weights.gate_up.back(grad_gate_up, groups), places, None)
    if low_gate_up is not None and grad_h is not None:
        low_gate_up.write_a_gradient(grad_h, x)
        grad_x.addmm_(grad_h.flatten(1), low_gate_up.a)
    return grad_x, grad_scores


def chosen_softmax_backward(
    grad: torch.Tensor, scores: torch.Tensor, experts: torch.Tensor, count: int
) -> torch.Tensor:
    """The gradient of a router's logits [T, E] from that of `scores` [T, K], which are the softmax of the logits of
    each token's `experts` [T, K] alone, of `count`."""
    wide = scores.to(_wide(scores))
    # Rounded scores do not add up to 1: what all experts' gradients have in common would be left over.
    wide = wide / wide.sum(-1, keepdim=True)
    weighted = grad * wide
    of_chosen = weighted - weighted.sum(-1, keepdim=True) * wide
    return scores.new_zeros(len(scores), count).scatter_(1, experts, of_chosen.to(scores.dtype))


def _backward_between(
    grad_activated: torch.Tensor,
    grad_mid: torch.Tensor | None,
    shares: torch.Tensor,
    routing: Routing,
    weights: ExpertWeights,
    kept: ExpertsKept,
    low_gate_up: LowRank | None,
    low_down: LowRank | None,
    kernels: Kernels,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """From the gradients of the activations by the frozen matrix [S, I] and of A of down [T, R] to those of `gate_up`,
    of `shares` [S] and of h [T, 2, R]. Writes those of the adapters that experts do not share."""
    groups = routing.groups
    if low_down is not None and grad_mid is not None:
        grad_mid = grad_mid[routing.tokens]
        groups.add_product(grad_activated, grad_mid, low_down.a)
    grad_gate_up, activated, grad_shares = weights.gating.backward(grad_activated, kept.gate_up, shares, kernels)
    if low_down is not None and grad_mid is not None:
        assert low_down.grad_a is not None
        groups.write_outer(grad_mid.mul_(shares[:, None]), activated, low_down.grad_a)
    del activated, grad_activated, grad_mid
    if low_gate_up is None:
        return grad_gate_up, grad_shares, None
    assert kept.h is not None, "kept or recomputed before the backward"
    h, halves = kept.h[routing.tokens], weights.gating.halves(grad_gate_up)
    grad_h = torch.empty_like(kept.h)
    for place, (b, half) in enumerate(zip(low_gate_up.b, halves, strict=True)):
        grad_h[:, place] = kernels.weighted_sum(groups.multiply(half, b), routing.places, None)
        groups.write_outer(half, h[:, place].contiguous(), low_gate_up.grad_b[place])
    return grad_gate_up, grad_shares, low_gate_up.masked(grad_h)


def _fused(weights: ExpertWeights, low_rank: LowRank | None, kernels: Kernels) -> "TritonExperts | None":
    """The kernels that compute what lies between the products with the frozen matrices, if they can."""
    if kernels.experts is None or low_rank is None or weights.gating is not SILU:
        return None
    return kernels.experts if low_rank.owners.widest <= kernels.experts.most_rank else None


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
