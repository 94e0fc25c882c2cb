"""The losses as pure functions of tensors: each position's share of a loss that is their plain sum.

Notation: l = log p(target) under the learner, q = the `logprobs` that the data came with (the sampler's),
A = `advantages`, w = `weights`, r = exp(l - q). All tensors are flat, of one shape [M] and one float dtype; M runs over
positions (times candidates). No mean, no clamp of l - q, no repair of NaN.

A position whose coefficient (w or A) is exactly 0 adds exactly 0 to the loss and to its gradient, whatever l and q
are there: such positions are taken out *before* exp, because 0 * inf would be NaN in the gradient.

Sources: /tinker/losses pages of the official documentation; PPO arXiv 1707.06347; CISPO arXiv 2506.13585.
"""

from collections.abc import Callable, Mapping

import torch

Tensors = Mapping[str, torch.Tensor]
Loss = Callable[[torch.Tensor, Tensors, Mapping[str, float]], torch.Tensor]


def cross_entropy(logprobs: torch.Tensor, inputs: Tensors, config: Mapping[str, float]) -> torch.Tensor:
    """-w l, [M]. Weights are any real numbers."""
    weights = inputs["weights"]
    return -weights * _where_active(weights, logprobs)


def importance_sampling(logprobs: torch.Tensor, inputs: Tensors, config: Mapping[str, float]) -> torch.Tensor:
    """-r A, [M]; the gradient goes through r, which is not bounded."""
    advantages = inputs["advantages"]
    return -_ratio(logprobs, inputs) * advantages


def ppo(logprobs: torch.Tensor, inputs: Tensors, config: Mapping[str, float]) -> torch.Tensor:
    """-min(r A, clip(r, low, high) A), [M]; no gradient where the clipped term is strictly the smaller one."""
    advantages = inputs["advantages"]
    with torch.no_grad():
        ratio = _ratio(logprobs, inputs)
        bound = _clip(ratio, config) * advantages
        free = ratio * advantages <= bound
    # A second exp, only of what is not clipped: the gradient of an overflowed ratio would be 0 * inf = NaN.
    log_ratio = torch.where(free, logprobs - inputs["logprobs"], 0.0)
    log_ratio = _where_active(advantages, log_ratio)
    return -torch.where(free, torch.exp(log_ratio) * advantages, bound)


def cispo(logprobs: torch.Tensor, inputs: Tensors, config: Mapping[str, float]) -> torch.Tensor:
    """-sg(clip(r, low, high)) l A, [M]; the clipped ratio is a constant, so no position loses its gradient."""
    advantages = inputs["advantages"]
    clipped = _clip(_ratio(logprobs.detach(), inputs), config)
    return -clipped * _where_active(advantages, logprobs) * advantages


LOSSES: Mapping[str, Loss] = {
    "cross_entropy": cross_entropy,
    "importance_sampling": importance_sampling,
    "ppo": ppo,
    "cispo": cispo,
}
"""By the names of `loss_specs.LOSS_SPECS`."""


def loss_and_derivative(
    loss_fn: str, logprobs: torch.Tensor, inputs: Tensors, config: Mapping[str, float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each position's loss and the derivative of their sum by `logprobs`, both [M] and without a graph."""
    with torch.enable_grad():
        leaf = logprobs.detach().requires_grad_()
        values = LOSSES[loss_fn](leaf, inputs, config)
        (derivative,) = torch.autograd.grad(values.sum(), leaf)
    return values.detach(), derivative


def _where_active(coefficient: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return torch.where(coefficient != 0, values, 0.0)


def _ratio(logprobs: torch.Tensor, inputs: Tensors) -> torch.Tensor:
    """r where A is not 0, else 1."""
    return torch.exp(_where_active(inputs["advantages"], logprobs - inputs["logprobs"]))


def _clip(ratio: torch.Tensor, config: Mapping[str, float]) -> torch.Tensor:
    return ratio.clamp(config["clip_low_threshold"], config["clip_high_threshold"])
