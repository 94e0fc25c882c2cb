"""The adapter that trainer and sampler are compared on at the start, on chosen targets, before any run trains them."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from tinker_local.backend.adapters.adapter import AdapterDType, AdapterState
from tinker_local.backend.adapters.adapter_tensors import in_float32
from tinker_local.backend.models.agreement import MEAN, moved_by_rounding, nudged_draws, trainer_draws, with_random_b
from tinker_local.backend.rendering.rendered_input import RenderedInput
from tinker_local.backend.training.trainer import Trainer
from tinker_local.types import LoraConfig

TARGETS = ("train_attn", "train_mlp", "train_unembed")
"""The fields of `LoraConfig` that every model has modules for; `train_vision` is the fourth."""

LARGEST_EFFECT = 3.0
"""Nats by which the adapter may change the logprobs: a model that computes little but noise rounds more than others."""

MOST_IN_32_BITS = 0.1
"""Nats; a larger tolerance is one of 16 bits."""

_ID = "checked-at-the-start"


def adapter_on(
    targets: Sequence[str], trainer: Trainer, probes: Sequence[RenderedInput], dtype: AdapterDType
) -> tuple[AdapterState, list[npt.NDArray[np.float32]], float]:
    """An adapter of rank 1 with random B on all modules of `targets`, as a version of `dtype`, with `trainer_draws` of
    `probes` under it, and by how many nats its logprobs differ from the base model's on average."""
    base = trainer.logprobs(None, *probes)
    trainer.create_adapter(_ID, LoraConfig(rank=1, seed=0, **flags_of(targets)))
    try:
        state = with_random_b(trainer.capture(_ID, optimizer=False))
        while True:
            trainer.load_adapter(_ID, state)
            logprobs = trainer.logprobs(_ID, *probes)
            effect = float(np.abs(logprobs - base).mean())
            if not effect > LARGEST_EFFECT:
                break
            state = _halved(state)
        draws = [logprobs, *nudged_draws(trainer, _ID, probes)]
        return trainer.capture(_ID, optimizer=False, dtype=dtype), draws, effect
    finally:
        trainer.remove_adapter(_ID)


def flags_of(targets: Sequence[str]) -> dict[str, bool]:
    """The fields of `LoraConfig` that say what is trained, of which `targets` are on."""
    return {target: target in targets for target in (*TARGETS, "train_vision")}


def whole(state: AdapterState) -> AdapterState:
    """`state` with its weights in float32, as a trainer loads them."""
    return replace(state, tensors={name: in_float32(matrix) for name, matrix in state.tensors.items()})


def _halved(state: AdapterState) -> AdapterState:
    """With half of B."""
    tensors = {
        name: matrix if ".lora_A." in name else np.asarray(matrix, np.float32) * np.float32(0.5)
        for name, matrix in state.tensors.items()
    }
    return replace(state, tensors=tensors)


def explained_by_rounding(state: AdapterState, trainer: Trainer, probes: Sequence[RenderedInput]) -> float:
    """The mean difference (nats) of the logprobs of `probes` up to which engines with the trained adapter `state` may
    differ by rounding alone: what is measured in the trainer, and less than half of what the adapter changes, since
    engines of which one leaves it out differ by all of that.

    Training makes some tokens very unlikely. Of a logprob of -17, 8 bits leave tenths.
    """
    trainer.load_adapter(_ID, whole(state))
    try:
        draws = trainer_draws(trainer, _ID, probes)
    finally:
        trainer.remove_adapter(_ID)
    effect = float(np.abs(draws[0] - trainer.logprobs(None, *probes)).mean())
    explained = min(MEAN * moved_by_rounding(probes, draws).mean, effect / 2)
    return explained if np.isfinite([explained, effect]).all() else 0.0


def logprobs_under(state: AdapterState, trainer: Trainer, probes: Sequence[RenderedInput]) -> npt.NDArray[np.float32]:
    """`Trainer.logprobs` of `probes` under the adapter `state`, which the trainer need not have."""
    trainer.load_adapter(_ID, whole(state))
    try:
        return trainer.logprobs(_ID, *probes)
    finally:
        trainer.remove_adapter(_ID)


def largest_difference(tolerance: float, effect: float) -> float:
    """The mean difference (nats) up to which a known family's engines may differ under an adapter that changes the
    logprobs by `effect`. `tolerance`: of this dtype. In 16 bits it is not known how much rounding an adapter of random
    numbers adds; but engines of which one leaves the adapter out differ by its effect."""
    return tolerance if tolerance <= MOST_IN_32_BITS else max(tolerance, effect / 2)
