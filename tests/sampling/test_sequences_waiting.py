"""How many sequences vLLM has no place for: what the queue states are told from."""

import asyncio
from typing import Any

from tinker_local.backend.sampling.interface import SampleWork
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
