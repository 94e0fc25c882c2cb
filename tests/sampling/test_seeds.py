"""Seeds: reproducible, any integer; neighbouring ones share nothing, nor do prompts with the same one."""

import asyncio
from typing import Any

import numpy as np
import pytest
from tinker_local.backend.rendering.rendered_input import ImagePlacement, RenderedImage, RenderedInput
from tinker_local.backend.sampling.sampler import SampleWork
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
    "SampleWork.seeds",
    "return self.seeded(*(str(self.first_sample + index) for index in range(self.num_samples)))",
    "return [(self.params.seed + self.first_sample + index) % 2**63 for index in range(self.num_samples)]",
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


def work(seed: int, prompt: RenderedInput, **given: int) -> SampleWork:
    return SampleWork(prompt, None, SamplingParams(max_tokens=1, seed=seed), **given)


def test_seeds_are_63_bits_and_distinct() -> None:
    text = RenderedInput(np.arange(15, dtype=np.int32))
    seeds = {each for seed in range(-50, 50) for each in work(seed, text, num_samples=50).seeds() or []}
    assert len(seeds) == 5000
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert work(7, text, num_samples=3).seeds() == [
        *(work(7, text).seeds() or []),
        *(work(7, text, first_sample=1, num_samples=2).seeds() or []),
    ]


def test_prompts_with_one_seed_have_random_numbers_of_their_own() -> None:
    ids = np.arange(15, dtype=np.int32)
    images = [RenderedImage(name, 4, np.zeros((4, 3), np.float32), (1, 2, 2)) for name in ("one", "other")]
    prompts = [RenderedInput(ids), RenderedInput(ids[::-1].copy())]
    prompts += [RenderedInput(ids, (ImagePlacement(offset, image),)) for image in images for offset in (1, 2)]
    assert len({each for prompt in prompts for each in work(7, prompt, num_samples=8).seeds() or []}) == 6 * 8


@pytest.mark.mutation(
    "prompts-share-random-numbers",
    "SampleWork.seeded",
    " + self.prompt.token_ids.tobytes()",
    "",
)
async def test_prompts_that_end_alike_do_not_draw_alike(text: Any) -> None:
    """At a temperature so high that all tokens are as likely, what is drawn shows the random numbers alone."""

    async def drawn(first: int) -> tuple[int, ...]:
        params = SamplingParams(max_tokens=12, seed=7, temperature=1e4, stop=())
        output = await text.sampler.sample(SampleWork(text.prompt([first, *PROMPT]), None, params))
        return tuple(output.sequences[0].tokens.tolist())

    several = [await drawn(first) for first in range(100, 108)]
    assert all(len(set(tokens)) > 1 for tokens in zip(*several, strict=True))
    assert await drawn(100) == several[0]


async def test_a_seeded_prompt_that_takes_several_steps_draws_the_same(vl: Any) -> None:
    """vLLM on CPU would fail the step: it rewinds the generator of a prompt that is not all in yet."""
    long = vl.prompt([i % 300 for i in range(5000)])
    params = SamplingParams(max_tokens=8, seed=3, temperature=2.0, stop=())
    first = (await vl.sampler.sample(SampleWork(long, None, params))).sequences[0]
    # The second time the prefix is cached, so that one step is enough.
    second = (await vl.sampler.sample(SampleWork(long, None, params))).sequences[0]
    assert first.tokens.tolist() == second.tokens.tolist()
