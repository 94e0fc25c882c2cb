"""What metrics say of vLLM's scheduler while it runs: how many sequences have no place, how full its KV cache is."""

import asyncio
from typing import Any

from tinker_local.backend.sampling.sampler import SampleWork
from tinker_local.types import SamplingParams

PROMPT = list(range(20, 60))


async def test_sequences_beyond_those_that_run_are_counted_as_waiting(text: Any) -> None:
    limit = await asyncio.wrap_future(
        text.sampler._thread.call(text.sampler._engine, lambda e: e.vllm_config.scheduler_config.max_num_seqs)
    )
    work = SampleWork(text.prompt(PROMPT), None, SamplingParams(max_tokens=60, stop=()), num_samples=limit + 7)
    assert text.sampler.sequences_waiting == 0
    seen = set()
    task = asyncio.create_task(text.sampler.sample(work))
    while not task.done():
        seen.add(text.sampler.sequences_waiting)
        await asyncio.sleep(0.002)
    assert len((await task).sequences) == limit + 7
    assert max(seen) >= 7
    assert text.sampler.sequences_waiting == 0


async def test_the_share_of_the_kv_cache_follows_the_sequences_that_hold_it(text: Any) -> None:
    assert text.sampler.kv_cache_used == 0
    largest = []
    for count in (1, 16):
        work = SampleWork(text.prompt(PROMPT), None, SamplingParams(max_tokens=60, stop=()), num_samples=count)
        task, seen = asyncio.create_task(text.sampler.sample(work)), [0.0]
        while not task.done():
            seen.append(text.sampler.kv_cache_used)
            await asyncio.sleep(0.002)
        largest.append(max(seen))
        assert text.sampler.kv_cache_used == 0, "cached prefixes give way, and do not count"
    assert 0 < largest[0] < largest[1] <= 1


async def test_a_request_begins_when_its_first_sequence_has_a_place_and_is_told_once(text: Any) -> None:
    limit = await asyncio.wrap_future(
        text.sampler._thread.call(text.sampler._engine, lambda e: e.vllm_config.scheduler_config.max_num_seqs)
    )
    in_flight, told = text.sampler._engine.in_flight, []

    def work(name: str, num_samples: int, max_tokens: int) -> SampleWork:
        def begun() -> None:
            told.append((name, len(in_flight)))

        params = SamplingParams(max_tokens=max_tokens, stop=())
        return SampleWork(text.prompt(PROMPT), None, params, num_samples=num_samples, begun=begun)

    full = asyncio.create_task(text.sampler.sample(work("full", limit, 30)))
    await asyncio.sleep(0)  # it is in the engine's queue
    await asyncio.gather(full, text.sampler.sample(work("late", 2, 2)))
    assert [name for name, _ in told] == ["full", "late"]
    assert told[1][1] <= limit  # sequences of the first had ended
