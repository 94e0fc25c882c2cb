"""A stop ends in time whatever the engines do, saves what it can, and names what it could not."""

import asyncio
import functools
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest
import tinker
from tinker_local.backend import BackendOptions, ModelSource
from tinker_local.backend.control import autosaves, life_cycle
from tinker_local.backend.control.training_runs import count_of_steps
from tinker_local.backend.fakes import FakeMemory, FakeModel, FakeRenderer
from tinker_local.backend.models.served_models import Engines, ServedModel, ServedModels
from tinker_local.backend.process import async_calls, calls
from tinker_local.backend.process.process_engine import ProcessEngine
from tinker_local.backend.sampling.process_sampler import ProcessSampler
from tinker_local.backend.scheduling.memory_sharing import WakingSampler
from tinker_local.backend.training.process_trainer import ProcessTrainer

from tests.http.conftest import BASE, Api, StartApi
from tests.http.supervised_apps import OTHER, apps, children, served
from tests.http.test_http_autosaves_on_fakes import told, trained
from tests.http.test_http_memory_sharing_on_fakes import NEEDS_ALL, SAMPLERS, SIZE, datum
from tests.http.test_http_restart_on_fakes import train

Start = Callable[..., Awaitable[Api]]

PATIENCE = 60.0
"""Seconds. What a stop must not wait for lasts 600."""


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module `process_engines`, as the processes import it."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    import process_engines  # type: ignore[import-not-found]

    return cast(ModuleType, process_engines)


@pytest.fixture
async def start(tmp_path: Path, engines: ModuleType, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Start]:
    """`start(**options)`: an app whose engines are in processes, which may hang for long."""
    for module in (calls, async_calls):
        monkeypatch.setattr(module, "CLOSE_SECONDS", 0.5)

    def load(source: ModelSource, options: BackendOptions) -> Engines:
        trainer = ProcessTrainer(functools.partial(engines.trainer, source.name), timeout=options.trainer_timeout)
        sampler = ProcessSampler(functools.partial(engines.sampler, source.name), timeout=options.sampler_timeout)
        trainer.load()
        sampler.load()
        return Engines(FakeRenderer(FakeModel(source.name)), trainer, sampler, arch="fake", tolerance=1e-4)

    async with apps(tmp_path / "data") as start_app:
        yield lambda **options: start_app(load, (BASE,), trainer_timeout=600.0, sampler_timeout=600.0, **options)


def processes(api: Api) -> dict[str, ProcessEngine]:
    waking, trainer = served(api).engines.sampler, served(api).engines.trainer
    assert isinstance(waking, WakingSampler)
    assert isinstance(waking._sampler, ProcessSampler)
    assert isinstance(trainer, ProcessTrainer)
    return {"trainer": trainer, "sampler": waking._sampler}


async def bring_about(api: Api, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`state`: which engine, and what it does until the stop."""
    which, what = state.split()
    for name in ("trainer", "sampler") if which == "both" else (which,):
        engine = processes(api)[name]
        (pid,) = engine.pids
        if what == "stopped":
            os.kill(pid, signal.SIGSTOP)
        else:
            monkeypatch.setenv("TINKER_LOCAL_TEST_SLOW_START", name)
            os.kill(pid, signal.SIGKILL)
            await api.until(lambda engine=engine, pid=pid: engine.pids != [pid])  # type: ignore[misc]


def pids_of(api: Api) -> list[int]:
    return [pid for engine in processes(api).values() for pid in engine.pids]


def assert_gone(pids: list[int]) -> None:
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize(
    "state",
    [
        "both stopped",
        *(
            pytest.param(state, marks=pytest.mark.more)
            for state in ("trainer stopped", "sampler stopped", "trainer restarts", "sampler restarts")
        ),
    ],
)
async def test_a_stop_with_nothing_unsaved_waits_for_no_engine_on_fakes(
    start: Start, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = await start(stop_timeout=600.0)
    session = await api.session()
    model, sampler = await api.model(session), await api.base_sampler(session)
    at = await trained(api, model)
    await api.save(model, at, "mine")
    await bring_about(api, state, monkeypatch)
    request = await (api.sample(sampler, 0) if state.startswith("sampler") else api.gradient(model, at + 1))
    pids, said = pids_of(api), told(api)
    async with asyncio.timeout(PATIENCE):
        await api.backend.stop()
        await api.backend.close()
    assert said == []
    assert_gone(pids)
    operation = api.backend.operations.get(request)
    assert operation is not None
    assert "the server was stopped" in str(operation._future.exception())


@pytest.mark.more
@pytest.mark.parametrize("state", ["trainer stopped", "both stopped"])
async def test_a_stop_names_what_a_stopped_trainer_keeps_and_ends_on_fakes(
    start: Start, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = await start(stop_timeout=0.5)
    session = await api.session()
    saved, fresh = await api.model(session, 0), await api.model(session, 1)
    at = await trained(api, saved)
    path = await api.save(saved, at, "mine")
    at = await trained(api, saved, at + 1, steps=2)
    await trained(api, fresh)
    await bring_about(api, state, monkeypatch)
    pids, said = pids_of(api), told(api)
    async with asyncio.timeout(PATIENCE):
        await api.backend.stop()
        assert said == [
            "saving 2 training runs, for 0.25 s at most; a second signal skips this",
            f"NOT saved: 1 optimizer step of {fresh}, which has no checkpoint: there was no time left",
            f"NOT saved: 2 optimizer steps of {saved} since {path}: there was no time left",
        ]
        failure = await api.failure(await api.step(saved, at))
        assert "the server was stopped, and 2 optimizer steps are lost that no checkpoint has" in failure
        assert path in failure
        await api.backend.close()
    assert_gone(pids)


@pytest.mark.more
@pytest.mark.parametrize("state", ["sampler stopped", "sampler restarts"])
async def test_a_stop_saves_whatever_the_sampler_does_on_fakes(
    start: Start, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = await start(stop_timeout=600.0)
    session = await api.session()
    model, sampler = await api.model(session), await api.base_sampler(session)
    await trained(api, model)
    await bring_about(api, state, monkeypatch)
    await api.sample(sampler, 0)
    pids, said = pids_of(api), told(api)
    async with asyncio.timeout(PATIENCE):
        await api.backend.stop()
        assert said[1:] == [f"saved tinker://{model}/weights/autosave after 1 optimizer step"]
        await api.backend.close()
    assert_gone(pids)


@pytest.mark.parametrize("state", ["samples", "falls asleep", "wakes"])
async def test_a_stop_saves_although_the_trainer_waits_for_a_sampler_that_hangs_on_fakes(
    start_api: StartApi, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(life_cycle, "SAMPLER_SECONDS", 0.1)
    api = await start_api(memory=FakeMemory(SIZE, SAMPLERS), stop_timeout=600.0)
    session = await api.session()
    model, sampler = await api.model(session), await api.base_sampler(session)
    go, hangs = asyncio.Event(), asyncio.Event()

    async def hang() -> None:
        hangs.set()
        await go.wait()

    steps = 1
    at = await trained(api, model)
    if state == "samples":
        api.sampler.hold.clear()
        await api.sample(sampler, 0)
        await api.until(lambda: api.sampler.running == 1)
    if state == "wakes":
        await api.result(await api.gradient(model, at, [datum(NEEDS_ALL)]))
        await api.result(await api.step(model, at + 1))
        assert api.sampler.asleep
        monkeypatch.setattr(api.sampler, "wake", hang)
        await api.sample(sampler, 0)
        await asyncio.wait_for(hangs.wait(), 30)
        steps = 2
    else:
        monkeypatch.setattr(api.sampler, "sleep", hang)
        await api.gradient(model, at, [datum(NEEDS_ALL)])
        await api.until(lambda: served(api).memory_sharing.trainer_has_memory)
    said = told(api)
    try:
        async with asyncio.timeout(PATIENCE):
            await api.backend.stop()
        words = count_of_steps(steps)
        assert said[1:] == [f"saved tinker://{model}/weights/autosave after {words}"]
        failure = await api.failure(await api.step(model, at + 5))
        assert f"tinker://{model}/weights/autosave" in failure
    finally:
        go.set()
        api.sampler.hold.set()


async def test_a_stop_ends_the_process_of_a_sampler_whose_memory_the_trainer_waits_for_on_fakes(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(life_cycle, "SAMPLER_SECONDS", 0.1)
    api = await start(stop_timeout=600.0)
    model = await api.model()
    at = await trained(api, model)
    (pid,) = processes(api)["sampler"].pids
    os.kill(pid, signal.SIGSTOP)
    waiting = await api.gradient(model, at, [datum(NEEDS_ALL)])
    await api.until(lambda: served(api).memory_sharing.trainer_has_memory)
    said = told(api)
    async with asyncio.timeout(PATIENCE):
        await api.backend.stop()
    assert said[1:] == [f"saved tinker://{model}/weights/autosave after 1 optimizer step"]
    assert_gone([pid])
    (supervision,) = served(api).sampler_supervisions
    assert supervision.restarts == 0
    assert "the sampler did not make room for the trainer in time" in await api.failure(waiting)


async def test_a_trainer_that_hangs_keeps_no_other_base_model_from_saving_on_fakes(
    start_api: StartApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = await start_api(models=(BASE, OTHER))
    there = await api.model(base_model=OTHER)
    await trained(api, there)
    hanging = [await api.model() for _ in range(autosaves.AT_ONCE)]
    for model in hanging:
        await trained(api, model)
    go = threading.Event()
    monkeypatch.setattr(api.trainer, "copy_adapter", lambda *_: go.wait(PATIENCE))
    said = told(api)
    stop = asyncio.create_task(api.backend.stop())
    try:
        await api.until(lambda: len(said) > 1)
        assert said[1:] == [f"saved tinker://{there}/weights/autosave after 1 optimizer step"]
        api.backend.skip_saving()
        await stop
    finally:
        go.set()
    assert [line.split()[:2] for line in said[2:]] == [["NOT", "saved:"]] * len(hanging)


async def test_base_models_stop_at_once_on_fakes() -> None:
    """Each may have engines that hang."""
    all_stop = asyncio.Barrier(3)

    class FakeModelThatStops:
        def __init__(self, name: str) -> None:
            self.names = (name,)

        async def close(self) -> None:
            await all_stop.wait()

    models = ServedModels()
    for name in "abc":
        models.add(cast(ServedModel, FakeModelThatStops(name)))
    async with asyncio.timeout(10):
        await models.close()


@pytest.mark.more
def test_sigterm_ends_a_server_whose_engines_are_stopped_and_names_what_is_lost_on_fakes(serve: Any) -> None:
    server = serve(
        *("--fake", "--model", BASE, "--stop-timeout", "2"),
        *("--trainer", "process", "--trainer-timeout", "600", "--sampler", "process", "--sampler-timeout", "600"),
    )
    client = tinker.ServiceClient(base_url=server.url).create_lora_training_client(base_model=BASE, rank=4)
    train(client, 1)
    path = client.save_state("mine").result().path
    train(client, 2)
    pids = children(server.process.pid)
    assert len(pids) == 2
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(PATIENCE) == 0
    assert_gone(pids)
    end = time.monotonic() + PATIENCE
    while "stopped" not in server.lines:
        assert time.monotonic() < end
        time.sleep(0.01)
    lost = f"NOT saved: 2 optimizer steps of {path.split('/')[2]} since {path}: there was no time left"
    assert server.lines[-3:] == [
        "saving 1 training runs, for 1 s at most; a second signal skips this",
        lost,
        "stopped",
    ]
