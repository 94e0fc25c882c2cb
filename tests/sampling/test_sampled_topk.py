"""The likeliest tokens beside each sampled one are those of softmax(logits / T), whichever requests share the step."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from tinker_local.backend.sampling.sampler import SampleWork
from tinker_local.types import SamplingParams

from tests.sampling.sampling_answers import (
    TEXT,
    ask,
    same_sampled_topk,
)


@pytest.mark.mutation(
    "topk-of-the-wrong-requests", "Likeliest.of", "rows, k = list(widths)", "rows, k = list(range(len(widths)))"
)
async def test_sampled_topk_of_requests_that_share_steps_agree_with_hf(vl: Any, noise: Callable[..., Any]) -> None:
    """Some ask for none, others for few or the whole vocabulary; greedy, random, cut and at low temperature, where
    probabilities underflow."""
    prompts = [vl.prompt(TEXT), vl.prompt([5], noise(70, 70), [6, 7])]
    settings: list[dict[str, Any]] = [
        {},
        {"temperature": 0.0},
        {"temperature": 0.02, "top_k": 3},
        {"temperature": 2.0, "top_p": 0.3},
    ]
    works = [
        SampleWork(
            prompt, None, SamplingParams(max_tokens=5, stop=(), **setting), num_samples=2, topk_sample_logprobs=k
        )
        for prompt in prompts
        for setting in settings
        for k in (0, 1, 20, 400)
    ]
    outputs = await asyncio.gather(*(vl.sampler.sample(work) for work in works))
    for work, output in zip(works, outputs, strict=True):
        for sequence in output.sequences:
            if work.topk_sample_logprobs:
                same_sampled_topk(vl, work.prompt, sequence, work.params.temperature, work.topk_sample_logprobs)
            else:
                assert sequence.topk_logprobs is None
                expected = vl.hf.logprobs(work.prompt, sequence.tokens, work.params.temperature or 1.0)
                vl.same(sequence.logprobs, expected, 1 / (work.params.temperature or 1.0))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_sampled_topk_of_a_request_alone_agrees_with_hf(text: Any, temperature: float) -> None:
    prompt = text.prompt(TEXT)
    params = SamplingParams(max_tokens=6, temperature=temperature, stop=())
    (sequence,) = (await ask(text, prompt, params=params, topk_sample_logprobs=3)).sequences
    same_sampled_topk(text, prompt, sequence, temperature, 3)
