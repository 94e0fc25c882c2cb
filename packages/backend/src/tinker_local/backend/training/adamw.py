"""AdamW on flat tensors, with the settings of each step. Knows nothing of adapters or models."""

import math
from dataclasses import dataclass

import torch
from tinker_local.types import AdamParams, InvalidRequestError


@dataclass(slots=True, eq=False)
class AdamState:
    """Moments of one flat parameter vector of n values: `exp_avg` and `exp_avg_sq` [n]; `step` counts the updates."""

    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    step: int = 0


def new_adam_state(weights: torch.Tensor) -> AdamState:
    """Cold moments for `weights`."""
    return AdamState(torch.zeros_like(weights), torch.zeros_like(weights))


def gradient_norm(gradient: torch.Tensor) -> float:
    """Euclidean norm, added up in float64 so that large finite gradients have a finite norm."""
    return float(torch.linalg.vector_norm(gradient, dtype=torch.float64))


@torch.no_grad()
def adamw_step(
    weights: torch.Tensor, gradient: torch.Tensor, state: AdamState, params: AdamParams, norm: float
) -> None:
    """One update of `weights` and `state` in place, as torch.optim.AdamW does it (arXiv 1711.05101, algorithm 2).

    Clip g to the norm `grad_clip_norm` (0: off; `norm` is g's, over all trainable tensors), decay
    w <- w (1 - lr wd), then m <- b1 m + (1 - b1) g, v <- b2 v + (1 - b2) g^2 and
    w <- w - lr m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps), t counted from 1. Moments from steps with other
    settings go on as they are. `gradient` is not changed. Raises InvalidRequestError, with nothing changed, for a
    learning rate that no float holds; without memory, too, nothing is changed.
    """
    step = state.step + 1
    size = params.learning_rate / (1 - params.beta1**step)
    decay = 1 - params.learning_rate * params.weight_decay
    if max(size, abs(decay)) > torch.finfo(weights.dtype).max:
        raise InvalidRequestError(
            f"adam_params: learning_rate {params.learning_rate} with weight_decay {params.weight_decay} overflows"
        )
    if 0 < params.grad_clip_norm < norm:
        gradient = gradient * (params.grad_clip_norm / norm)
    denominator = torch.empty_like(weights)  # the last memory that is asked for: if it lacks, nothing has changed
    state.step = step
    weights.mul_(decay)
    state.exp_avg.lerp_(gradient, 1 - params.beta1)
    state.exp_avg_sq.mul_(params.beta2).addcmul_(gradient, gradient, value=1 - params.beta2)
    torch.sqrt(state.exp_avg_sq, out=denominator).div_(math.sqrt(1 - params.beta2**step)).add_(params.eps)
    weights.addcdiv_(state.exp_avg, denominator, value=-size)
