"""Seeds: reproducible, any integer, and neighbouring ones share nothing."""

import asyncio
from typing import Any

import pytest
from tinker_local.backend.sampling.sampler import SampleWork
from tinker_local.backend.vllm_engine.engine_inputs import sample_seed
from tinker_local.types import SamplingParams

PROMPT = list(range(30, 45))


async def draw(served: Any, seed: int | None, num_samples: int = 4, max_tokens: int = 12) -> list[tuple[int, ...]]:
    params = SamplingParams(max_tokens=max_tokens, seed=seed, temperature=2.0, stop=())
    output = await served.sampler.sample(SampleWork(served.prompt(PROMPT), None, params, num_samples=num_samples))
    return [tuple(sequence.tokens.tolist()) for sequence in output.sequences]


async def test_a_seed_repeats_whatever_runs_beside_it(text: Any) -> None:
    alone = await draw(text, 7)
    beside = await asyncio.gather(draw(text, 7), draw(text, None, 20), draw(text, 8), draw(text, 7))
    assert beside[0] == beside[3] == alone


@pytest.mark.mutation(
    "neighbouring-seeds-share",
    "sample_seed",
    'return int.from_bytes(hashlib.sha256(f"{seed}/{index}".encode()).digest()[:8], "big") >> 1',
    "return (seed + index) % 2**63",
)
async def test_samples_of_one_seed_and_of_neighbouring_seeds_are_all_different(text: Any) -> None:
    """vLLM itself would give sample i of seed s what it gives sample 0 of seed s + i."""
    drawn = [sample for seed in range(8) for sample in await draw(text, seed)]
    assert len(set(drawn)) == len(drawn)


async def test_fewer_samples_are_a_prefix_of_more(text: Any) -> None:
    assert (await draw(text, 5, 6))[:2] == await draw(text, 5, 2)


async def test_without_a_seed_samples_differ(text: Any) -> None:
    drawn = await draw(text, None, 8) + await draw(text, None, 8)
    assert len(set(drawn)) == len(drawn)


@pytest.mark.parametrize("seed", [-1, 0, 2**31, 2**63, 2**64 + 1, -(2**70), 10**40])
async def test_any_integer_is_a_seed(text: Any, seed: int) -> None:
    assert await draw(text, seed, 2) == await draw(text, seed, 2)


def test_seeds_are_63_bits_and_distinct() -> None:
    seeds = {sample_seed(seed, index) for seed in range(-50, 50) for index in range(50)}
    assert len(seeds) == 5000
    assert all(0 <= seed < 2**63 for seed in seeds)


async def test_a_seeded_prompt_that_takes_several_steps_draws_the_same(vl: Any) -> None:
    """vLLM on CPU would fail the step: it rewinds the generator of a prompt that is not all in yet."""
    long = vl.prompt([i % 300 for i in range(5000)])
    params = SamplingParams(max_tokens=8, seed=3, temperature=2.0, stop=())
    first = (await vl.sampler.sample(SampleWork(long, None, params))).sequences[0]
    # The second time the prefix is cached, so that one step is enough.
    second = (await vl.sampler.sample(SampleWork(long, None, params))).sequences[0]
    assert first.tokens.tolist() == second.tokens.tolist()
