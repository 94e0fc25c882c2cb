"""DRO: the advantage, and a quadratic penalty for leaving the sampler's policy.

The penalty also holds where A is 0, unless q is 0 too: prompts arrive with A = q = 0 and must not be memorised.
"""

from typing import Any

from tinker_local.backend.training.losses.loss import Array, Inputs, Loss, Settings, Terms


def terms(xp: Any, logprobs: Array, inputs: Inputs, settings: Settings) -> Terms:
    """-(l A - beta/2 (l - q)^2)."""
    beta, advantages, log_ratio = settings["beta"], inputs["advantages"], logprobs - inputs["logprobs"]
    return Terms(0.5 * beta * log_ratio**2 - logprobs * advantages, beta * log_ratio - advantages)


DRO = Loss(
    "dro",
    formula="-Σ (l A - β/2 (l - q)²)",
    source="/tinker/losses/dro, arXiv 2405.19107, 2501.12599",
    terms=terms,
    inputs=("logprobs", "advantages"),
    mask_inputs=("advantages", "logprobs"),
    settings={"beta": 0.05},  # the documentation's example, the only public number
)
