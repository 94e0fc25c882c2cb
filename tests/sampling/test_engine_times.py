"""Where the time of a sample goes within vLLM: its queue, the load of an adapter, the prompt, the tokens."""

import asyncio
import time
from pathlib import Path
from typing import Any

from tinker_local.backend.sampling.sampler import EngineTimes, SampleWork
from tinker_local.types import SamplingParams

PROMPT = list(range(20, 60))


async def timed(sampler: Any, work: SampleWork) -> tuple[float, EngineTimes]:
    """The seconds of a sample, by this process's clock, and where they went."""
    began = time.monotonic()
    output = await sampler.sample(work)
    return time.monotonic() - began, output.times


def whole(times: EngineTimes) -> float:
    return times.waking + times.loading + times.queued + times.prefill + times.decode


async def test_a_sample_behind_others_waits_in_the_queue_and_one_alone_does_not(text: Any) -> None:
    limit = await asyncio.wrap_future(
        text.sampler._thread.call(text.sampler._engine, lambda e: e.vllm_config.scheduler_config.max_num_seqs)
    )
    params = SamplingParams(max_tokens=60, stop=())
    full = SampleWork(text.prompt(PROMPT), None, params, num_samples=limit)
    late = SampleWork(text.prompt(PROMPT), None, SamplingParams(max_tokens=2, stop=()))
    first = asyncio.create_task(timed(text.sampler, full))
    await asyncio.sleep(0)  # it is in the engine's queue
    (seconds, of_late), (of_both, of_full) = await timed(text.sampler, late), await first
    assert of_late.queued > 0.8 * of_full.decode
    assert whole(of_late) <= seconds
    assert whole(of_full) <= of_both
    alone, of_alone = await timed(text.sampler, full)
    assert of_alone.queued < 0.5 * of_alone.decode
    assert 0.5 * alone < whole(of_alone) <= alone
    assert (of_full.longest, of_late.longest) == (60, 2)
    assert of_full.per_token == of_full.decode / 59


async def test_an_adapter_is_loaded_once_and_that_is_told_apart(text: Any, tmp_path: Path) -> None:
    adapter = text.adapter(tmp_path / "loaded", r"self_attn\.(q|k|v|o)_proj$", 4)
    work = SampleWork(text.prompt(PROMPT), adapter.version, SamplingParams(max_tokens=2, stop=()))
    _, first = await timed(text.sampler, work)
    again = [(await timed(text.sampler, work))[1].loading for _ in range(3)]
    assert first.loading > 2 * min(again)
    assert first.preemptions == 0


async def test_a_streamed_sample_has_its_first_token_when_its_times_say(text: Any) -> None:
    drawn: list[float] = []
    began = time.monotonic()
    params = SamplingParams(max_tokens=50, stop=())
    work = SampleWork(text.prompt(PROMPT), None, params, drawn=lambda _: drawn.append(time.monotonic()))
    times = (await text.sampler.sample(work)).times
    ended = time.monotonic()
    until_first = times.loading + times.queued + times.prefill
    assert until_first <= drawn[0] - began
    assert times.decode >= drawn[-1] - drawn[0] - 0.1 * (ended - began)
    assert until_first + times.decode <= ended - began
