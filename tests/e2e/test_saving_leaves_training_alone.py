"""Promise 16: saving a version and sampling from it, old or new, changes nothing of the training that goes on."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from tinker_local.types import AdamParams, Datum, LoraConfig, ModelInput, SamplingParams

ON_GPU = torch.cuda.is_available()
"""There the engines run in bfloat16, whose sums depend on what else is in a batch."""

PARAMS = AdamParams(learning_rate=0.02, eps=1e-8, weight_decay=0.01)
PROMPT = ModelInput.from_ints([5, 9, 20, 31])
DATA = [
    Datum(model_input=ModelInput.from_ints(tokens[:-1]), loss_fn_inputs={"target_tokens": tokens[1:]})
    for tokens in ([5, 9, 20, 31, 7, 80, 2], [40, 41, 42, 43])
]


def train(driver: Any, *, save_in_between: bool) -> tuple[list[float], list[Any]]:
    """Losses of four steps; with saves between gradient and step, and samples from every version so far."""
    model = driver.create("tiny/text", LoraConfig(rank=4, seed=7))
    losses, versions = [], []
    for _ in range(4):
        losses.append(driver.gradient(model, DATA, "cross_entropy")[1])
        if save_in_between:
            sampler = driver.sampler(model)
            versions.append((sampler, driver.score(sampler, PROMPT)[1:]))
            for old, score in versions:
                driver.sample(old, PROMPT, 2, SamplingParams(max_tokens=2))
                np.testing.assert_allclose(driver.score(old, PROMPT)[1:], score, atol=0.1 if ON_GPU else 1e-5)
        driver.step(model, PARAMS)
    return losses, [score for _, score in versions]


@pytest.mark.rotated(2)
@pytest.mark.mutation(
    "saving-replaces-the-adapter",
    "SaveWeightsForSampler.save.run.capture",
    "dtype=dtype)\n",
    "dtype=dtype)\n                trainer.load_adapter(model.model_id, state)\n",
)
def test_saves_and_samples_between_gradient_and_step_change_no_loss(real_in_process: Any) -> None:
    plain, _ = train(real_in_process, save_in_between=False)
    disturbed, scores = train(real_in_process, save_in_between=True)
    np.testing.assert_allclose(disturbed, plain, rtol=1e-2 if ON_GPU else 1e-6)
    assert plain[-1] < plain[0]
    # Each version has different weights, so an old one that gave newer weights would have been seen.
    assert all(np.abs(one - next_).max() > 1e-3 for one, next_ in pairwise(scores))
