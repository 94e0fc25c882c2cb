"""CISPO: the clipped ratio is a constant, so no position loses its gradient."""

from typing import Any

from tinker_local.backend.training.losses.loss import Array, Inputs, Loss, Settings, Terms
from tinker_local.backend.training.losses.ppo import check_thresholds, clip


def terms(xp: Any, logprobs: Array, inputs: Inputs, settings: Settings) -> Terms:
    """-sg(clip(r, low, high)) l A."""
    clipped, advantages = clip(xp, xp.exp(logprobs - inputs["logprobs"]), settings), inputs["advantages"]
    return Terms(-clipped * logprobs * advantages, -clipped * advantages)


CISPO = Loss(
    "cispo",
    formula="-Σ sg(clip(r, low, high)) l A",
    source="/tinker/losses/cispo, arXiv 2506.13585",
    terms=terms,
    inputs=("logprobs", "advantages"),
    mask_inputs=("advantages",),
    settings={"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
    check=check_thresholds,
)
