"""GSPO-token: PPO's surrogate with one ratio for all positions of a datum (arXiv 2507.18071, equation 13)."""

from typing import Any

from tinker_local.backend.training.losses.loss import Array, DatumSum, Inputs, Loss, Settings, Terms
from tinker_local.backend.training.losses.ppo import check_thresholds, clipped_surrogate


def mean_log_ratio(xp: Any, logprobs: Array, inputs: Inputs, mask: str, datum_sum: DatumSum) -> Array:
    """The mean of l - q over those positions of each datum where the input `mask` is not 0; 0 for a datum without such
    positions. The sums are in float64: in float32, over thousands of positions, they would be off by more than the
    thresholds are from 1."""
    marked = inputs[mask] != 0
    total = datum_sum(xp.where(marked, logprobs - inputs["logprobs"], 0.0))
    return total / xp.clip(datum_sum(marked), 1, None)


def sequence_log_ratio(xp: Any, logprobs: Array, inputs: Inputs, datum_sum: DatumSum) -> Inputs:
    """The mean of l - q where `sequence_ratio_mask` is not 0."""
    return {"sequence_log_ratio": mean_log_ratio(xp, logprobs, inputs, "sequence_ratio_mask", datum_sum)}


def terms(xp: Any, logprobs: Array, inputs: Inputs, settings: Settings) -> Terms:
    """-min(s A, clip(s, low, high) A), where s has the value of the sequence's ratio and the gradient of the position's
    own l."""
    return clipped_surrogate(xp, xp.exp(inputs["sequence_log_ratio"]), inputs["advantages"], settings)


GSPO = Loss(
    "gspo",
    formula=(
        "-Σ min(s A, clip(s, low, high) A), s = sg(exp(mean over M of (l - q))) · exp(l - sg(l)); "
        "M: positions of the datum where `sequence_ratio_mask` is not 0"
    ),
    source="/tinker/losses/gspo, arXiv 2507.18071 equation 13 (GSPO-token)",
    terms=terms,
    inputs=("logprobs", "advantages", "sequence_ratio_mask"),
    mask_inputs=("advantages",),
    settings={"clip_low_threshold": 1 - 3e-4, "clip_high_threshold": 1 + 4e-4},  # section 5.1
    check=check_thresholds,
    per_datum_input="sequence_ratio_mask",
    by_spans="sequence_ratio_mask",
    per_datum=sequence_log_ratio,
)
