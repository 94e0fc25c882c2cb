"""Two ranks of one sampler, each with half of every layer, answer as one process does."""

import asyncio
import functools
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tinker_local.backend.models.load_engines import make_vllm_rank
from tinker_local.backend.process.process_group import ProcessEndedError
from tinker_local.backend.sampling.process_sampler import ProcessSampler
from tinker_local.backend.sampling.sampler import SampleWork
from tinker_local.types import InvalidRequestError, SampleOutput, SamplingParams

from tests.sampling.sampling_answers import EVERYTHING, TEXT
from tests.sampling.test_handover import Unwritten
from tests.sampling.test_in_flight import Target, Watch, check_text

pytestmark = pytest.mark.more


@pytest.fixture(scope="module")
def two_ranks(text: Any) -> Iterator[ProcessSampler]:
    """A sampler of `text`'s model in two processes."""
    options = replace(text.options, ranks=2, cached_adapters=4)
    sampler = ProcessSampler(functools.partial(make_vllm_rank, options), ranks=2)
    try:
        sampler.load()
        yield sampler
    finally:
        sampler.end()


def same(text: Any, one: SampleOutput, other: SampleOutput) -> None:
    for a, b in zip(one.sequences, other.sequences, strict=True):
        assert a.tokens.tolist() == b.tokens.tolist()
        text.same(np.asarray(a.logprobs), np.asarray(b.logprobs))
    assert one.prompt_logprobs is not None
    assert other.prompt_logprobs is not None
    text.same(one.prompt_logprobs[1:], other.prompt_logprobs[1:])


async def test_weights_move_under_running_sequences_on_both_ranks_at_once(
    two_ranks: ProcessSampler, text: Any, tmp_path: Path
) -> None:
    target = Target(text, tmp_path, two_ranks)
    target.write(3)
    await target.save("first")
    watch = Watch()
    running = asyncio.create_task(target.sample("first", 700, num_samples=2, drawn=watch))
    for number in range(2):
        await watch.until(watch.seen + 40)
        await target.save(f"later {number}")
    for sequence in (await running).sequences:
        assert check_text(sequence) == [1, 2, 3]
    others = [text.adapter(tmp_path / f"o{n}", EVERYTHING, 4, seed=n).version for n in range(5)]
    for version in others:  # more than the ranks keep in memory, so that the target is made again
        await two_ranks.load_version(version)
    assert check_text((await target.sample("first", 8)).sequences[0]) == [3]
    await two_ranks.end_target(target.name)
    for version in others:
        await two_ranks.remove_version(version)


@pytest.mark.rotated(4)
async def test_both_ranks_compute_keys_again_where_the_server_says_so(text: Any, tmp_path: Path) -> None:
    options = replace(text.options, ranks=2, cached_adapters=4, moves_keys=True)
    sampler = ProcessSampler(functools.partial(make_vllm_rank, options), ranks=2)
    try:
        sampler.load()
        target = Target(text, tmp_path, sampler)
        target.write(2)
        await target.save("first")
        watch = Watch()
        running = asyncio.create_task(target.sample("first", 700, num_samples=2, drawn=watch))
        await watch.until(60)
        await target.save("second")
        for sequence in (await running).sequences:
            assert check_text(sequence) == [1, 2]
            assert not any(span.on_older_keys for span in sequence.drawn_under or ())
    finally:
        sampler.end()


async def test_two_ranks_answer_as_one_does_with_adapters_from_memory_and_disk(
    two_ranks: ProcessSampler, text: Any, tmp_path: Path
) -> None:
    on_disk = [text.adapter(tmp_path / f"d{n}", EVERYTHING, 4, seed=n).version for n in range(6)]
    unwritten = Unwritten(text.adapter(tmp_path / "memory", EVERYTHING, 8, seed=9)).version
    versions = [None, unwritten, *on_disk]

    def work(version: Any, at: int) -> SampleWork:
        params = SamplingParams(max_tokens=12, temperature=1.0, top_p=0.9, seed=at, stop=())
        return SampleWork(text.prompt([*TEXT[at:], at + 1]), version, params, 3, prompt_logprobs=True)

    for version in versions[1:]:
        await two_ranks.load_version(version)
    works = [work(version, at) for at in range(4) for version in versions]  # more adapters than fit into a step
    found = await asyncio.gather(*map(two_ranks.sample, works))
    wanted = await asyncio.gather(*map(text.sampler.sample, works))
    for one, other in zip(found, wanted, strict=True):
        same(text, one, other)

    # Without a seed, all ranks draw the same; otherwise they would notice, and end.
    free = SampleWork(text.prompt(TEXT), unwritten, SamplingParams(max_tokens=30, stop=()), 8)
    drawn = [(await two_ranks.sample(free)).sequences for _ in range(3)]
    assert len({tuple(one.tokens.tolist()) for each in drawn for one in each}) > 20
    cancelled = asyncio.create_task(two_ranks.sample(free))
    await asyncio.sleep(0.05)
    cancelled.cancel()
    same(text, await two_ranks.sample(works[1]), wanted[1])

    for version in versions[1:]:
        await two_ranks.remove_version(version)
        await text.sampler.remove_version(version)
    assert two_ranks.versions_loaded == 0


async def test_an_adapter_of_other_widths_is_refused_by_ranks_that_hold_half_of_each(
    two_ranks: ProcessSampler, text: Any, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    pids = two_ranks.pids
    version = text.adapter(tmp_path / "narrow", r"mlp\.down_proj$", 4).version
    file = version.path / "adapter_model.safetensors"
    tensors = load_file(file)
    halves = {name: (each[:, ::2] if "lora_A" in name else each).contiguous() for name, each in tensors.items()}
    save_file(halves, file)
    with pytest.raises(InvalidRequestError, match="wide in the adapter"):
        await two_ranks.load_version(version)
    params = SamplingParams(max_tokens=3, stop=())
    assert len((await two_ranks.sample(SampleWork(text.prompt(TEXT), None, params))).sequences) == 1
    assert two_ranks.pids == pids


def shared_memory() -> set[str]:
    """Names of memory that would stay behind."""
    return {file.name for file in Path("/dev/shm").iterdir() if file.name.startswith("psm_") or "cpushm" in file.name}


async def test_a_rank_that_is_killed_ends_all_and_all_start_again(
    two_ranks: ProcessSampler, text: Any, tmp_path: Path
) -> None:
    of_others = shared_memory()  # what programs of this machine left that were killed
    params = SamplingParams(max_tokens=200, seed=3, stop=())
    work = SampleWork(text.prompt(TEXT), None, params, 4)
    for rank in (1, 0):
        before = two_ranks.pids
        running = asyncio.create_task(two_ranks.sample(work))
        await asyncio.sleep(0.1)
        os.kill(before[rank], signal.SIGKILL)
        with pytest.raises(ProcessEndedError, match="SIGKILL"):
            await running
        for pid in before:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)
        await asyncio.to_thread(two_ranks.restart)
        await asyncio.to_thread(two_ranks.load)
        assert not set(before) & set(two_ranks.pids)
        found, wanted = await two_ranks.sample(work), await text.sampler.sample(work)
        assert shared_memory() <= of_others
        assert [one.tokens.tolist() for one in found.sequences] == [one.tokens.tolist() for one in wanted.sequences]


async def test_two_ranks_see_images_as_one_does(vl: Any, noise: Callable[..., Any], tmp_path: Path) -> None:
    version = vl.adapter(tmp_path / "v1", EVERYTHING, 4).version
    prompt = vl.prompt([5, 6], noise(64, 64, 1), [7, 8], noise(96, 64, 2), [9])
    params = SamplingParams(max_tokens=8, seed=1, stop=())
    works = [SampleWork(prompt, each, params, 2, prompt_logprobs=True) for each in (None, version)]
    sampler = ProcessSampler(functools.partial(make_vllm_rank, replace(vl.options, ranks=2)), ranks=2)
    try:
        await asyncio.to_thread(sampler.load)
        for work in works:
            same(vl, await sampler.sample(work), await vl.sampler.sample(work))
        assert sampler.images_encoded == 2
    finally:
        await sampler.close()
    await vl.sampler.remove_version(version)
