"""What vLLM keeps of a sleep and of one that fails: tried with its engine, and memory that is not really taken away."""

import asyncio
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tinker_local.backend.rendering.grammar import Grammar
from tinker_local.backend.sampling.sampler import SampleWork
from tinker_local.backend.vllm_engine import compat_vllm, sleep_mode
from tinker_local.backend.vllm_engine.vllm_sampler import VLLMSampler
from tinker_local.types import InternalError, SamplingParams

PROMPT = [20 + 7 * at % 60 for at in range(300)]  # longer than a block of the KV cache
ALL = r"(q|k|v|o|gate|up|down)_proj$"

pytestmark = pytest.mark.skipif(not compat_vllm.runs_on_cpu(), reason="on CUDA the memory is really taken away")


@dataclasses.dataclass
class Allocation:
    tag: str
    handle: tuple[int, int]
    is_asleep: bool = False


class PretendedAllocator:
    """As vLLM's. `fails_at`: the allocation at which the next sleep or waking fails. `careful`: as in 0.32; else as in
    0.26, which must not be shown what is away already when it sleeps, or what is there when it wakes."""

    def __init__(self, careful: bool) -> None:
        tags = ("weights", "weights", "kv_cache", "kv_cache")
        self.pointer_to_data = {at: Allocation(tag, (0, 100 + at)) for at, tag in enumerate(tags)}
        self.fails_at: int | None = None
        if careful:
            self.discard = None
        self._careful = careful

    def sleep(self, offload_tags: Any = None) -> None:
        self._move(True)

    def wake_up(self, tags: Any = None) -> None:
        self._move(False)

    def _move(self, asleep: bool) -> None:
        for at, data in self.pointer_to_data.items():
            if self.fails_at == at:
                self.fails_at = None
                raise RuntimeError("CUDA Error: out of memory")
            if data.is_asleep == asleep:
                assert self._careful, "mapped, or taken away, a second time"
                continue
            data.is_asleep = asleep

    def asleep(self) -> list[bool]:
        return [data.is_asleep for data in self.pointer_to_data.values()]


@pytest.fixture(params=["0.26", "0.32"])
def allocator(request: pytest.FixtureRequest, text: Any, monkeypatch: pytest.MonkeyPatch) -> PretendedAllocator:
    from vllm.v1.worker.cpu_worker import CPUWorker

    pretended = PretendedAllocator(careful=request.param == "0.32")
    monkeypatch.setattr(sleep_mode, "_sleep_allocator", lambda: pretended)
    monkeypatch.setattr(sleep_mode, "can_sleep", lambda engine: True)
    monkeypatch.setattr(CPUWorker, "sleep", lambda worker, level: pretended.sleep())
    monkeypatch.setattr(CPUWorker, "wake_up", lambda worker, tags=None: pretended.wake_up())
    monkeypatch.setattr(sleep_mode, "_fill_with_zeros", lambda pointer, size: zeros(text, pointer, size))
    return pretended


def zeros(text: Any, pointer: int, size: int) -> None:
    """The third and fourth allocation are the KV cache's, one for each layer."""
    assert size == 100 + pointer
    assert pointer >= 2, "weights"
    compat_vllm.model_runner(text.sampler._engine.live()).kv_caches[pointer - 2].zero_()


@pytest.fixture
def sampler(text: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[VLLMSampler]:
    monkeypatch.setattr(text.sampler, "can_sleep", True)
    yield text.sampler
    text.sampler._thread.call(text.sampler._engine, text.sampler._wake_up).result()


@pytest.fixture
def works(text: Any, tmp_path: Path) -> list[SampleWork]:
    """Greedy, for base and adapter, and under a grammar."""
    prompt, adapter = text.prompt(PROMPT), text.adapter(tmp_path / "v1", ALL, 4)
    greedy = SamplingParams(max_tokens=8, temperature=0.0, stop=())
    digits = Grammar("regex", "[0-9]{8}", "structured_outputs.regex")
    works = [SampleWork(prompt, version, greedy) for version in (None, adapter.version)]
    return [*works, SampleWork(prompt, adapter.version, greedy, grammar=digits)]


async def outputs(sampler: VLLMSampler, works: list[SampleWork]) -> list[np.ndarray | None]:
    sequences = [(await sampler.sample(work)).sequences[0] for work in works]
    return [array for sequence in sequences for array in (sequence.tokens, sequence.logprobs)]


def same(ours: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for array, wanted in zip(ours, expected, strict=True):
        np.testing.assert_allclose(array, wanted, atol=1e-5)


@pytest.mark.rotated(2)
async def test_after_a_sleep_samples_are_what_they_were(
    sampler: VLLMSampler, works: list[SampleWork], allocator: PretendedAllocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = await outputs(sampler, works)
    for _ in range(2):
        await sampler.sleep()
        assert sampler.asleep
        assert all(allocator.asleep())
        caches = compat_vllm.model_runner(sampler._engine.live()).kv_caches
        for cache in caches:
            cache.fill_(float("nan"))  # somebody else's numbers
        await sampler.wake()
        assert not sampler.asleep
        assert not any(allocator.asleep())
        assert not any(cache.any() for cache in caches)
        same(await outputs(sampler, works), before)


async def test_a_sleeping_engine_refuses_what_would_touch_its_memory(
    sampler: VLLMSampler, works: list[SampleWork], allocator: PretendedAllocator
) -> None:
    await outputs(sampler, works)
    await sampler.sleep()
    for work in works:
        with pytest.raises(InternalError, match="sleeps"):
            await sampler.sample(work)
    assert works[1].version is not None
    with pytest.raises(InternalError, match="sleeps"):
        await sampler.load_version(works[1].version)
    with pytest.raises(InternalError, match="cannot sleep now"):
        await sampler.sleep()
    await sampler.remove_version(works[1].version)


async def test_a_sleep_that_fails_in_the_middle_leaves_the_engine_awake(
    sampler: VLLMSampler, works: list[SampleWork], allocator: PretendedAllocator
) -> None:
    before = await outputs(sampler, works)
    allocator.fails_at = 2
    with pytest.raises(InternalError, match="out of memory"):
        await sampler.sleep()
    assert not sampler.asleep
    assert not any(allocator.asleep())
    same(await outputs(sampler, works), before)
    await sampler.sleep()
    assert all(allocator.asleep())


async def test_a_sleep_that_fails_before_anything_moved_keeps_what_is_cached(
    sampler: VLLMSampler, works: list[SampleWork], allocator: PretendedAllocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache must not be cleared under prompts that still count as being in it."""
    before = await outputs(sampler, works)

    def refuse(**_: Any) -> None:
        raise RuntimeError("not now")

    engine = sampler._engine.live()
    monkeypatch.setattr(engine, "sleep", refuse)
    with pytest.raises(InternalError, match="not now"):
        await sampler.sleep()
    same(await outputs(sampler, works), before)


@pytest.mark.parametrize("at", [0, 2])
async def test_a_waking_that_fails_leaves_the_engine_asleep_and_may_be_tried_again(
    sampler: VLLMSampler, works: list[SampleWork], allocator: PretendedAllocator, at: int
) -> None:
    before = await outputs(sampler, works)
    await sampler.sleep()
    allocator.fails_at = at
    with pytest.raises(InternalError, match="out of memory"):
        await sampler.wake()
    assert sampler.asleep
    assert all(allocator.asleep()), "half of it is in everybody's way"
    await sampler.wake()
    same(await outputs(sampler, works), before)


async def test_an_engine_with_samples_in_flight_does_not_sleep(
    sampler: VLLMSampler, works: list[SampleWork], allocator: PretendedAllocator
) -> None:
    long = dataclasses.replace(works[0], params=SamplingParams(max_tokens=400, stop=()))
    running = asyncio.create_task(sampler.sample(long))
    while not sampler._engine.in_flight:  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    with pytest.raises(InternalError, match="1 sequences are in flight"):
        await sampler.sleep()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await sampler.sleep()  # what was cancelled is gone by then


async def test_without_the_option_an_engine_cannot_sleep(text: Any) -> None:
    assert not text.sampler.can_sleep
    with pytest.raises(InternalError, match="cannot sleep now"):
        await text.sampler.sleep()
