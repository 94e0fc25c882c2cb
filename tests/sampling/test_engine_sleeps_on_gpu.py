"""An engine that really gives its memory back: what is freed, and that samples after it are what they were before.

The last test leaves vLLM's allocator taken (see `sleep_mode`): no engine that is built after it can sleep.
"""

import asyncio
import dataclasses
import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tinker_local.backend.sampling.sampler import SampleWork
from tinker_local.backend.vllm_engine.vllm_sampler import VLLMSampler
from tinker_local.types import InternalError, SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

KV_CACHE = 4 * 2**30
PROMPT = list(range(20, 80))
ALL = r"(q|k|v|o|gate|up|down)_proj$"


def free() -> int:
    """Free bytes of the device, this process's own cache included."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info()[0])


def engine(text: Any) -> VLLMSampler:
    options = dataclasses.replace(text.options, kv_cache_bytes=KV_CACHE, sleeps=True)
    return VLLMSampler(options, text.sampler._thread)


def greedy_works(text: Any, folder: Path) -> list[SampleWork]:
    """For base and two adapters, each with and without prompt logprobs."""
    adapters = [text.adapter(folder / f"v{number}", ALL, 4 + 4 * number, seed=number) for number in range(2)]
    params = SamplingParams(max_tokens=48, temperature=0.0, stop=())
    return [
        SampleWork(text.prompt(PROMPT), version, params, prompt_logprobs=scored)
        for version in (None, *(adapter.version for adapter in adapters))
        for scored in (False, True)
    ]


async def outputs(sampler: VLLMSampler, works: list[SampleWork]) -> list[np.ndarray]:
    """Tokens, logprobs and prompt logprobs; one request at a time, so that the batches are the same."""
    arrays: list[Any] = []
    for work in works:
        output = await sampler.sample(work)
        arrays += [output.sequences[0].tokens, output.sequences[0].logprobs]
        arrays += [] if output.prompt_logprobs is None else [output.prompt_logprobs]
    return arrays


def equal(ours: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for array, wanted in zip(ours, expected, strict=True):
        np.testing.assert_array_equal(array, wanted)


def leave_numbers_in_free_memory() -> None:
    """What the next owner finds there is not a number."""
    torch.full(((free() - 2**30) // 4,), float("nan"), device="cuda")
    free()


async def test_sleep_frees_the_kv_cache_and_samples_after_it_are_the_same(text: Any, tmp_path: Path) -> None:
    sampler = engine(text)
    try:
        assert sampler.can_sleep
        works = greedy_works(text, tmp_path)
        before = await outputs(sampler, works)
        for _ in range(3):
            awake = free()
            await sampler.sleep()
            freed = free() - awake
            print(f"sleep frees {freed / 2**30:.2f} GiB of {KV_CACHE / 2**30:.2f} GiB of KV cache")
            assert freed > 0.9 * KV_CACHE
            with pytest.raises(InternalError, match="sleeps"):
                await sampler.sample(works[0])
            leave_numbers_in_free_memory()
            await sampler.wake()
            assert abs(free() - awake) < 0.1 * KV_CACHE
            equal(await outputs(sampler, works), before)
        late = text.adapter(tmp_path / "late", ALL, 8, seed=9)
        await sampler.load_version(late.version)
        prompt = text.prompt(PROMPT)
        params = SamplingParams(max_tokens=1, temperature=0.0)
        scored = await sampler.sample(SampleWork(prompt, late.version, params, prompt_logprobs=True))
        assert scored.prompt_logprobs is not None
        with text.hf.merged(late):
            text.same(scored.prompt_logprobs[1:], text.hf.prompt_logprobs(prompt))
    finally:
        await sampler.close()


async def test_without_memory_to_wake_the_engine_sleeps_on_and_wakes_later(text: Any, tmp_path: Path) -> None:
    sampler = engine(text)
    try:
        works = greedy_works(text, tmp_path)[:3]
        before = await outputs(sampler, works)
        await sampler.sleep()
        # Room for the weights and a part of the KV cache.
        others = torch.empty(free() - KV_CACHE // 2, dtype=torch.uint8, device="cuda")
        left = free()
        with pytest.raises(InternalError, match="out of memory"):
            await sampler.wake()
        assert sampler.asleep
        assert abs(free() - left) < 0.05 * KV_CACHE, "half awake, it is in everybody's way"
        del others
        leave_numbers_in_free_memory()
        await sampler.wake()
        equal(await outputs(sampler, works), before)
    finally:
        await sampler.close()


async def test_an_engine_that_was_built_anew_can_sleep(text: Any, tmp_path: Path) -> None:
    sampler = engine(text)
    try:
        works = greedy_works(text, tmp_path)[:3]
        before = await outputs(sampler, works)
        await sampler.sleep()
        await sampler.wake()

        def break_step(vllm: Any) -> None:
            def step() -> None:
                raise RuntimeError("broken on purpose")

            vllm.step = step

        taken = free()
        await asyncio.wrap_future(sampler._thread.call(sampler._engine, break_step))
        with pytest.raises(InternalError, match="broken on purpose"):
            await sampler.sample(works[0])
        equal(await outputs(sampler, works), before)
        assert abs(free() - taken) < 0.25 * KV_CACHE, "the old engine's memory is still there"
        assert sampler.can_sleep
        awake = free()
        await sampler.sleep()
        assert free() - awake > 0.9 * KV_CACHE
        await sampler.wake()
        equal(await outputs(sampler, works), before)
    finally:
        await sampler.close()


async def test_an_engine_closed_in_its_sleep_leaves_nothing_and_the_next_one_works(text: Any, tmp_path: Path) -> None:
    before_all = free()
    sampler = engine(text)
    works = greedy_works(text, tmp_path)[:3]
    before = await outputs(sampler, works)
    await sampler.sleep()
    await sampler.close()
    assert before_all - free() < 0.1 * KV_CACHE
    sampler = engine(text)
    try:
        assert not sampler.can_sleep
        equal(await outputs(sampler, works), before)
    finally:
        await sampler.close()
