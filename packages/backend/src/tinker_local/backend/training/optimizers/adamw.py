"""AdamW: decoupled weight decay, with the settings of each step (arXiv 1711.05101, algorithm 2)."""

import math
from collections.abc import Mapping
from typing import Any

from tinker_local.backend.adapters.adapter import WEIGHTS_VECTOR
from tinker_local.backend.training.optimizers.optimizer import Array, Limits, Optimizer, OptimizerState, Span
from tinker_local.types import AdamParams, InvalidRequestError


def update(xp: Any, weights: Array, gradient: Array, state: OptimizerState, settings: AdamParams, norm: float) -> None:
    """One update as torch.optim.AdamW computes it.

    Clip g to the norm `grad_clip_norm` (0: off), decay w <- w (1 - lr wd), then m <- b1 m + (1 - b1) g,
    v <- b2 v + (1 - b2) g^2 and w <- w - lr m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps), t counted from 1. Moments
    m and v carry over unchanged when the settings change.
    """
    step = state.step + 1
    size = settings.learning_rate / (1 - settings.beta1**step)
    decay = 1 - settings.learning_rate * settings.weight_decay
    if max(size, abs(decay)) > xp.finfo(weights.dtype).max:
        raise InvalidRequestError(
            f"adam_params: learning_rate {settings.learning_rate} with weight_decay {settings.weight_decay} overflows; "
            "the step was not taken and the gradient was discarded"
        )
    if 0 < settings.grad_clip_norm < norm:
        gradient = gradient * (settings.grad_clip_norm / norm)
    m, v = state.tensors["exp_avg"], state.tensors["exp_avg_sq"]
    if getattr(weights, "is_cuda", False):
        in_one_pass(weights, gradient, m, v, step, settings)
        state.step = step
        return
    denominator = xp.empty_like(weights)  # the last allocation: if memory runs out, nothing has changed
    state.step = step
    weights *= decay
    xp.lerp(m, gradient, 1 - settings.beta1, out=m)
    v *= settings.beta2
    xp.addcmul(v, gradient, gradient, value=1 - settings.beta2, out=v)
    xp.sqrt(v, out=denominator)
    denominator /= math.sqrt(1 - settings.beta2**step)
    denominator += settings.eps
    xp.addcdiv(weights, m, denominator, value=-size, out=weights)


def in_one_pass(weights: Array, gradient: Array, m: Array, v: Array, step: int, settings: AdamParams) -> None:
    """The same, with torch's kernel, which reads and writes each tensor once: a third of the memory traffic. An adapter
    of a mixture of experts has hundreds of millions of numbers."""
    import torch

    torch._fused_adamw_(
        [weights], [gradient], [m], [v], [], [torch.full((), step, dtype=torch.float32, device=weights.device)],
        lr=settings.learning_rate, beta1=settings.beta1, beta2=settings.beta2, weight_decay=settings.weight_decay,
        eps=settings.eps, amsgrad=False, maximize=False,
    )  # fmt: skip


_SMALLEST_EPS = 1e-37
"""Smaller ones may be 0 in float32."""

_SPARE = 2.0**-10
"""The share of a limit that a bound may reach: far more than rounding moves."""


def surely_stays_within(
    limits: Limits, settings: AdamParams, step: int, norm: float, spans: Mapping[str, Span]
) -> bool:
    """By |g| <= norm, and |m| / (sqrt(v) + eps) <= |m| / eps. Steps of usual sizes are far below."""
    if settings.eps < _SMALLEST_EPS:
        return False
    largest = {name: max(-low, high) for name, (low, high) in spans.items()}
    m = largest["exp_avg"] + norm
    v = largest["exp_avg_sq"] + norm * norm
    size = settings.learning_rate / (1 - settings.beta1 ** (step + 1))
    decay = abs(1 - settings.learning_rate * settings.weight_decay)
    weights = largest[WEIGHTS_VECTOR] * max(1.0, decay) + m * size / settings.eps
    at_most = _SPARE * limits.state
    return spans["exp_avg_sq"][0] >= 0 and m < at_most and v < at_most and weights < _SPARE * limits.weights


ADAMW = Optimizer(
    "adamw",
    source="arXiv 1711.05101, algorithm 2",
    state_names=("exp_avg", "exp_avg_sq"),
    settings=AdamParams,
    update=update,
    surely_stays_within=surely_stays_within,
)
