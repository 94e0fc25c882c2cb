"""Replicas of the sampler on other hosts: stand-ins and relays in processes of this host, without Ray, on fakes."""

import asyncio
import functools
import json
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tinker_local.backend import BackendOptions, ModelSource
from tinker_local.backend.adapters.adapter import AdapterState, AdapterVersion
from tinker_local.backend.adapters.adapter_files import CONFIG, WEIGHTS, write_adapter
from tinker_local.backend.adapters.version_content import version_content
from tinker_local.backend.fakes import FakeModel, FakeRenderer, FakeTrainer
from tinker_local.backend.models import load_engines
from tinker_local.backend.models.load_engines import Replicas, starting
from tinker_local.backend.models.placement import layouts
from tinker_local.backend.models.served_models import Engines
from tinker_local.backend.process import ray_replicas
from tinker_local.backend.process.async_calls import AsyncCalls
from tinker_local.backend.process.async_child import Tell, serve_async_calls
from tinker_local.backend.process.calls import Calls
from tinker_local.backend.process.child import LOAD, Inbox
from tinker_local.backend.process.process_group import ProcessGroup
from tinker_local.backend.sampling.process_sampler import Elsewhere, ProcessSampler
from tinker_local.types import InvalidRequestError, LoraConfig

from tests.fakes.test_replicas_on_fakes import all_work, replicas
from tests.fakes.test_sampler_supervision_on_fakes import tokens
from tests.http.conftest import BASE, Api
from tests.http.supervised_apps import apps, children, served
from tests.training.relay_hosts import RelayHosts, RelayReplicas, rank_elsewhere, sampler_elsewhere
from tests.training.test_ranks_elsewhere_on_fakes import gone, running

pytestmark = pytest.mark.more

Start = Callable[..., Awaitable[Api]]


def hosts_of(folder: Path) -> dict[int, int]:
    """The process of the relays of each replica that runs."""
    found = [tuple(map(int, file.name.split("-"))) for file in folder.glob("*-*")]
    return {replica: pid for replica, pid in found if running(pid)}


def restarted(api: Api, times: int) -> bool:
    """Whether the replica elsewhere has been started again so often."""
    return served(api).sampler_supervisions[1].restarts == times


@pytest.fixture
async def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Start]:
    """`start(tp=1)`: an app with a replica here and one elsewhere, of so many processes."""
    folder = tmp_path / "hosts"
    folder.mkdir()

    def others(options: BackendOptions, count: int, processes: int) -> RelayHosts | None:
        return RelayHosts("h:1", count - 1, processes, gpus=False, folder=folder) if count > 1 else None

    monkeypatch.setattr(load_engines, "other_hosts", others)
    monkeypatch.setattr(load_engines, "RayReplicas", RelayReplicas)

    def load(source: ModelSource, options: BackendOptions) -> Engines:
        model = FakeModel(source.name)
        make = sampler_elsewhere if options.sample_tp == 1 else rank_elsewhere
        samplers = Replicas([functools.partial(make, model)])
        make_trainer = functools.partial(FakeTrainer, model)
        with starting(options, "process", samplers, "inline", make_trainer) as (load_sampler, load_trainer):
            sampler, trainer = load_sampler(), load_trainer()
        return Engines(FakeRenderer(model), trainer, sampler, arch="fake", tolerance=1e-4, sequences=512)

    async with apps(tmp_path / "data") as start_app:

        async def begin(tp: int = 1) -> Api:
            gpus = tuple(range(tp))
            return await start_app(load, (BASE,), sample_gpus=gpus, sample_tp=tp, sample_hosts=2, ray_address="h:1")

        yield begin


async def answered(api: Api, sampler: str, first: int, prompts: int = 3) -> list[list[list[int]]]:
    """The answers to four prompts, of which each replica has two."""
    asked = [await api.sample(sampler, first + at, (prompts + at, 8, 20), num_samples=2) for at in range(4)]
    return [await tokens(api, each) for each in asked]


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.more)])
async def test_a_replica_elsewhere_samples_from_what_it_is_sent_and_starts_again_when_its_host_ends_on_fakes(
    start: Start, tmp_path: Path, tp: int
) -> None:
    api = await start(tp)
    here, there = replicas(api)
    folder = tmp_path / "hosts"
    ((_, host),) = hosts_of(folder).items()
    assert len(children(host)) == len(there.pids) == tp
    session = await api.session()
    model = await api.model(session, 1)
    await api.result(await api.gradient(model, 1))
    await api.result(await api.step(model, 2))
    sampler = await api.nameless(model, 3, 1)  # compared with the trainer on each replica
    wanted = await answered(api, sampler, 0)
    path = await api.named(model, 4, "named")  # whose folder is written
    body = {"session_id": session, "sampling_session_seq_id": 9, "model_path": path}
    named = str((await api.ok("create_sampling_session", body))["sampling_session_id"])
    assert await answered(api, named, 0) == wanted
    later = await answered(api, sampler, 10, prompts=10)
    assert [each.versions_loaded for each in (here, there)] == [2, 2]

    untouched = here.pids
    for number, victim in enumerate(("host", "process"), 1):
        ((_, host),) = hosts_of(folder).items()
        processes = children(host)
        os.kill(host if victim == "host" else processes[-1], signal.SIGKILL)
        await api.until(functools.partial(restarted, api, number))
        assert gone([host, *processes])
        assert await answered(api, sampler, 20 * number) == wanted, "the other one answers"
        await all_work(api)
        assert await answered(api, sampler, 20 * number + 10, prompts=10) == later, "those that it had are its again"
        assert await answered(api, named, 20 * number, prompts=10) == later
        assert there.versions_loaded == 2
    assert here.pids == untouched
    ((_, host),) = hosts_of(folder).items()
    await api.backend.close()
    assert gone([host])


async def test_a_replica_without_a_host_waits_while_the_other_answers_on_fakes(start: Start, tmp_path: Path) -> None:
    api = await start()
    folder = tmp_path / "hosts"
    sampler = await api.base_sampler()
    wanted = await answered(api, sampler, 0)
    (folder / "full").write_text("0")
    ((_, host),) = hosts_of(folder).items()
    os.kill(host, signal.SIGKILL)
    await api.until(lambda: restarted(api, 1))
    assert (await api.get("healthz")).json() == {"status": "ok"}
    assert await answered(api, sampler, 10) == wanted
    assert [each.works for each in served(api).metrics().replicas.values()] == [True, False]
    assert hosts_of(folder) == {}
    (folder / "full").unlink()
    await all_work(api)
    assert await answered(api, sampler, 20) == wanted
    assert len(hosts_of(folder)) == 1


async def test_why_a_replica_has_no_place_is_the_error_of_the_start_on_fakes(start: Start, tmp_path: Path) -> None:
    (tmp_path / "hosts" / "refused").write_text("0")
    with pytest.raises(ConnectionError, match="Ray says no"):
        await start()


def broken() -> Any:
    raise RuntimeError("this one is broken")


@pytest.mark.parametrize("waits_for", ["full", pytest.param("slow", marks=pytest.mark.more)])
def test_a_broken_replica_is_the_error_of_the_start_while_another_waits_for_a_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits_for: str
) -> None:
    hosts = RelayHosts("h:1", 1, 1, gpus=False, folder=tmp_path)
    (tmp_path / waits_for).write_text("0")
    monkeypatch.setattr(load_engines, "other_hosts", lambda *_: hosts)
    monkeypatch.setattr(load_engines, "RayReplicas", RelayReplicas)
    options = BackendOptions(sample_gpus=(0,), sample_hosts=2, ray_address="h:1")
    with (
        pytest.raises(RuntimeError, match="this one is broken"),
        starting(options, "process", Replicas([broken]), "inline", functools.partial(FakeTrainer, FakeModel(BASE))) as (
            load_sampler,
            _,
        ),
    ):
        load_sampler()


def test_replicas_start_and_end_while_ray_is_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_replicas, "_PLACER_SECONDS", 3600.0)
    (tmp_path / "slow").write_text("0")
    places = RelayReplicas(RelayHosts("h:1", 2, 1, gpus=False, folder=tmp_path), 1)
    make = functools.partial(sampler_elsewhere, FakeModel(BASE))
    for replica in [ProcessSampler(make, elsewhere=Elsewhere(places, at, version_content)) for at in range(2)]:
        replica.end()


def test_an_older_start_of_a_replica_leaves_the_place_of_a_newer_one(tmp_path: Path) -> None:
    (tmp_path / "slow").write_text("0")
    places = RelayReplicas(RelayHosts("h:1", 1, 1, gpus=False, folder=tmp_path), 1)
    ((older,), (newer,)) = places.find(0), places.find(0)
    (tmp_path / "slow").unlink()
    try:
        with os.fdopen(older) as pipe:
            assert "started again" in pipe.read()
        with os.fdopen(newer) as pipe:
            assert isinstance(json.loads(pipe.read()), list)
        assert (tmp_path / "places").read_text().split() == ["0"]
    finally:
        places.ended()
        for host in hosts_of(tmp_path).values():
            os.kill(host, signal.SIGKILL)


@pytest.mark.parametrize("damaged", [CONFIG, WEIGHTS])
def test_a_version_that_cannot_be_read_is_refused_before_it_is_sent(tmp_path: Path, damaged: str) -> None:
    tensors = {"m.lora_A.weight": np.zeros((1, 2), np.float32), "m.lora_B.weight": np.zeros((2, 1), np.float32)}
    write_adapter(tmp_path, AdapterState("base", LoraConfig(rank=1), ("m",), tensors))
    (tmp_path / damaged).write_bytes(b"{}")
    with pytest.raises(InvalidRequestError, match=r"sampler version v: its files in .* cannot be read"):
        version_content(AdapterVersion("v", tmp_path))


def nothing(_: Any) -> dict[str, Any]:
    return {}


class Keeper:
    """Says which values its process has."""

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox

    async def held(self, _: Tell) -> list[str]:
        return sorted(self._inbox.values)

    async def hold(self, _: Tell, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def pulse(self, _: Tell) -> None:
        pass

    async def close(self) -> None:
        pass


async def test_a_process_elsewhere_keeps_the_last_values_and_those_that_calls_need() -> None:
    program = functools.partial(serve_async_calls, make=Keeper, describe=bool, state=nothing)
    group = ProcessGroup("keeper", [program])
    Calls(group).call(60, LOAD)
    calls = AsyncCalls(group, 60.0, values_kept=2)
    read: list[str] = []

    def value(name: str) -> np.ndarray[Any, Any]:
        read.append(name)
        return np.zeros(4)

    async def use(name: str, seconds: float = 0.0) -> None:
        await calls.call("hold", seconds, values={name: functools.partial(value, name)})

    try:
        long = asyncio.create_task(use("a", 3600.0))
        await asyncio.sleep(0)
        for name in "bcdeb":
            await use(name)
        await calls.call("held")  # a message forgets what was too much at the one before
        assert await calls.call("held") == ["a", "b", "e"]
        await use("b")
        assert read == ["a", "b", "c", "d", "e", "b"]
        long.cancel()
        await use("f")
        await calls.call("held")
        assert await calls.call("held") == ["b", "f"]
    finally:
        await asyncio.to_thread(calls.close)


def test_hosts_that_sample_need_an_address_and_gpus_that_do_not_train() -> None:
    with pytest.raises(ValueError, match="--sample-hosts 2: it needs --ray-address"):
        layouts(BackendOptions(sample_hosts=2), 0, 1)
    (one, *_) = layouts(BackendOptions(sample_hosts=2, ray_address="h:1"), 1, 1)
    assert (one.train_gpus, one.sample_gpus) == ((), (0,)), "one GPU has a replica in a process"
    both = BackendOptions(train_hosts=2, sample_hosts=2, ray_address="h:1")
    with pytest.raises(ValueError, match="a GPU cannot do both, and GPUs 0-3 would"):
        layouts(both, 4, 4)
    apart = BackendOptions(train_hosts=2, sample_hosts=2, ray_address="h:1", train_gpus=(0, 1))
    assert layouts(apart, 4, 4)[0].sample_gpus == (2, 3)
