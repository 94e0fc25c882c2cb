"""The operations of a decoder besides matmuls, forward and backward: in plain torch, or in Triton on CUDA.

Legend: T tokens, H hidden size, D head size, N query heads, M key-value heads, I intermediate size.

Both match transformers' modules: norms are computed in float32 (float64 stays) and rounded before the weight is
applied. Plain torch rounds every step to the dtype of the activations, as transformers does; the Triton kernels round
once, at the end.
"""

from typing import TYPE_CHECKING, Literal, Protocol, get_args

import torch

if TYPE_CHECKING:
    from tinker_local.backend.training.kernels.triton_experts import TritonExperts


Activation = Literal["silu", "gelu_tanh"]
"""Of the gate of an MLP: x sigmoid(x), or GELU by tanh (arXiv 1606.08415)."""


ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)


class Kernels(Protocol):
    """Operations on rows of activations of one dtype.

    Tensors are contiguous, except that rows may be strided where a method says so. Methods keep nothing between calls
    and do not change their inputs unless they say so.
    """

    @property
    def experts(self) -> "TritonExperts | None":
        """Fused passes over the rows of routed experts with SwiGLU and adapters; None: `experts.py` does without."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        """x / rms(x) * weight, [T, H] (arXiv 1910.07467). `weight` may be float32 where x is not."""

    def rms_norm_backward(
        self, grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, epsilon: float, residual: torch.Tensor | None
    ) -> torch.Tensor:
        """`residual` plus the gradient of x, [T, H]. With a residual, may overwrite `grad`."""

    def norm_rope(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        epsilon: float,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> torch.Tensor:
        """RMS norm per head (if `weight` [D] is given), then rotary positions (arXiv 2104.09864, in halves) of the
        first numbers of each head.

        x [T, N, D], rows and heads may be strided; cos, sin [T, rotary], rotary <= D -> [T, N, D].
        """

    def norm_rope_backward(
        self,
        grad: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        epsilon: float,
        cos: torch.Tensor,
        sin: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Write the gradient of x [T, N, D] to `out`, whose rows and heads may be strided."""

    def glu(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        """activation(gate) * up (arXiv 2002.05202). [T, 2 I], gate first -> [T, I]."""

    def glu_backward(
        self, grad: torch.Tensor, gate_up: torch.Tensor, activation: Activation
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The gradient of `gate_up` [T, 2 I], and the forward's output [T, I]. May overwrite both inputs."""

    def routed_swiglu_backward(
        self, grad: torch.Tensor, gate_up: torch.Tensor, shares: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`glu_backward`, with SiLU, of `shares` [T] times each row of the output, for its gradient `grad` [T, I]: the
        gradient of `gate_up`, the output without its share, and the gradient of `shares`, float32 (float64 stays). May
        overwrite `grad` and `gate_up`."""

    def weighted_sum(self, rows: torch.Tensor, places: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
        """The sum over k of `rows` [S, n] at `places` [T, K], times `weights` [T, K] if there are any. [T, n]."""

    def spread(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Each row of `x` [T, n] at all of its `places` [T, K], which are the numbers below S = T K: [S, n]. Rows of
        `x` may be strided."""

    def logsumexp(self, logits: torch.Tensor) -> torch.Tensor:
        """log sum exp of each row in float32 (float64 stays). [C, V] -> [C]."""

    def scaled_softmax(self, logits: torch.Tensor, logsumexp: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """scale[c] * softmax(row c), and exactly 0 where scale[c] is 0. Overwrites `logits` [C, V] and returns it."""


class TorchKernels:
    """Implements `Kernels` in plain torch, for any device and dtype."""

    experts = None

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        normalized = _normalized(x, epsilon)[0]
        return (weight * (normalized if weight.dtype == normalized.dtype else normalized.to(x.dtype))).to(x.dtype)

    def rms_norm_backward(
        self, grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, epsilon: float, residual: torch.Tensor | None
    ) -> torch.Tensor:
        found = _norm_backward(grad, x, weight, epsilon).to(x.dtype)
        return found if residual is None else residual + found

    def norm_rope(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        epsilon: float,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> torch.Tensor:
        y = x if weight is None else self.rms_norm(x, weight, epsilon)
        rotary, rest = y.split([cos.shape[-1], y.shape[-1] - cos.shape[-1]], dim=-1)
        # Angles of some families are in float32 in a model of 16 bits.
        turned = (rotary * cos[:, None] + _rotated(rotary) * sin[:, None]).to(x.dtype)
        return torch.cat([turned, rest], dim=-1)

    def norm_rope_backward(
        self,
        grad: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        epsilon: float,
        cos: torch.Tensor,
        sin: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        # The transposed rotation: minus the rotated half.
        rotary, rest = grad.split([cos.shape[-1], grad.shape[-1] - cos.shape[-1]], dim=-1)
        grad_y = torch.cat([rotary * cos[:, None] - _rotated(rotary * sin[:, None]), rest], dim=-1)
        out.copy_(grad_y if weight is None else _norm_backward(grad_y, x, weight, epsilon))

    def glu(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return activated(gate, activation) * up

    def glu_backward(
        self, grad: torch.Tensor, gate_up: torch.Tensor, activation: Activation
    ) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = gate_up.chunk(2, dim=-1)
        result = torch.empty_like(gate_up)
        grad_gate, grad_up = result.chunk(2, dim=-1)
        if activation == "silu":
            sigmoid = torch.sigmoid(gate)
            active = gate * sigmoid
            grad_gate.copy_(grad * up * (sigmoid + active * (1 - sigmoid)))
        else:
            active = activated(gate, activation)
            grad_gate.copy_(torch.ops.aten.gelu_backward(grad * up, gate, approximate="tanh"))
        grad_up.copy_(grad * active)
        return result, active * up

    def routed_swiglu_backward(
        self, grad: torch.Tensor, gate_up: torch.Tensor, shares: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        grad_shares = (grad * self.glu(gate_up, "silu")).sum(-1, dtype=_wide(grad))
        return *self.glu_backward(grad.mul_(shares[:, None]), gate_up, "silu"), grad_shares

    def weighted_sum(self, rows: torch.Tensor, places: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
        found = rows[places]
        if weights is None:
            return found.sum(1)
        # Routers of some families give float32.
        return (weights[:, None] @ found.to(weights.dtype))[:, 0].to(rows.dtype)

    def spread(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        found = x.new_empty(places.numel(), x.shape[1])
        found[places] = x[:, None]
        return found

    def logsumexp(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.to(_wide(logits)).logsumexp(-1)

    def scaled_softmax(self, logits: torch.Tensor, logsumexp: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        softmax = torch.exp(logits.to(logsumexp.dtype).sub_(logsumexp[:, None]))
        # Select instead of multiplying: 0 x inf is NaN, and a masked row must not poison others.
        return logits.copy_(torch.where(scale[:, None] != 0, softmax * scale[:, None], 0.0))


def activated(gate: torch.Tensor, activation: Activation) -> torch.Tensor:
    """In plain torch."""
    if activation == "silu":
        return torch.nn.functional.silu(gate)
    return torch.nn.functional.gelu(gate, approximate="tanh")


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _normalized(x: torch.Tensor, epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
    """x / rms(x) and 1 / rms(x) over the last dimension."""
    wide = x.to(_wide(x))
    inverse = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return wide * inverse, inverse


def _norm_backward(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """(g - x' mean(g x')) / rms with g = grad weight and x' = x / rms."""
    normalized, inverse = _normalized(x, epsilon)
    grad_normalized = (grad * weight).to(normalized.dtype)
    along = (grad_normalized * normalized).mean(-1, keepdim=True)
    return (grad_normalized - normalized * along) * inverse


def _rotated(x: torch.Tensor) -> torch.Tensor:
    """(-second half, first half) of the last dimension."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)
