"""Losses of the fake trainer as pure functions of arrays: value and derivative by the logprobs.

Plain sums, no clamps. `logprobs`: float64 [N] or [N, K] of the targets under the model, q the sampler's, A the
advantages, r = exp(logprobs - q). A position whose coefficient is 0 adds exactly 0, whatever its other values.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from tinker_local.backend.fakes.model import Float64Array
from tinker_local.types import InvalidRequestError

CONFIG_DEFAULTS: dict[str, dict[str, float]] = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "cispo": {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
}
"""Known losses, their settings and defaults; thresholds bound the ratio r itself."""


@dataclass(frozen=True, slots=True, eq=False)
class LossTerms:
    """`values`: each position's share of the loss; `derivative`: of the loss by each logprob; both like logprobs."""

    values: Float64Array
    derivative: Float64Array


def coefficient_name(loss_fn: str) -> str:
    """The input that switches a position off where it is 0."""
    return "weights" if loss_fn == "cross_entropy" else "advantages"


def settings(loss_fn: str, given: Mapping[str, float]) -> dict[str, float]:
    """`given` over the defaults; InvalidRequestError for an unknown loss or setting, or bounds out of order."""
    if loss_fn not in CONFIG_DEFAULTS:
        raise InvalidRequestError(f"loss_fn: unknown loss {loss_fn!r}; known are {', '.join(CONFIG_DEFAULTS)}")
    defaults = CONFIG_DEFAULTS[loss_fn]
    for name, value in given.items():
        if name not in defaults:
            raise InvalidRequestError(f"loss_fn_config.{name}: {loss_fn} knows {list(defaults) or 'no settings'}")
        if not np.isfinite(value):
            raise InvalidRequestError(f"loss_fn_config.{name}: must be finite, not {value}")
    merged = {**defaults, **given}
    low, high = merged.get("clip_low_threshold", 0.0), merged.get("clip_high_threshold", 0.0)
    if low > high:
        raise InvalidRequestError(f"loss_fn_config: clip_low_threshold {low} is above clip_high_threshold {high}")
    return merged


def loss_terms(
    loss_fn: str, logprobs: Float64Array, inputs: Mapping[str, npt.NDArray[np.float32]], config: Mapping[str, float]
) -> LossTerms:
    """Cross-entropy: -w·l. Policy losses by the ratio r: see the functions below."""
    coefficient = inputs[coefficient_name(loss_fn)].astype(np.float64)
    active = coefficient != 0
    # Select before and after: an infinite ratio at a position that is switched off must not make 0 · inf = NaN.
    logprobs = np.where(active, logprobs, 0.0)
    if loss_fn == "cross_entropy":
        return LossTerms(-coefficient * logprobs, -coefficient)
    with np.errstate(over="ignore"):
        ratio = np.exp(logprobs - np.where(active, inputs["logprobs"].astype(np.float64), 0.0))
    if loss_fn == "importance_sampling":
        return LossTerms(-ratio * coefficient, -ratio * coefficient)
    clipped = np.clip(ratio, config["clip_low_threshold"], config["clip_high_threshold"])
    if loss_fn == "cispo":
        return LossTerms(-clipped * logprobs * coefficient, -clipped * coefficient)
    return _ppo(ratio, clipped, coefficient)


def _ppo(ratio: Float64Array, clipped: Float64Array, advantages: Float64Array) -> LossTerms:
    """-min(r·A, clip(r)·A), arXiv 1707.06347 equation 7; no gradient where the clipped term is the smaller one."""
    free, bound = ratio * advantages, clipped * advantages
    return LossTerms(-np.minimum(free, bound), np.where(free <= bound, -free, 0.0))
