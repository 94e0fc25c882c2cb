"""Losses of the fake trainer as pure functions of arrays: value and derivative by the logprobs.

Plain sums, no clamps. `logprobs`: float64 [N] or [N, K] of the targets under the model, q the sampler's, A the
advantages, r = exp(logprobs - q). A position that is switched off adds exactly 0, whatever its other values.
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
    "dro": {"beta": 0.05},
    "gspo": {"clip_low_threshold": 1 - 3e-4, "clip_high_threshold": 1 + 4e-4},
}
"""Known losses, their settings and defaults; thresholds bound the ratio r itself."""


@dataclass(frozen=True, slots=True, eq=False)
class LossTerms:
    """`values`: each position's share of the loss; `derivative`: of the loss by each logprob; both like logprobs."""

    values: Float64Array
    derivative: Float64Array


def input_names(loss_fn: str) -> tuple[str, ...]:
    """The inputs beside the targets."""
    if loss_fn == "cross_entropy":
        return ("weights",)
    return ("logprobs", "advantages", "sequence_ratio_mask") if loss_fn == "gspo" else ("logprobs", "advantages")


def active_positions(loss_fn: str, inputs: Mapping[str, npt.NDArray[np.float32]]) -> npt.NDArray[np.bool_]:
    """The positions that are not switched off."""
    switches = {"cross_entropy": ("weights",), "dro": ("advantages", "logprobs")}.get(loss_fn, ("advantages",))
    active = np.zeros(inputs[switches[0]].shape, np.bool_)
    for name in switches:
        active |= inputs[name] != 0
    return active


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
    """Of one datum. Cross-entropy: -w·l. Policy losses by the ratio r: see the functions below."""
    coefficient = inputs["weights" if loss_fn == "cross_entropy" else "advantages"].astype(np.float64)
    active = active_positions(loss_fn, inputs)
    if loss_fn == "gspo":
        return _gspo(logprobs, inputs, active, config)
    # Select before and after: an infinite ratio at a position that is switched off must not make 0 · inf = NaN.
    logprobs = np.where(active, logprobs, 0.0)
    if loss_fn == "cross_entropy":
        return LossTerms(-coefficient * logprobs, -coefficient)
    if loss_fn == "dro":
        off_policy = logprobs - np.where(active, inputs["logprobs"].astype(np.float64), 0.0)
        penalty = config["beta"] * off_policy
        return LossTerms(0.5 * penalty * off_policy - logprobs * coefficient, penalty - coefficient)
    with np.errstate(over="ignore"):
        ratio = np.exp(logprobs - np.where(active, inputs["logprobs"].astype(np.float64), 0.0))
    if loss_fn == "importance_sampling":
        return LossTerms(-ratio * coefficient, -ratio * coefficient)
    clipped = np.clip(ratio, config["clip_low_threshold"], config["clip_high_threshold"])
    if loss_fn == "cispo":
        return LossTerms(-clipped * logprobs * coefficient, -clipped * coefficient)
    return _ppo(ratio, clipped, coefficient)


def _gspo(
    logprobs: Float64Array,
    inputs: Mapping[str, npt.NDArray[np.float32]],
    active: npt.NDArray[np.bool_],
    config: Mapping[str, float],
) -> LossTerms:
    """As `_ppo`, with the ratio of the whole sequence at each position, arXiv 2507.18071 equation 13."""
    marked = inputs["sequence_ratio_mask"] != 0
    log_ratio = (logprobs[marked] - inputs["logprobs"][marked].astype(np.float64)).mean() if marked.any() else 0.0
    with np.errstate(over="ignore"):
        ratio = np.exp(np.where(active, log_ratio, 0.0))
    clipped = np.clip(ratio, config["clip_low_threshold"], config["clip_high_threshold"])
    return _ppo(ratio, clipped, inputs["advantages"].astype(np.float64))


def _ppo(ratio: Float64Array, clipped: Float64Array, advantages: Float64Array) -> LossTerms:
    """-min(r·A, clip(r)·A), arXiv 1707.06347 equation 7; no gradient where the clipped term is the smaller one."""
    free, bound = ratio * advantages, clipped * advantages
    return LossTerms(-np.minimum(free, bound), np.where(free <= bound, -free, 0.0))
