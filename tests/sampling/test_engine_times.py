"""Where the time of a sample goes within vLLM: its queue, the load of an adapter, the prompt, the tokens."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
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
    """Times beside those at which the sampler calls back: all of one clock."""
    limit = await asyncio.wrap_future(
        text.sampler._thread.call(text.sampler._engine, lambda e: e.vllm_config.scheduler_config.max_num_seqs)
    )
    ends: list[float] = []
    begins: list[float] = []
    params = SamplingParams(max_tokens=60, stop=())
    full = SampleWork(text.prompt(PROMPT), None, params, limit, ended=lambda: ends.append(time.monotonic()))
    late = SampleWork(
        text.prompt(PROMPT),
        None,
        SamplingParams(max_tokens=2, stop=()),
        begun=lambda: begins.append(time.monotonic()),
    )
    before = asyncio.create_task(timed(text.sampler, full))
    await asyncio.sleep(0)  # it is in the engine's queue
    sent = time.monotonic()
    waiting = asyncio.create_task(timed(text.sampler, late))
    await asyncio.sleep(0)
    submitted = time.monotonic()
    (seconds, of_late), (of_both, of_full) = await waiting, await before
    assert ends[0] - submitted <= of_late.queued + of_late.loading <= begins[0] - sent  # no place before that end
    assert whole(of_late) <= seconds
    assert ends[-1] - sent <= whole(of_full) <= of_both  # it was submitted before
    assert (of_full.longest, of_late.longest) == (60, 2)
    assert of_full.per_token == of_full.decode / 59
    began = time.monotonic()
    _, alone = await timed(text.sampler, late)
    assert alone.queued + alone.loading <= begins[1] - began


async def test_an_adapter_is_loaded_once_and_that_is_told_apart(
    text: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = text.adapter(tmp_path / "loaded", r"self_attn\.(q|k|v|o)_proj$", 4)
    work = SampleWork(text.prompt(PROMPT), adapter.version, SamplingParams(max_tokens=2, stop=()))
    prepare = text.sampler._adapters.prepare
    slow = [0.5]

    async def slowly(version: Any) -> Any:
        if slow:
            await asyncio.sleep(slow.pop())
        return await prepare(version)

    monkeypatch.setattr(text.sampler._adapters, "prepare", slowly)
    seconds, first = await timed(text.sampler, work)
    again = [(await timed(text.sampler, work))[1].loading for _ in range(3)]
    assert 0.5 <= first.loading <= seconds
    assert min(again) < 0.5 * first.loading
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
    assert times.decode >= drawn[-1] - drawn[0]  # tokens are given out after they came
    assert until_first + times.decode <= ended - began
