"""REINFORCE with an importance ratio, which is not bounded."""

from typing import Any

from tinker_local.backend.training.losses.loss import Array, Inputs, Loss, Settings, Terms


def terms(xp: Any, logprobs: Array, inputs: Inputs, settings: Settings) -> Terms:
    """-r A."""
    weighted = -xp.exp(logprobs - inputs["logprobs"]) * inputs["advantages"]
    return Terms(weighted, weighted)


IMPORTANCE_SAMPLING = Loss(
    "importance_sampling",
    formula="-Σ r A",
    source="/tinker/losses/importance-sampling",
    terms=terms,
    inputs=("logprobs", "advantages"),
    mask_inputs=("advantages",),
)
