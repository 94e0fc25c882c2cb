"""PPO's clipped surrogate, and what other losses with thresholds share with it."""

from typing import Any

from tinker_local.backend.training.losses.loss import Array, Inputs, Loss, Settings, Terms
from tinker_local.types import InvalidRequestError


def terms(xp: Any, logprobs: Array, inputs: Inputs, settings: Settings) -> Terms:
    """-min(r A, clip(r, low, high) A)."""
    return clipped_surrogate(xp, xp.exp(logprobs - inputs["logprobs"]), inputs["advantages"], settings)


def clipped_surrogate(xp: Any, ratio: Array, advantages: Array, settings: Settings) -> Terms:
    """-min(r A, clip(r, low, high) A) for a ratio whose derivative by l is itself (PPO, equation 7); no gradient where
    the clipped term is strictly the smaller one."""
    free, bound = ratio * advantages, clip(xp, ratio, settings) * advantages
    return Terms(-xp.minimum(free, bound), xp.where(free <= bound, -free, 0.0))


def clip(xp: Any, ratio: Array, settings: Settings) -> Array:
    """The ratio between the thresholds, which bound the ratio itself; they are not epsilons. A threshold that the
    ratio's dtype cannot hold is its largest number: torch refuses to convert it."""
    largest = float(xp.finfo(ratio.dtype).max)
    return xp.clip(ratio, min(settings["clip_low_threshold"], largest), min(settings["clip_high_threshold"], largest))


def check_thresholds(settings: Settings) -> None:
    """InvalidRequestError if the thresholds are out of order."""
    low, high = settings["clip_low_threshold"], settings["clip_high_threshold"]
    if low > high:
        raise InvalidRequestError(f"loss_fn_config: clip_low_threshold {low} is above clip_high_threshold {high}")


PPO = Loss(
    "ppo",
    formula="-Σ min(r A, clip(r, low, high) A)",
    source="/tinker/losses/ppo, arXiv 1707.06347",
    terms=terms,
    inputs=("logprobs", "advantages"),
    mask_inputs=("advantages",),
    settings={"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    check=check_thresholds,
)
