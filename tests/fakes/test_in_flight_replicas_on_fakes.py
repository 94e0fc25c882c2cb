"""Weights that move, in several replicas of a sampler, and in processes that end."""

import functools
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tinker_local.backend.adapters.adapter import AdapterState, AdapterVersion
from tinker_local.backend.fakes import FakeModel, FakeSampler, FakeTrainer
from tinker_local.backend.process.process_group import ProcessEndedError
from tinker_local.backend.rendering.rendered_input import RenderedInput
from tinker_local.backend.sampling.process_sampler import ProcessSampler
from tinker_local.backend.sampling.replica_pool import ReplicaPool
from tinker_local.backend.sampling.sampler import MovingWeights, SampleWork
from tinker_local.types import InternalError, LoraConfig, SamplingParams

MODEL = FakeModel("fake/bigram")
TARGET = "run/in-flight"


def version(number: int) -> AdapterVersion:
    """Of random weights, without a folder."""
    trainer = FakeTrainer(MODEL)
    trainer.create_adapter("a", LoraConfig(rank=2, seed=number))
    state: AdapterState = trainer.capture("a", optimizer=False)
    for tensor in state.tensors.values():
        tensor[...] = np.random.default_rng(number).standard_normal(tensor.shape)
    return AdapterVersion(f"run/{number}", Path("/nowhere"), lambda: state)


def work(number: int, replica: int | None = None, since: int = 1) -> SampleWork:
    """Of a client that needs save `since`, when `number` is the newest."""
    moving = MovingWeights(TARGET, number, since, "client")
    params = SamplingParams(max_tokens=12, temperature=0.0, stop=())
    prompt = RenderedInput(np.array([5, 9], np.int32))
    return SampleWork(prompt, version(number), params, moving=moving, replica=replica)


async def drawn(sampler: FakeSampler | ProcessSampler | ReplicaPool, asked: SampleWork) -> tuple[list[int], list[int]]:
    """The tokens, and the versions that drew them."""
    (sequence,) = (await sampler.sample(asked)).sequences
    assert sequence.drawn_under is not None
    return sequence.tokens.tolist(), [span.version for span in sequence.drawn_under]


async def expected(number: int) -> list[int]:
    """The tokens of a snapshot of version `number`."""
    sampler = FakeSampler(MODEL)
    (sequence,) = (await sampler.sample(replace(work(number), moving=None))).sequences
    await sampler.close()
    return sequence.tokens.tolist()


class Replica(FakeSampler):
    """`refuses`: its next publication fails."""

    ready = True
    refuses = False

    async def publish(self, target: str, version: AdapterVersion, number: int) -> None:
        if self.refuses:
            self.refuses = False
            raise InternalError("no memory")
        await super().publish(target, version, number)


async def test_every_replica_goes_on_and_one_that_was_away_gets_the_newest_with_its_next_sample_on_fakes() -> None:
    replicas = [Replica(MODEL) for _ in range(3)]
    pool = ReplicaPool(replicas, 8)
    await pool.publish(TARGET, version(1), 1)
    replicas[2].ready = False
    await pool.publish(TARGET, version(2), 2)
    replicas[2].ready = True
    for replica in range(3):
        assert await drawn(pool, work(2, replica)) == (await expected(2), [2])
    await pool.end_target(TARGET)
    assert [replica._targets for replica in replicas] == [{}, {}, {}]
    await pool.close()


async def test_a_sample_that_is_late_on_its_way_takes_nothing_back_on_fakes() -> None:
    """It names the version of its start; the replica has a newer one."""
    replicas = [Replica(MODEL)]
    pool = ReplicaPool(replicas, 8)
    await pool.publish(TARGET, version(3), 3)
    await pool.publish(TARGET, version(2), 2)
    assert await drawn(pool, work(2)) == (await expected(3), [3])
    await pool.close()


async def test_a_replica_that_refuses_a_version_is_told_and_the_others_have_it_on_fakes() -> None:
    replicas = [Replica(MODEL) for _ in range(2)]
    pool = ReplicaPool(replicas, 8)
    await pool.publish(TARGET, version(1), 1)
    replicas[0].refuses = True
    with pytest.raises(InternalError, match="no memory"):
        await pool.publish(TARGET, version(2), 2)
    assert [replica._targets[TARGET].now[0] for replica in replicas] == [1, 2]
    await pool.publish(TARGET, version(3), 3)
    assert [replica._targets[TARGET].now[0] for replica in replicas] == [3, 3]
    await pool.close()


@pytest.fixture
async def process() -> AsyncIterator[ProcessSampler]:
    sampler = ProcessSampler(functools.partial(FakeSampler, MODEL))
    sampler.load()
    yield sampler
    await sampler.close()


@pytest.mark.more
async def test_a_process_that_was_killed_serves_the_newest_version_when_it_is_back_on_fakes(
    process: ProcessSampler,
) -> None:
    assert process.why_not_in_flight == ""
    await process.publish(TARGET, version(1), 1)
    await process.publish(TARGET, version(2), 2)
    assert await drawn(process, work(2)) == (await expected(2), [2])
    os.kill(process.pids[0], signal.SIGKILL)
    with pytest.raises(ProcessEndedError):
        await process.publish(TARGET, version(3), 3)
    await process.end_target(TARGET)  # of a process that has ended: nothing
    process.restart()
    process.load()
    assert await drawn(process, work(3)) == (await expected(3), [3])
