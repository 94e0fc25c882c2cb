"""The losses that exist, by their `loss_fn`. One module each; docs/losses.md has what they leave open."""

from tinker_local.backend.training.losses.cispo import CISPO
from tinker_local.backend.training.losses.cross_entropy import CROSS_ENTROPY
from tinker_local.backend.training.losses.dro import DRO
from tinker_local.backend.training.losses.gspo import GSPO
from tinker_local.backend.training.losses.importance_sampling import IMPORTANCE_SAMPLING
from tinker_local.backend.training.losses.loss import Loss
from tinker_local.backend.training.losses.ppo import PPO
from tinker_local.backend.training.losses.stable_reinforce import STABLE_REINFORCE
from tinker_local.types import InvalidRequestError, UnsupportedError

LOSSES: dict[str, Loss] = {
    loss.name: loss for loss in (CROSS_ENTROPY, IMPORTANCE_SAMPLING, PPO, CISPO, DRO, GSPO, STABLE_REINFORCE)
}

NEAREST = {"custom": CROSS_ENTROPY.name}
"""Losses of the SDK that this server does not compute, and what comes closest."""


def loss_of(loss_fn: str) -> Loss:
    """The loss named `loss_fn`; the error for one that is not computed here names those that are."""
    known = ", ".join(LOSSES)
    if loss_fn in NEAREST:
        raise UnsupportedError(
            f"loss_fn: {loss_fn!r} is not supported by this server; forward_backward_custom with a Python function "
            f"works, it is sent as {NEAREST[loss_fn]!r}"
        )
    if loss_fn not in LOSSES:
        raise InvalidRequestError(f"loss_fn: unknown loss {loss_fn!r}; known are {known}")
    return LOSSES[loss_fn]
