"""Prompt logprobs of vLLM equal those of HF transformers in float32."""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

TEXT = list(range(20, 60))


async def test_text_agrees_with_hf(served: Any) -> None:
    prompt = served.prompt(TEXT)
    served.same(await served.score(prompt), served.hf.prompt_logprobs(prompt))


@pytest.mark.parametrize("model", ["vl", "vl25"])
async def test_image_and_text_after_it_agree_with_hf(
    model: str, request: pytest.FixtureRequest, noise: Callable[..., Any]
) -> None:
    served = request.getfixturevalue(model)
    prompts = [
        served.prompt([7, 8], noise(150, 100), TEXT),
        served.prompt(noise(64, 200), TEXT),
        served.prompt([9], noise(70, 70, 1), [10, 11], noise(33, 120, 2), [12], noise(300, 40, 3), TEXT),
        served.prompt([9], noise(70, 70, 1), noise(33, 120, 2), TEXT),
        served.prompt(TEXT),
    ]
    # One step for all: text and images share it.
    scores = await asyncio.gather(*(served.score(prompt) for prompt in prompts))
    for prompt, score in zip(prompts, scores, strict=True):
        served.same(score, served.hf.prompt_logprobs(prompt))


@pytest.mark.mutation(
    "pad-ids-found-by-the-sampler",
    "engine_prompt",
    "PlaceholderRange(offset=p.offset,",
    "PlaceholderRange(offset=ids.index(ids[p.offset]),",
    cases=("vl",),
)
@pytest.mark.parametrize("model", ["vl", "vl25"])
async def test_pad_ids_that_come_as_text_stay_text(
    model: str, request: pytest.FixtureRequest, noise: Callable[..., Any]
) -> None:
    served = request.getfixturevalue(model)
    pad = served.renderer.tokens.pad
    start, end = served.renderer.tokens.start, served.renderer.tokens.end
    prompts = [
        served.prompt([5, pad, 6, start, pad, pad, end, 7]),
        served.prompt([5, pad, 6], noise(150, 100), [pad, 8, start, pad, end, 9]),
        served.prompt([start, pad, end], noise(64, 64), [pad]),
    ]
    scores = await asyncio.gather(*(served.score(prompt) for prompt in prompts))
    for prompt, score in zip(prompts, scores, strict=True):
        served.same(score, served.hf.prompt_logprobs(prompt))


async def test_text_on_a_vision_model_is_the_same_whether_in_one_chunk_or_many(vl: Any) -> None:
    whole = await vl.score(vl.prompt(TEXT))
    for cut in (1, 7, 39):
        split = vl.prompt(TEXT[:cut], TEXT[cut:])
        assert np.array_equal(split.token_ids, TEXT)
        assert np.array_equal(await vl.score(split), whole)


async def test_a_prompt_of_one_token_has_one_nan(text: Any) -> None:
    assert (await text.score(text.prompt([5]))).size == 0


async def test_a_prompt_longer_than_one_step_agrees_with_hf(text: Any, vl: Any, noise: Callable[..., Any]) -> None:
    """More tokens than max_num_batched_tokens are scored in pieces."""
    ids = np.random.default_rng(0).integers(0, 300, 2500).tolist()
    prompt = vl.prompt(ids[:2000], noise(150, 100), ids[2000:])
    vl.same(await vl.score(prompt), vl.hf.prompt_logprobs(prompt))


async def test_scoring_twice_gives_the_same_and_reads_no_cache(text: Any) -> None:
    prompt = text.prompt(list(range(300)))
    first = await text.score(prompt)
    text.same(await text.score(prompt), first)
