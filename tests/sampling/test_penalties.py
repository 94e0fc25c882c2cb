"""Penalties in vLLM: logits are lowered by what was sampled before, whichever requests share the step."""

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
from tinker_local.backend.sampling.sampler import Penalties, SampleWork
from tinker_local.backend.vllm_engine.draw_tokens import lower
from tinker_local.types import SamplingParams

from tests.sampling.sampling_answers import TEXT

EACH = (None, Penalties(presence=1.5), Penalties(frequency=2.0), Penalties(-0.5, -0.25))


def after_penalties(logits: torch.Tensor, tokens: Any, penalties: Penalties | None) -> torch.Tensor:
    """`logits` [N, V] before each of `tokens` [N], lowered as OpenAI's reference says: presence once, frequency for
    each time."""
    given, result = penalties or Penalties(), logits.clone()
    for row in range(len(tokens)):
        for token in tokens[:row].tolist():
            result[row, token] -= given.frequency
        for token in {*tokens[:row].tolist()}:
            result[row, token] -= given.presence
    return result


@pytest.mark.parametrize("temperature", [0.0, 0.8])
async def test_logprobs_are_of_the_logits_after_penalties(vl: Any, temperature: float) -> None:
    """The prompt's tokens do not count. Random weights repeat themselves, so that greedy samples differ."""
    prompt = vl.prompt(TEXT)
    params = SamplingParams(max_tokens=24, temperature=temperature, stop=(), seed=4)
    works = [SampleWork(prompt, None, params, penalties=each, topk_sample_logprobs=3) for each in EACH]
    outputs = await asyncio.gather(*(vl.sampler.sample(work) for work in works))
    sampled = []
    for work, output in zip(works, outputs, strict=True):
        (sequence,) = output.sequences
        tokens = torch.from_numpy(sequence.tokens.astype("int64"))
        logits = vl.hf.logits(prompt, tokens.tolist())[prompt.length - 1 : -1]
        expected = (after_penalties(logits, tokens, work.penalties) / (temperature or 1.0)).log_softmax(-1)
        scale = 1 / (temperature or 1.0)
        vl.same(sequence.logprobs, expected.gather(1, tokens[:, None])[:, 0].numpy(), scale)
        vl.same(sequence.topk_logprobs.logprobs, expected.topk(3).values.numpy(), scale)
        sampled.append(tuple(tokens.tolist()))
        if not temperature:
            vl.same(sequence.logprobs, expected.max(-1).values.numpy())
    if not temperature:
        assert len({*sampled[:3]}) == 3


def test_what_is_not_sampled_keeps_its_logit() -> None:
    """With tokens that are not known yet (-1), rows without penalties, and a row that has sampled nothing."""
    logits = torch.arange(15, dtype=torch.float32).reshape(3, 5)
    lowered = logits.clone()
    lower(lowered, np.float32([0, 0.5, 0.5]), np.float32([0, 0.25, 1]), [[1, 1], [3, 3, 0, -1], [-1]])
    expected = logits.clone()
    expected[1, 3] -= 1.0
    expected[1, 0] -= 0.75
    assert torch.equal(lowered, expected)
    lower(lowered, np.zeros(3, np.float32), np.zeros(3, np.float32), [[1], [2], [3]])
    assert torch.equal(lowered, expected)


async def test_penalties_of_a_stream_are_those_of_a_whole_answer(vl: Any) -> None:
    drawn: list[int] = []
    params = SamplingParams(max_tokens=24, temperature=0.0, stop=())
    prompt, penalties = vl.prompt(TEXT), Penalties(0.5, 1.0)
    whole, _ = await asyncio.gather(
        vl.sampler.sample(SampleWork(prompt, None, params, penalties=penalties)),
        vl.sampler.sample(
            SampleWork(prompt, None, params, penalties=penalties, drawn=lambda tokens: drawn.extend(tokens.tokens))
        ),
    )
    assert drawn == whole.sequences[0].tokens.tolist()
