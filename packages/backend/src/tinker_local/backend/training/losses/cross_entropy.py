"""Cross-entropy with a weight for each target; weights are any real numbers."""

from typing import Any

from tinker_local.backend.training.losses.loss import Array, Inputs, Loss, Settings, Terms


def terms(xp: Any, logprobs: Array, inputs: Inputs, settings: Settings) -> Terms:
    """-w l."""
    weights = inputs["weights"]
    return Terms(-weights * logprobs, -weights)


CROSS_ENTROPY = Loss(
    "cross_entropy",
    formula="-Σ w l",
    source="/tinker/losses/cross-entropy",
    terms=terms,
    inputs=("weights",),
    mask_inputs=("weights",),
    optional={"weights": 1.0},
    candidates=True,
    elementwise=True,
)
