"""The losses as pure functions of tensors: each position's share of a loss that is their plain sum.

Notation: l = log p(target) under the learner, q = the `logprobs` that the data came with (the sampler's),
A = `advantages`, w = `weights`, r = exp(l - q). All tensors are flat, of one shape [M] and one float dtype; M runs over
positions (times candidates). No mean, no clamp of l - q, no repair of NaN.

A position that is switched off (w or A exactly 0; `dro`: A and q) adds exactly 0 to the loss and to its gradient,
whatever else is there: such positions are taken out *before* exp, because 0 * inf would be NaN in the gradient.

What the positions of a datum share is computed from the whole datum, once and without a gradient (`with_shared`); with
that each position's loss depends on its own l alone, so that they may be computed in any portions.

Sources: /tinker/losses pages of the official documentation; PPO arXiv 1707.06347; CISPO arXiv 2506.13585; DRO arXiv
2405.19107 and 2501.12599; GSPO arXiv 2507.18071. The decisions about what these leave open are in docs/losses.md.
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
    log_ratio = logprobs - inputs["logprobs"]
    return _clipped_surrogate(log_ratio, inputs["advantages"], config)


def cispo(logprobs: torch.Tensor, inputs: Tensors, config: Mapping[str, float]) -> torch.Tensor:
    """-sg(clip(r, low, high)) l A, [M]; the clipped ratio is a constant, so no position loses its gradient."""
    advantages = inputs["advantages"]
    clipped = _clip(_ratio(logprobs.detach(), inputs), config)
    return -clipped * _where_active(advantages, logprobs) * advantages


def dro(logprobs: torch.Tensor, inputs: Tensors, config: Mapping[str, float]) -> torch.Tensor:
    """-(l A - beta/2 (l - q)^2), [M]. The penalty holds where A is 0, too, unless q is 0 as well: so prompts are sent,
    and they are not to be learnt by heart."""
    sampled, advantages = inputs["logprobs"], inputs["advantages"]
    logprobs = torch.where((advantages != 0) | (sampled != 0), logprobs, 0.0)
    return 0.5 * config["beta"] * (logprobs - sampled) ** 2 - logprobs * advantages


def gspo(logprobs: torch.Tensor, inputs: Tensors, config: Mapping[str, float]) -> torch.Tensor:
    """-min(s A, clip(s, low, high) A), [M] (GSPO-token, equation 13): s has the value of the sequence's ratio, whose
    logarithm is `inputs["sequence_log_ratio"]`, and the gradient of the position's own l."""
    advantages = inputs["advantages"]
    own = _where_active(advantages, logprobs)
    return _clipped_surrogate(inputs["sequence_log_ratio"] + (own - own.detach()), advantages, config)


LOSSES: Mapping[str, Loss] = {
    "cross_entropy": cross_entropy,
    "importance_sampling": importance_sampling,
    "ppo": ppo,
    "cispo": cispo,
    "dro": dro,
    "gspo": gspo,
}
"""By the names of `loss_specs.LOSS_SPECS`."""


def sequence_log_ratio(logprobs: torch.Tensor, inputs: Tensors, datum_of: torch.Tensor) -> torch.Tensor:
    """The mean of l - q over those positions of each datum where `sequence_ratio_mask` is not 0, at each of its
    positions, [M]; 0 for a datum without such positions."""
    marked = inputs["sequence_ratio_mask"] != 0
    # In float64, because the thresholds are nearer to 1 than what float32 sums of thousands of positions are off.
    log_ratio = torch.where(marked, logprobs.detach() - inputs["logprobs"], 0.0).double()
    empty = torch.zeros_like(log_ratio)  # there are no more data than positions
    sums = empty.index_add(0, datum_of, log_ratio)
    counts = empty.index_add(0, datum_of, marked.double())
    return (sums / counts.clamp(min=1))[datum_of].to(logprobs.dtype)


def with_shared(loss_fn: str, logprobs: torch.Tensor, inputs: Tensors, datum_of: torch.Tensor) -> Tensors:
    """`inputs` of whole data and what the positions of each datum share, all [M].

    `datum_of` int64 [M], ascending from 0: which datum each position is of. Of `logprobs` only those at the positions
    that the loss shares need to be known (`LossSpec.shares`).
    """
    if loss_fn == "gspo":
        return {**inputs, "sequence_log_ratio": sequence_log_ratio(logprobs, inputs, datum_of)}
    return inputs


def loss_and_derivative(
    loss_fn: str, logprobs: torch.Tensor, inputs: Tensors, config: Mapping[str, float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each position's loss and the derivative of their sum by `logprobs`, both [M] and without a graph. `inputs` as
    `with_shared` gives them."""
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


def _clipped_surrogate(log_ratio: torch.Tensor, advantages: torch.Tensor, config: Mapping[str, float]) -> torch.Tensor:
    """-min(r A, clip(r, low, high) A) (PPO, equation 7); the smaller term alone has a gradient."""
    log_ratio = _where_active(advantages, log_ratio)
    with torch.no_grad():
        ratio = torch.exp(log_ratio)
        bound = _clip(ratio, config) * advantages
        free = ratio * advantages <= bound
    # A second exp, only of what is not clipped: the gradient of an overflowed ratio would be 0 * inf = NaN.
    log_ratio = torch.where(free, log_ratio, 0.0)
    return -torch.where(free, torch.exp(log_ratio) * advantages, bound)


def _clip(ratio: torch.Tensor, config: Mapping[str, float]) -> torch.Tensor:
    return ratio.clamp(config["clip_low_threshold"], config["clip_high_threshold"])
