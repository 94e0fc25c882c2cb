"""Promise 5: a temperature below 0.01, which vLLM would raise to 0.01, is the temperature that is sampled with."""

import asyncio
from typing import Any

import numpy as np
import pytest
from tinker_local.backend.sampling.sampler import SampleWork
from tinker_local.types import SamplingParams

RAISED = 0.01


@pytest.mark.parametrize("temperature", [0.002, 0.005])
async def test_close_calls_are_drawn_and_scored_at_the_temperature_asked_for(text: Any, temperature: float) -> None:
    """Of many prompts those whose two likeliest tokens are about T apart: elsewhere every small T gives log 1."""
    prompts = [text.prompt([first, second]) for first in range(20, 100) for second in (5, 60, 200)]
    best = [text.hf.logits(prompt)[-1].topk(2).values for prompt in prompts]
    gaps = np.array([float(first - second) for first, second in best])
    close = np.argsort(np.abs(gaps - 2 * temperature))[:5]
    assert gaps[close].max() < 6 * temperature
    params = SamplingParams(max_tokens=1, temperature=temperature, stop=())
    works = [SampleWork(prompts[at], None, params, num_samples=4) for at in close]
    far_apart = 0.0
    for work, output in zip(works, await asyncio.gather(*map(text.sampler.sample, works)), strict=True):
        for sequence in output.sequences:
            expected = text.hf.logprobs(work.prompt, sequence.tokens, temperature)
            text.same(sequence.logprobs, expected, 1 / temperature)
            raised = text.hf.logprobs(work.prompt, sequence.tokens, RAISED)
            far_apart = max(far_apart, float(np.abs(raised - expected).max()))
    assert far_apart > 0.1
