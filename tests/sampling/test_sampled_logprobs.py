"""Logprobs of sampled tokens are log softmax(logits / T) over the whole vocabulary, whatever top_p and top_k."""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tinker_local.backend.sampling.sampler import SampleWork
from tinker_local.types import InvalidRequestError, SamplingParams

SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.5},
    {"temperature": 2.0},
    {"temperature": 0.5, "top_p": 0.3},
    {"temperature": 1.0, "top_k": 3},
    {"temperature": 2.0, "top_p": 0.6, "top_k": 20},
    {"temperature": 1.0, "top_p": 0.9, "seed": 3},
    {"temperature": 0.7, "top_k": 1},
    {"temperature": 5.0, "seed": -1},
]


async def test_a_batch_that_mixes_all_settings_agrees_with_hf(vl: Any, noise: Callable[..., Any]) -> None:
    prompts = [vl.prompt(list(range(30, 45))), vl.prompt([5], noise(70, 70), [6, 7])]
    works = [
        SampleWork(prompt, None, SamplingParams(max_tokens=12, stop=(), **settings))
        for settings in SETTINGS
        for prompt in prompts
    ]
    outputs = await asyncio.gather(*(vl.sampler.sample(work) for work in works))
    for work, output in zip(works, outputs, strict=True):
        (sequence,) = output.sequences
        expected = vl.hf.logprobs(work.prompt, sequence.tokens, work.params.temperature or 1.0)
        vl.same(sequence.logprobs, expected, 1 / (work.params.temperature or 1.0))


@pytest.mark.mutation(
    "logprobs-after-the-cut",
    "FullVocabularyDraw.__call__",
    "Probabilities(p_bv)\n",
    "Probabilities(logits_bv.softmax(-1))\n",
)
@pytest.mark.mutation(
    "logprobs-without-temperature",
    "FullVocabularyDraw.__call__",
    "logits_bv.div_(asked.temperature_b.where(samples_b, 1.0).unsqueeze(-1))",
    "pass",
)
@pytest.mark.parametrize("settings", SETTINGS)
async def test_each_setting_alone_agrees_with_hf(text: Any, settings: dict[str, Any]) -> None:
    prompt = text.prompt(list(range(30, 45)))
    params = SamplingParams(max_tokens=8, stop=(), **settings)
    (sequence,) = (await text.sampler.sample(SampleWork(prompt, None, params))).sequences
    expected = text.hf.logprobs(prompt, sequence.tokens, params.temperature or 1.0)
    text.same(sequence.logprobs, expected, 1 / (params.temperature or 1.0))


async def test_temperature_0_is_greedy_with_logprobs_of_temperature_1(text: Any) -> None:
    prompt = text.prompt(list(range(30, 45)))
    work = SampleWork(prompt, None, SamplingParams(max_tokens=10, temperature=0.0, stop=()), num_samples=2)
    first, second = (await text.sampler.sample(work)).sequences
    logits = text.hf.logits(prompt, first.tokens.tolist())[prompt.length - 1 : -1]
    assert np.array_equal(first.tokens, logits.argmax(-1).numpy())
    assert np.array_equal(first.tokens, second.tokens)


@pytest.mark.parametrize("temperature", [1e-5, 0.003, 0.009, 30.0])
async def test_temperatures_that_vllm_would_change_or_refuse_are_honoured(text: Any, temperature: float) -> None:
    prompt = text.prompt(list(range(30, 45)))
    params = SamplingParams(max_tokens=6, temperature=temperature, stop=())
    (sequence,) = (await text.sampler.sample(SampleWork(prompt, None, params))).sequences
    expected = text.hf.logprobs(prompt, sequence.tokens, temperature)
    # logits / T are that much larger, and so is what float32 rounds.
    text.same(sequence.logprobs, expected, 1 / temperature)


async def test_a_temperature_that_cannot_be_honoured_is_refused_by_name(text: Any) -> None:
    work = SampleWork(text.prompt([1, 2]), None, SamplingParams(max_tokens=1, temperature=1e-6))
    with pytest.raises(InvalidRequestError, match=r"sampling_params.temperature: 1e-06 .* 1e-05"):
        await text.sampler.sample(work)


async def test_top_k_and_top_p_keep_only_what_they_should(text: Any) -> None:
    prompt = text.prompt(list(range(30, 45)))
    p = text.hf.logits(prompt)[-1].softmax(-1).numpy()
    order = np.argsort(-p)
    nucleus = order[: int((np.cumsum(p[order]) < 0.5).sum()) + 1]
    for allowed, settings in ((order[:2], {"top_k": 2}), (nucleus, {"top_p": 0.5})):
        work = SampleWork(prompt, None, SamplingParams(max_tokens=1, seed=1, **settings), num_samples=200)
        drawn = {int(sequence.tokens[0]) for sequence in (await text.sampler.sample(work)).sequences}
        assert drawn <= set(allowed.tolist())
        assert len(drawn) > 1


@pytest.mark.parametrize("seed", [None, 11])
async def test_samples_are_distributed_as_the_model_says(text: Any, seed: int | None) -> None:
    prompt = text.prompt(list(range(30, 45)))
    p = text.hf.logits(prompt)[-1].softmax(-1).numpy()
    work = SampleWork(prompt, None, SamplingParams(max_tokens=1, seed=seed), num_samples=2000)
    tokens = np.array([sequence.tokens[0] for sequence in (await text.sampler.sample(work)).sequences])
    counts = np.bincount(tokens, minlength=p.size)
    likely = np.argsort(-p)[:10]
    deviation = (counts[likely] - 2000 * p[likely]) / np.sqrt(2000 * p[likely] * (1 - p[likely]))
    assert np.abs(deviation).max() < 5


async def test_unseeded_samples_do_not_depend_on_the_global_generator_and_leave_it_alone(text: Any) -> None:
    """A program that seeds torch must not make samples repeat, nor be disturbed by sampling."""
    import torch

    work = SampleWork(text.prompt([1, 2, 3]), None, SamplingParams(max_tokens=20, temperature=3.0, stop=()))
    sampled = []
    for _ in range(2):
        torch.manual_seed(0)
        before = torch.get_rng_state()
        sampled.append((await text.sampler.sample(work)).sequences[0].tokens.tolist())
        assert torch.equal(torch.get_rng_state(), before)
    assert sampled[0] != sampled[1]
