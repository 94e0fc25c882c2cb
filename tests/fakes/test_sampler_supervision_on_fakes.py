"""A sampler's process that ends or hangs is started again, and what was in it is sampled once more."""

import asyncio
import functools
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tinker_local.backend import BackendOptions, ModelSource
from tinker_local.backend.adapters.adapter import AdapterVersion
from tinker_local.backend.fakes import FakeMemory, FakeModel, FakeRenderer, FakeSampler, FakeTrainer
from tinker_local.backend.models import supervision
from tinker_local.backend.models.served_models import Engines
from tinker_local.backend.process import calls
from tinker_local.backend.process.process_group import ProcessEndedError
from tinker_local.backend.sampling.process_sampler import ProcessSampler
from tinker_local.backend.scheduling.memory_sharing import Gate, MemorySharing, WakingSampler
from tinker_local.types import InternalError

from tests.http.conftest import BASE, Api
from tests.http.supervised_apps import OTHER, apps, served, works_again

pytestmark = pytest.mark.more

Start = Callable[..., Awaitable[Api]]


@pytest.fixture
async def start(tmp_path: Path, samplers: ModuleType) -> AsyncIterator[Start]:
    """`start(models=(...))`: an app whose samplers are in processes."""

    async def begin(models: tuple[str, ...] = (BASE,), **options: Any) -> Api:
        def load(source: ModelSource, options: BackendOptions) -> Engines:
            model = FakeModel(source.name)
            sampler = ProcessSampler(functools.partial(samplers.odd, source.name), timeout=options.sampler_timeout)
            sampler.load()
            return Engines(FakeRenderer(model), FakeTrainer(model), sampler, arch="fake", tolerance=1e-4)

        return await start_app(load, models, **options)

    async with apps(tmp_path / "data") as start_app:
        yield begin


def process_of(api: Api, name: str = BASE) -> ProcessSampler:
    waking = served(api, name).engines.sampler
    assert isinstance(waking, WakingSampler)
    assert isinstance(waking._sampler, ProcessSampler)
    return waking._sampler


async def kill(api: Api) -> None:
    """Kill the sampler's process, and wait until the server has seen it."""
    os.kill(process_of(api).pids[0], signal.SIGKILL)
    await api.until(lambda: served(api).problem is not None)


def with_seed(seed: int, tokens: int = 4) -> dict[str, Any]:
    return {"max_tokens": tokens, "temperature": 1.0, "top_k": -1, "top_p": 1.0, "seed": seed}


async def tokens(api: Api, request: str) -> list[list[int]]:
    return [sequence.tokens.tolist() for sequence in (await api.result(request)).sequences]


async def test_what_was_in_a_killed_process_is_sampled_again_and_nobody_else_notices_on_fakes(
    start: Start, samplers: ModuleType
) -> None:
    api = await start(models=(BASE, OTHER))
    session = await api.session()
    model = await api.model(session)
    sampler, versions = await api.base_sampler(session), [await api.nameless(model, 1, 1)]
    there = await api.model(session, 1, base_model=OTHER)
    api.backend.folders.flush()  # this one is read from its folder, the next from memory
    versions.append(await api.nameless(model, 2, 2))
    before = [await tokens(api, await api.sample(each, 0, num_samples=3)) for each in (sampler, *versions)]
    untouched = process_of(api, OTHER).pids

    stuck = await api.sample(sampler, 1, sampling_params=with_seed(samplers.WAIT))
    await api.until(lambda: process_of(api).sequences_waiting == 1)
    long = [await api.sample(sampler, at, sampling_params=with_seed(at, 3000)) for at in range(2, 6)]
    await kill(api)
    answer = await api.get("healthz")
    assert (answer.status_code, answer.json()["status"]) == (503, "recovering")
    assert answer.json()["detail"].startswith(f"{BASE}: the sampler's process was ended by SIGKILL")
    assert (await api.get("livez")).status_code == 200
    counted = api.backend.metrics()
    assert [counted[name].sampler_works for name in (BASE, OTHER)] == [False, True]
    queued = [await api.sample(each, 7, num_samples=3) for each in (sampler, *versions)]
    await api.result(await api.gradient(model, 3))
    await api.result(await api.gradient(there, 1))
    assert served(api).problem is not None, "the new process was ready too soon for this test"

    assert [await tokens(api, request) for request in queued] == before
    for at, request in zip(range(2, 6), long, strict=True):
        again = await api.sample(sampler, 10 + at, sampling_params=with_seed(at, 3000))
        assert await tokens(api, request) == await tokens(api, again)
    await works_again(api)
    assert (await api.get("healthz")).json() == {"status": "ok"}
    counted = api.backend.metrics()
    assert [counted[name].sampler_restarts for name in (BASE, OTHER)] == [1, 0]
    assert counted[BASE].sampler_works
    assert process_of(api, OTHER).pids == untouched
    # What waited in the process waits in the next one; after a second end it fails.
    await api.until(lambda: process_of(api).sequences_waiting == 1)
    await kill(api)
    assert "server: the sampler's process was ended by SIGKILL" in (failure := await api.failure(stuck))
    assert "the second time that this request was in it" in failure
    await works_again(api)


async def test_a_request_that_ends_every_process_fails_alone_on_fakes(start: Start, samplers: ModuleType) -> None:
    api = await start()
    sampler = await api.base_sampler()
    wanted = await tokens(api, await api.sample(sampler, 0))
    fatal = await api.sample(sampler, 1, sampling_params=with_seed(samplers.EXIT))
    assert "ended with exit code 3, the second time that this request was in it" in await api.failure(fatal)
    assert await tokens(api, await api.sample(sampler, 2)) == wanted


async def test_samples_do_not_wait_for_a_start_that_is_far_away_on_fakes(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "SHORT_LIFE", 1000.0)
    monkeypatch.setattr(supervision, "PATIENCE", 0.0)
    monkeypatch.setattr(supervision, "FIRST_PAUSE", 600.0)
    monkeypatch.setattr(supervision, "LONGEST_PAUSE", 600.0)
    monkeypatch.setattr(calls, "CLOSE_SECONDS", 0.5)
    api = await start()
    sampler = await api.base_sampler()
    await kill(api)
    await works_again(api)
    await kill(api)
    failure = await api.failure(await api.sample(sampler, 0))
    assert "that was 2 times in a row soon after its start, so the next start waits 600 s" in failure


@pytest.mark.parametrize("state", ["stopped", "sleeps", "restarts"])
async def test_a_server_stops_within_seconds_whatever_its_sampler_does_on_fakes(
    start: Start, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "CLOSE_SECONDS", 0.5)
    api = await start()
    sampler = await api.base_sampler()
    if state == "restarts":
        await kill(api)
    else:
        os.kill(process_of(api).pids[0], signal.SIGSTOP)
    request = await api.sample(sampler, 0)
    if state == "sleeps":
        sleep = asyncio.create_task(served(api).memory_sharing._put_sampler_to_sleep())
        await asyncio.sleep(0)
    pids, began = process_of(api).pids, time.monotonic()
    await api.backend.close()
    # The limit of a test is the bound: each state lasts 600 s by itself. In practice it is one to three seconds.
    assert time.monotonic() - began < 120
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    operation = api.backend.operations.get(request)
    assert operation is not None
    assert "the server was stopped" in str(operation._future.exception())
    if state == "sleeps":
        await asyncio.wait((sleep,))


class EndingSampler(FakeSampler):
    """Its process ends at the first call, and the supervision closes `gate` and opens it for the next one."""

    gate: Gate
    ends = 1
    down = False

    async def load_version(self, version: AdapterVersion) -> None:
        loop = asyncio.get_running_loop()
        if self.ends:
            self.ends -= 1
            loop.call_soon(self.gate.close)
            loop.call_later(0.01, self.gate.open)
            self.down = True
            loop.call_later(0.01, setattr, self, "down", False)
        if self.down:
            raise ProcessEndedError("the sampler's process ended")


async def test_a_call_that_comes_just_after_the_end_waits_for_the_next_process_on_fakes() -> None:
    model = FakeModel(BASE)
    sampler, trainer = EndingSampler(model), FakeTrainer(model)
    sharing = MemorySharing(trainer, sampler)
    sampler.gate = sharing.sampler_gate
    await WakingSampler(sampler, sharing).load_version(AdapterVersion("v", Path("/nowhere")))
    assert not sampler.down
    await sharing.close()
    await sampler.close()
    trainer.close()


class MortalSampler(FakeSampler):
    """Its memory is free while it is `dead`."""

    def __init__(self, model: FakeModel, memory: FakeMemory) -> None:
        super().__init__(model, memory)
        self.memory = memory
        self.dead = False

    @property
    def asleep(self) -> bool:
        return not self.dead and self.memory.asleep

    async def sleep(self) -> None:
        raise InternalError("there is nothing to put to sleep")


async def test_the_trainer_may_use_the_memory_of_a_sampler_that_has_ended_until_the_next_loads_on_fakes() -> None:
    model, memory = FakeModel(BASE), FakeMemory(100, 60)
    sampler, trainer = MortalSampler(model, memory), FakeTrainer(model, memory)
    sharing = MemorySharing(trainer, sampler)
    memory.asleep = sampler.dead = True
    sharing.sampler_gate.close()
    waiting = asyncio.create_task(WakingSampler(sampler, sharing).pulse())
    async with sharing._trainers_turn():
        assert await sharing._put_sampler_to_sleep()
        memory.train(80, "datum")
        loaded: list[int] = []

        def load() -> None:
            loaded.append(memory.cached)
            memory.wake()
            sampler.dead = False

        loading = asyncio.create_task(sharing.load_sampler(load))
        await asyncio.sleep(0.05)
        assert not loaded, "the sampler was loaded beside a call with its memory"
    await loading
    assert loaded == [0], "the trainer kept what it did not use"
    assert sharing.sampler_gate.is_open
    assert not sharing.asleep
    await waiting
    await sharing.close()
    with pytest.raises(InternalError, match="the sampler was closed"):
        async with sharing.awake():
            pass
    await sampler.close()
    trainer.close()


async def test_health_says_that_sampling_stalls_while_no_step_ends_on_fakes(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "WATCHED", 0.01)
    monkeypatch.setattr(supervision, "STALLED", 0.2)
    api = await start()
    await works_again(api)
    (pid,) = process_of(api).pids
    os.kill(pid, signal.SIGSTOP)
    try:
        await api.until(lambda: served(api).problem is not None)
        answer = await api.get("healthz")
        assert answer.status_code == 503
        assert f"{BASE}: sampling stalls: no step has ended for " in answer.json()["detail"]
    finally:
        os.kill(pid, signal.SIGCONT)
    await works_again(api)
