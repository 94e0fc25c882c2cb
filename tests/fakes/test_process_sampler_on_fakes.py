"""A sampler in a separate process gives the same results as inline; however the process ends, the error is clear."""

import asyncio
import functools
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from tinker_local.backend.adapters.adapter import AdapterState, AdapterVersion
from tinker_local.backend.adapters.adapter_files import write_adapter
from tinker_local.backend.fakes import FakeModel, FakeSampler, FakeTrainer
from tinker_local.backend.process import async_calls
from tinker_local.backend.process.channel import INLINE_BYTES, Channel
from tinker_local.backend.process.messages import Keep, KeepImage, encode
from tinker_local.backend.process.process_group import ProcessEndedError
from tinker_local.backend.rendering.rendered_input import ImagePlacement, RenderedImage, RenderedInput
from tinker_local.backend.sampling.process_sampler import ProcessSampler
from tinker_local.backend.sampling.sampler import SampleWork
from tinker_local.types import (
    InternalError,
    InvalidRequestError,
    LoraConfig,
    NotFoundError,
    SamplingParams,
    UnsupportedError,
)

pytestmark = pytest.mark.more

MODEL = FakeModel("fake/bigram")


@pytest.fixture
async def start(samplers: ModuleType) -> AsyncIterator[Callable[..., ProcessSampler]]:
    """`start(factory)`: a sampler (default: an `OddSampler`) in a process that ends with the test."""
    started: list[ProcessSampler] = []

    def make(factory: Any = None, **options: Any) -> ProcessSampler:
        started.append(ProcessSampler(factory or samplers.odd, **options))
        started[-1].load()
        return started[-1]

    yield make
    for sampler in started:
        await sampler.close()


def work(seed: int, samples: int = 2, length: int = 5, **options: Any) -> SampleWork:
    tokens = np.random.default_rng(seed).integers(1, 200, length).astype(np.int32)
    params = SamplingParams(max_tokens=options.pop("max_tokens", 12), temperature=1.0, seed=seed)
    return SampleWork(RenderedInput(tokens), options.pop("version", None), params, samples, **options)


def same(one: Any, other: Any) -> bool:
    """Whether two outputs are equal, to the bit."""
    assert len(one.sequences) == len(other.sequences)
    pairs = zip(one.sequences, other.sequences, strict=True)
    sequences = all(
        np.array_equal(a.tokens, b.tokens)
        and np.array_equal(a.logprobs, b.logprobs)
        and a.stop_reason == b.stop_reason
        and (a.topk_logprobs is None or np.array_equal(a.topk_logprobs.logprobs, b.topk_logprobs.logprobs))
        for a, b in pairs
    )
    scores = all(
        np.array_equal(getattr(one, name), getattr(other, name), equal_nan=True)
        for name in ("prompt_logprobs",)
        if getattr(one, name) is not None or getattr(other, name) is not None
    )
    return sequences and scores


def version(name: str, state: AdapterState | None, path: Path = Path("/nowhere")) -> AdapterVersion:
    return AdapterVersion(name, path, lambda: state)


def captured(seed: int) -> AdapterState:
    trainer = FakeTrainer(MODEL)
    trainer.create_adapter("a", LoraConfig(rank=2, seed=seed))
    state = trainer.capture("a", optimizer=False)
    for tensor in state.tensors.values():
        tensor[...] = np.random.default_rng(seed).standard_normal(tensor.shape)
    return state


def watched(sampler: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is sent to the process besides calls, as a list that grows."""
    sent: list[Any] = []
    send = sampler._calls._channel.send

    def watch(message: Any) -> None:
        sent.append(message)
        send(message)

    monkeypatch.setattr(sampler._calls._channel, "send", watch)
    return sent


async def test_many_samples_at_once_are_the_same_as_inline_and_tell_what_happens_once_on_fakes(start: Any) -> None:
    sampler, inline = start(), FakeSampler(MODEL)
    told: list[list[str]] = [[] for _ in range(40)]
    works = [
        work(
            at,
            samples=1 + at % 3,
            length=1 + 11 * at,
            prompt_logprobs=at % 2 == 0,
            topk_sample_logprobs=at % 4,
            begun=functools.partial(told[at].append, "begun"),
            ended=functools.partial(told[at].append, "ended"),
        )
        for at in range(40)
    ]
    outputs = await asyncio.gather(*map(sampler.sample, works))
    for each, output in zip(works, outputs, strict=True):
        assert same(output, await inline.sample(each))
    assert [each[0] for each in told] == ["begun"] * 40
    assert [each.count("begun") for each in told] == [2] * 40  # once here and once inline
    await inline.close()


def test_small_messages_go_together_and_keep_no_memory_of_large_ones_on_fakes() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sender, receiver = Channel(ours, os.getpid()), Channel(theirs, os.getpid())
    small = [Keep(f"small-{at}", np.full(100, at)) for at in range(9)]
    large = Keep("large", np.arange(2 * INLINE_BYTES))
    sender.send_joined([encode(each) for each in (*small[:5], large, *small[5:])])
    first = receiver.receive()
    assert len(first) == 5
    middle, last = receiver.receive(), receiver.receive()
    for kept, wanted in zip([*first, *last], small, strict=True):
        assert (kept.name, kept.value.tolist()) == (wanted.name, wanted.value.tolist())
        assert len(kept.value.base) <= INLINE_BYTES
    np.testing.assert_array_equal(middle.value, large.value)
    sender.close()
    receiver.close()


async def test_a_cancelled_sample_ends_in_the_process_on_fakes(start: Any, samplers: ModuleType) -> None:
    sampler, begun = start(), asyncio.Event()
    loop = asyncio.get_running_loop()
    waits = work(samplers.WAIT, samples=3, begun=lambda: loop.call_soon_threadsafe(begun.set))
    task = asyncio.create_task(sampler.sample(waits))
    await begun.wait()
    await sampler.sample(work(1))
    assert sampler.sequences_waiting == 3
    task.cancel()
    await asyncio.wait((task,))
    assert task.cancelled()
    await sampler.sample(work(1))
    assert sampler.sequences_waiting == 0


async def test_errors_are_those_of_the_sampler_on_fakes(start: Any, samplers: ModuleType) -> None:
    sampler = start()
    with pytest.raises(InvalidRequestError, match="5000 prompt tokens"):
        await sampler.sample(work(1, length=5000))
    with pytest.raises(InternalError, match="RuntimeError: torn"):
        await sampler.sample(work(samplers.FAIL))
    with pytest.raises(NotFoundError, match="its folder is gone"):
        await sampler.load_version(version("v", None))
    assert same(await sampler.sample(work(1)), await FakeSampler(MODEL).sample(work(1)))


async def test_a_factory_that_raises_ends_the_process_with_the_same_error_on_fakes(samplers: ModuleType) -> None:
    sampler = ProcessSampler(samplers.no_such_model)
    with pytest.raises(UnsupportedError, match="model_type 'gpt'"):
        sampler.load()
    await sampler.close()


async def test_a_version_in_memory_is_sent_once_and_forgotten_when_its_folder_is_there_on_fakes(
    start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler, inline = start(), FakeSampler(MODEL)
    state: AdapterState | None = captured(3)
    unwritten = AdapterVersion("run/1", tmp_path / "v1", lambda: state)
    sent = watched(sampler, monkeypatch)
    await sampler.load_version(unwritten)
    outputs = [await sampler.sample(work(seed, version=unwritten)) for seed in range(3)]
    assert [type(each) for each in sent] == [Keep]
    assert sampler.versions_loaded == 1
    for seed, output in enumerate(outputs):
        assert same(output, await inline.sample(work(seed, version=unwritten)))
        assert not same(output, await inline.sample(work(seed)))
    # The sampler drops it, and reads it again: from memory, and then from its folder.
    for _ in range(2):
        await sampler.remove_version(unwritten)
        assert sampler.versions_loaded == 0
        assert same(await sampler.sample(work(1, version=unwritten)), outputs[1])
        (tmp_path / "v1").mkdir(exist_ok=True)
        if state is not None:
            write_adapter(tmp_path / "v1", state)
        state = None
    assert [type(each).__name__ for each in sent] == ["Keep", "Forget"]
    await inline.close()


async def test_an_image_is_sent_once_with_what_the_sampler_reads_on_fakes(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler, inline = start(), FakeSampler(MODEL)
    pixels = np.random.default_rng(0).standard_normal((16, 3)).astype(np.float32)
    image = RenderedImage("0" * 64, 2, pixels, (1, 2, 4))
    prompt = RenderedInput(np.arange(5, dtype=np.int32), (ImagePlacement(1, image),))
    sent = watched(sampler, monkeypatch)
    for seed in range(3):
        asked = SampleWork(prompt, None, SamplingParams(max_tokens=5, seed=seed))
        assert same(await sampler.sample(asked), await inline.sample(asked))
    assert [type(each) for each in sent] == [KeepImage]
    assert sampler.images_encoded == inline.images_encoded
    without_item, with_item = (
        KeepImage.of(image),
        KeepImage.of(RenderedImage("0" * 64, 2, pixels, (1, 2, 4), vllm_item={"pixels": pixels}), sampler=True),
    )
    assert without_item.pixel_values.size == 48
    assert (with_item.pixel_values.size, with_item.vllm_item) == (0, {"pixels": pixels})
    await inline.close()


async def test_sleep_is_known_as_soon_as_it_has_ended_on_fakes(start: Any) -> None:
    sampler = start()
    assert sampler.can_sleep
    for _ in range(3):
        await sampler.sleep()
        assert sampler.asleep
        await sampler.wake()
        assert not sampler.asleep
    await sampler.sleep()
    os.kill(sampler.pids[0], signal.SIGKILL)
    assert sampler._group.wait(60)
    assert not sampler.asleep


@pytest.mark.parametrize("how", ["killed", "exits", "device"])
async def test_a_process_that_ends_fails_its_calls_and_the_next_one_serves_on_fakes(
    start: Any, samplers: ModuleType, how: str
) -> None:
    sampler = start()
    ends: list[bool] = []
    sampler.on_end = lambda: ends.append(sampler.ended)
    before = await sampler.sample(work(1))
    running = [asyncio.create_task(sampler.sample(work(samplers.WAIT))) for _ in range(5)]
    await asyncio.sleep(0)
    if how == "killed":
        os.kill(sampler.pids[0], signal.SIGKILL)
    elif how == "exits":
        running.append(asyncio.create_task(sampler.sample(work(samplers.EXIT))))
    else:
        running.append(asyncio.create_task(sampler.sample(work(samplers.LOSE_DEVICE))))
    done, _ = await asyncio.wait(running, timeout=60)
    assert len(done) == len(running)
    why = {
        "killed": "the sampler's process was ended by SIGKILL",
        "exits": "the sampler's process ended with exit code 3",
        "device": r"ended after an error of its device \(exit code 70\) \(the engine failed\)",
    }[how]
    for task in [*running, asyncio.create_task(sampler.sample(work(1)))]:
        with pytest.raises(ProcessEndedError, match=why):
            await task
    assert ends == [True]
    await sampler.remove_version(version("v", None))  # it has none
    await asyncio.to_thread(sampler.restart)
    await asyncio.to_thread(sampler.load)
    assert same(await sampler.sample(work(1)), before)
    assert not sampler.ended


@pytest.mark.parametrize("how", ["hangs", "stopped"])
async def test_a_process_that_hangs_is_killed_while_calls_wait_on_fakes(
    start: Any, samplers: ModuleType, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(async_calls, "PULSE_SECONDS", 0.1)
    sampler = start(timeout=1)
    sampler._calls._seconds = 1.0  # without the time of its start
    if how == "hangs":
        call = sampler.sample(work(samplers.HANG))
    else:
        os.kill(sampler.pids[0], signal.SIGSTOP)
        call = sampler.sample(work(1))
    with pytest.raises(ProcessEndedError, match="gave no answer for 1 s, and was killed"):
        await asyncio.wait_for(call, 60)


async def test_a_long_sample_is_no_hang_on_fakes(
    start: Any, samplers: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_calls, "PULSE_SECONDS", 0.1)
    sampler = start(timeout=1)
    sampler._calls._seconds = 1.0
    task = asyncio.create_task(sampler.sample(work(samplers.WAIT)))
    for _ in range(8):
        await asyncio.sleep(0.5)
        await sampler.pulse()
    assert not task.done()
    task.cancel()


async def test_close_ends_a_stopped_process_and_what_is_in_flight_on_fakes(start: Any, samplers: ModuleType) -> None:
    sampler = start()
    task = asyncio.create_task(sampler.sample(work(samplers.WAIT)))
    await asyncio.sleep(0.1)
    os.kill(sampler.pids[0], signal.SIGSTOP)
    await asyncio.wait_for(sampler.close(), 60)
    with pytest.raises(InternalError, match="the sampler was stopped"):
        await task
    with pytest.raises(InternalError, match="the sampler was stopped"):
        await sampler.sample(work(1))
    assert not sampler.ended


async def test_garbage_collection_leaves_what_a_sampler_has_loaded_alone_on_fakes(
    start: Callable[..., ProcessSampler], samplers: ModuleType
) -> None:
    """A full collection would hold up its steps."""
    sampler = start(samplers.heap_watcher)
    await sampler.pulse()
    assert sampler.sequences_waiting == 0
