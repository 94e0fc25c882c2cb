"""Tokens drawn at the positions of a prompt: their distribution, their seed, their logprobs."""

import asyncio
import tracemalloc
from typing import Any

import numpy as np
import pytest
from tinker_local.backend.sampling.prompt_scores import Draws
from tinker_local.backend.vllm_engine import score_prompts
from tinker_local.backend.vllm_engine.compat_vllm import runs_on_cpu
from tinker_local.types import SamplingParams

from tests.sampling.sampling_answers import (
    TEXT,
    ask,
    log_p,
    same_drawn,
)
from tests.traced import start_tracing


@pytest.mark.mutation(
    "alternatives-at-temperature-1",
    "score_prompts._draw",
    "(log_p_nv / draws.temperature).softmax(dim=-1)",
    "log_p_nv.softmax(dim=-1)",
    cases=("base-text-2.0",),
)
@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 2.0])
async def test_alternatives_are_drawn_at_the_temperature_with_the_models_logprobs(
    case: Any, temperature: float
) -> None:
    """Neither top-k nor top-p cuts them; 4000 draws at every position have the distribution's frequencies."""
    served, prompt, adapter = case
    params = SamplingParams(max_tokens=1, temperature=temperature, top_k=2, top_p=0.5, seed=4)
    version = None if adapter is None else adapter.version
    vocab_size = served.sampler._vocab_size
    output = await ask(
        served, prompt, version, params=params, prompt_alt_tokens_k=4000, topk_prompt_logprobs=vocab_size
    )
    drawn = same_drawn(served, output, log_p(served, prompt, adapter))
    assert drawn.shape == (prompt.length - 1, 4000)
    # The engine's own distribution, which other tests compare with HF's.
    assert output.topk_prompt_logprobs is not None
    log_q = np.empty((prompt.length - 1, vocab_size))
    ids = output.topk_prompt_logprobs.token_ids[1:].astype(np.int64)
    np.put_along_axis(log_q, ids, output.topk_prompt_logprobs.logprobs[1:].astype(np.float64), axis=1)
    if temperature == 0:
        assert (drawn == ids[:, :1]).all()
        return
    p = np.exp((log_q - log_q.max(axis=1, keepdims=True)) / temperature)
    p /= p.sum(axis=1, keepdims=True)
    counts = np.stack([np.bincount(row, minlength=p.shape[1]) for row in drawn])
    often = 4000 * p > 20
    deviation = (counts - 4000 * p) / np.sqrt(4000 * p * (1 - p) + 1e-9)
    assert np.abs(deviation[often]).max() < 5.5
    # What is rare is drawn as often as it should be, too.
    rare = (4000 * p * ~often).sum()
    assert abs(counts[~often].sum() - rare) < 5.5 * rare**0.5 + 1
    # Positions, and draws at one position, are independent: pairs agree as often as chance has it.
    agree = (drawn[:, 0::2] == drawn[:, 1::2]).mean(axis=1)
    chance = (p**2).sum(axis=1)
    assert (np.abs(agree - chance) < 5.5 * np.sqrt(chance * (1 - chance) / 2000) + 1e-3).all()
    agree = (drawn[:-1] == drawn[1:]).mean(axis=1)
    chance = (p[:-1] * p[1:]).sum(axis=1)
    assert (np.abs(agree - chance) < 5.5 * np.sqrt(chance * (1 - chance) / 4000) + 1e-3).all()


def different(drawn: Any, others: Any) -> float:
    """The share of draws that differ."""
    return float((np.asarray(drawn) != np.asarray(others)).mean())


def roundings() -> float:
    """The share of draws that lie so near an edge that rounding may move them to its other side."""
    return 1e-3 if runs_on_cpu() else 0.05


async def test_alternatives_repeat_with_their_seed_whatever_runs_beside_them(text: Any) -> None:
    prompt = text.prompt(TEXT)

    async def draw(seed: int | None, others: int = 0) -> list[list[int]]:
        params = SamplingParams(max_tokens=2, seed=seed, stop=())
        output, *_ = await asyncio.gather(
            ask(text, prompt, params=params, prompt_alt_tokens_k=20, num_samples=3),
            *(ask(text, prompt, prompt_logprobs=True) for _ in range(others)),
        )
        assert output.prompt_alt_tokens is not None
        tokens: list[list[int]] = output.prompt_alt_tokens.tokens.to_numpy().tolist()
        return tokens

    first = await draw(7)
    # Other rows beside it may round its probabilities otherwise.
    assert different(await draw(7, 5), first) <= roundings()
    assert different(await draw(8), first) > 0.2
    assert await draw(None) != await draw(None)


async def test_alternatives_of_a_long_prompt_do_not_depend_on_its_parts(
    vl: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = vl.prompt(np.random.default_rng(1).integers(0, 300, 2500).tolist())
    params = SamplingParams(max_tokens=1, seed=2)
    expected = log_p(vl, prompt)
    whole = same_drawn(vl, await ask(vl, prompt, params=params, prompt_alt_tokens_k=3), expected)
    monkeypatch.setattr(score_prompts, "CHUNK_NUMBERS", 80_000)
    parts = same_drawn(vl, await ask(vl, prompt, params=params, prompt_alt_tokens_k=3), expected)
    assert different(whole, parts) <= roundings()


@pytest.mark.parametrize("k", [1, 3, 7, 8])
def test_rows_have_their_own_random_numbers_in_whatever_parts_they_come(k: int) -> None:
    draws = Draws(k, 1.0, 12345)
    whole = draws.uniforms(0, 50)
    parts = [draws.uniforms(start, stop) for start, stop in ((0, 1), (1, 2), (2, 9), (9, 9), (9, 50))]
    assert np.array_equal(np.concatenate(parts), whole)
    assert len(np.unique(whole)) == whole.size


@pytest.mark.more
def test_random_numbers_of_a_few_rows_take_their_own_memory() -> None:
    """Those of 1,024 rows were made: a prompt of two tokens with 2**24 alternatives took 128 GiB."""
    start_tracing()
    Draws(2**20, 1.0, 1).uniforms(1, 3)
    assert tracemalloc.get_traced_memory()[1] < 20 * 2**20
