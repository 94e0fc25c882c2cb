"""REINFORCE that stays stable when sampler and trainer differ, by what was recorded of the samples.

The hosted service's objective of this name is not public. This one is this project's, made of published parts:
importance weights that are constants and cut off above (truncated importance sampling: Ionides 2008; IMPALA, arXiv
1802.01561), whole sequences left out whose probability has drifted too far (the geometric mean of arXiv 2507.18071, as
a mask), and a pull towards the sampler: KL(sampler, trainer), by an estimator that is 0 wherever they agree (Schulman,
"Approximating KL Divergence", 2020).
"""

import math
from typing import Any

from tinker_local.backend.training.losses.gspo import mean_log_ratio
from tinker_local.backend.training.losses.loss import Array, DatumSum, Inputs, Loss, Settings, Terms
from tinker_local.types import InvalidRequestError

SAMPLED = "sampled"
"""The input that is 1 at positions whose targets were sampled, and 0 elsewhere; it comes from the records."""


def sequence_drift(xp: Any, logprobs: Array, inputs: Inputs, datum_sum: DatumSum) -> Inputs:
    """The mean of l - q over the sampled positions of each datum."""
    return {"drift": mean_log_ratio(xp, logprobs, inputs, SAMPLED, datum_sum)}


def terms(xp: Any, logprobs: Array, inputs: Inputs, settings: Settings) -> Terms:
    """-sg(m min(r, c)) A l + kl_coeff k. m is 1 if the size of the datum's mean of l - q is at most
    log(max_sequence_ratio), else 0; c is `max_ratio`. k is r - 1 - log r up to r = c, and its tangent beyond, so that
    its derivative by l is min(r, c) - 1."""
    longest = math.log(settings["max_ratio"])
    log_ratio = logprobs - inputs["logprobs"]
    weight = xp.exp(xp.clip(log_ratio, None, longest))
    kept = xp.where(xp.absolute(inputs["drift"]) <= math.log(settings["max_sequence_ratio"]), weight, 0.0)
    tangent = (settings["max_ratio"] - 1) * xp.clip(log_ratio - longest, 0.0, None)
    penalty = weight - 1 - xp.clip(log_ratio, None, longest) + tangent
    scale, advantages = settings["kl_coeff"], inputs["advantages"]
    return Terms(
        -kept * advantages * logprobs + scale * penalty,
        -kept * advantages + scale * (weight - 1),
    )


def check_ratios(settings: Settings) -> None:
    """InvalidRequestError if a limit of ratios is below 1."""
    for name in ("max_ratio", "max_sequence_ratio"):
        if settings[name] < 1:
            raise InvalidRequestError(f"loss_fn_config.{name}: must be at least 1, not {settings[name]}")


STABLE_REINFORCE = Loss(
    "stable_reinforce",
    formula=(
        "Σ (-sg(m min(r, c)) A l + κ k), c: `max_ratio`, κ: `kl_coeff`; m: 1 if exp(abs(mean of l - q over the datum's "
        "sampled positions)) ≤ `max_sequence_ratio`, else 0; k: r - 1 - log r up to r = c, and its tangent beyond"
    ),
    source="this project's definition: the hosted service's is not public",
    terms=terms,
    inputs=("logprobs", "advantages", SAMPLED),
    mask_inputs=(SAMPLED,),
    settings={"kl_coeff": 0.01, "max_ratio": 2.0, "max_sequence_ratio": 2.0},
    check=check_ratios,
    per_datum_input=SAMPLED,
    per_datum=sequence_drift,
    recorded=SAMPLED,
    own_definition=True,
)
