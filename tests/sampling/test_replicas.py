"""Replicas of a real model, in processes, answer as one sampler does."""

import asyncio
import functools
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tinker_local.backend.models.load_engines import make_vllm_sampler
from tinker_local.backend.sampling.process_sampler import ProcessSampler
from tinker_local.backend.sampling.replica_pool import ReplicaPool
from tinker_local.backend.sampling.sampler import SampleWork
from tinker_local.types import SampleOutput, SamplingParams

from tests.sampling.sampling_answers import EVERYTHING, TEXT
from tests.sampling.test_handover import Unwritten

pytestmark = pytest.mark.more


@pytest.fixture(scope="module")
def replicas(text: Any) -> Any:
    """Two samplers of `text`'s model, each in a process."""
    make = functools.partial(make_vllm_sampler, text.options)
    started = [ProcessSampler(make, name=f"sampler replica {at}") for at in range(2)]
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(ProcessSampler.load, started))
    yield started
    for replica in started:
        replica.end()


def same(text: Any, one: SampleOutput, other: SampleOutput) -> None:
    for a, b in zip(one.sequences, other.sequences, strict=True):
        assert a.tokens.tolist() == b.tokens.tolist()
        text.same(np.asarray(a.logprobs), np.asarray(b.logprobs))
    assert one.prompt_logprobs is not None
    assert other.prompt_logprobs is not None
    text.same(one.prompt_logprobs[1:], other.prompt_logprobs[1:])


async def test_two_replicas_answer_as_one_sampler_with_the_adapters_of_different_tenants_on_both(
    replicas: list[ProcessSampler], text: Any, tmp_path: Path
) -> None:
    pool = ReplicaPool(replicas, text.options.max_sequences)
    alice = text.adapter(tmp_path / "alice", EVERYTHING, 4, seed=1).version
    bob = Unwritten(text.adapter(tmp_path / "bob", EVERYTHING, 8, seed=2)).version
    versions = (None, alice, bob)
    for version in versions[1:]:
        await pool.load_version(version)
        await text.sampler.load_version(version)
    assert [replica.versions_loaded for replica in replicas] == [2, 2]

    def work(version: Any, at: int, replica: int | None = None) -> SampleWork:
        params = SamplingParams(max_tokens=12, temperature=1.0, top_p=0.9, seed=at, stop=())
        prompt = text.prompt([*TEXT[at:], at + 1])
        return SampleWork(prompt, version, params, 3, prompt_logprobs=True, replica=replica)

    for version in versions:  # each alone
        wanted = await text.sampler.sample(work(version, 1))
        for replica in range(2):
            same(text, await pool.sample(work(version, 1, replica)), wanted)
    works = [work(version, at) for at in range(8) for version in versions]  # together, wherever they go
    before = [replica.pids for replica in replicas]
    found = await asyncio.gather(*map(pool.sample, works))
    wanted = await asyncio.gather(*map(text.sampler.sample, works))
    for one, other in zip(found, wanted, strict=True):
        same(text, one, other)
    assert [replica.pids for replica in replicas] == before

    os.kill(replicas[0].pids[0], signal.SIGKILL)  # the other has everything
    assert replicas[0]._group.wait(60)
    for one, other in zip(await asyncio.gather(*map(pool.sample, works)), wanted, strict=True):
        same(text, one, other)
    for version in versions[1:]:
        await pool.remove_version(version)
        await text.sampler.remove_version(version)
    assert replicas[1].versions_loaded == 0
