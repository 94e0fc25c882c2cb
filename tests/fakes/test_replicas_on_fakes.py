"""A server whose sampler is several replicas: one that ends or hangs is replaced while the others answer."""

import functools
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tinker_local.backend import BackendOptions, ModelSource
from tinker_local.backend.fakes import FakeModel, FakeRenderer, FakeTrainer
from tinker_local.backend.models.load_engines import Replicas, load_fake, starting
from tinker_local.backend.models.placement import environment_of
from tinker_local.backend.models.served_models import Engines
from tinker_local.backend.options import parse_gpus
from tinker_local.backend.sampling.process_sampler import ProcessSampler
from tinker_local.backend.sampling.replica_pool import ReplicaPool

from tests.fakes.test_sampler_supervision_on_fakes import tokens, with_seed
from tests.http.conftest import BASE, Api
from tests.http.supervised_apps import apps, served, works_again

pytestmark = pytest.mark.more

Start = Callable[..., Awaitable[Api]]


@pytest.fixture
async def start(tmp_path: Path, samplers: ModuleType) -> AsyncIterator[Start]:
    """`start()`: an app with two replicas, whose samplers are odd."""

    def load(source: ModelSource, options: BackendOptions) -> Engines:
        model = FakeModel(source.name)
        make_sampler = functools.partial(samplers.odd, source.name)
        make_trainer = functools.partial(FakeTrainer, model)
        with starting(options, "process", Replicas([make_sampler] * 2), "inline", make_trainer) as (
            load_sampler,
            load_trainer,
        ):
            sampler, trainer = load_sampler(), load_trainer()
        return Engines(FakeRenderer(model), trainer, sampler, arch="fake", tolerance=1e-4, sequences=512)

    async with apps(tmp_path / "data") as start_app:

        async def begin(**options: Any) -> Api:
            return await start_app(load, (BASE,), **{"sample_gpus": (0, 1), **options})

        yield begin


def replicas(api: Api) -> list[ProcessSampler]:
    pool = served(api).pool
    assert pool is not None
    found = [each for each in pool.replicas if isinstance(each, ProcessSampler)]
    assert len(found) == len(pool.replicas)
    return found


async def exported(api: Api) -> dict[str, float]:
    """The metrics of replicas, by name and replica."""
    lines = (await api.get("../../metrics")).text.splitlines()
    found = [line.rsplit(" ", 1) for line in lines if line.startswith("tinker_local_replica_")]
    return {name.replace(f'model="{BASE}",', ""): float(value) for name, value in found}


async def all_work(api: Api) -> None:
    """Wait until all replicas work again."""
    await api.until(lambda: all(each.works for each in served(api).metrics().replicas.values()), 60)


async def test_while_a_killed_replica_is_replaced_the_other_answers_for_all_tenants_on_fakes(
    start: Start, samplers: ModuleType
) -> None:
    api = await start()
    tenants = [await api.model(await api.session(), 1) for _ in range(3)]
    sampling = [await api.nameless(model, 1, seed) for seed, model in enumerate(tenants, 1)]
    sampling.append(await api.base_sampler())
    before = [await tokens(api, await api.sample(each, 0, num_samples=3)) for each in sampling]
    assert [replica.versions_loaded for replica in replicas(api)] == [3, 3], "a version is loaded by all"

    stuck = [await api.sample(each, 1, sampling_params=with_seed(samplers.WAIT)) for each in sampling]
    await api.until(lambda: [replica.sequences_waiting for replica in replicas(api)] == [2, 2])
    long = [await api.sample(each, 2, sampling_params=with_seed(5, 3000)) for each in sampling]
    killed, other = replicas(api)
    untouched = other.pids
    os.kill(killed.pids[0], signal.SIGKILL)
    await api.until(lambda: served(api).sampler_supervisions[0].restarts == 1)
    answer = await api.get("healthz")
    assert served(api).sampler_supervisions[0].problem is not None, "the new process was ready too soon for this test"
    assert answer.json() == {"status": "ok"}, "sampling works"
    again = [await tokens(api, await api.sample(each, 3, num_samples=3)) for each in sampling]
    assert again == before
    assert served(api).metrics().sampler_works
    for each, request in zip(sampling, long, strict=True):
        repeated = await api.sample(each, 4, sampling_params=with_seed(5, 3000))
        assert await tokens(api, request) == await tokens(api, repeated)
    await api.until(lambda: other.sequences_waiting == 4)
    await all_work(api)
    assert (other.pids, killed.pids == other.pids) == (untouched, False)
    assert [(each.restarts, each.works) for each in served(api).metrics().replicas.values()] == [(1, True), (0, True)]
    found = await exported(api)
    assert found['tinker_local_replica_restarts_total{replica="0"}'] == 1
    assert found['tinker_local_replica_up{replica="1"}'] == 1
    assert found['tinker_local_replica_sequences{replica="1"}'] == 4
    assert found['tinker_local_replica_kv_cache_used_ratio{replica="1"}'] == 0.04
    assert served(api).metrics().kv_cache_used == 0.02, "the mean"
    assert [await tokens(api, await api.sample(each, 5, num_samples=3)) for each in sampling] == before
    for each in sampling:  # a new prompt goes to the replica with the fewest, which reads the version again
        await tokens(api, await api.sample(each, 6, (7, 8, 20)))
    await api.until(lambda: killed.versions_loaded == 3)

    os.kill(other.pids[0], signal.SIGKILL)  # the second end for those that wait
    failure = await api.failure(stuck[0])
    assert "the sampler replica 1's process was ended by SIGKILL" in failure
    assert "the second time that this request was in it" in failure
    await all_work(api)


async def test_a_replica_that_hangs_is_replaced_and_its_samples_come_from_another_on_fakes(
    start: Start, samplers: ModuleType
) -> None:
    api = await start(sampler_timeout=1.0)
    sampler = await api.base_sampler()
    wanted = [await tokens(api, await api.sample(sampler, at, sampling_params=with_seed(at))) for at in range(8)]
    for replica in replicas(api):
        assert replica._calls is not None
        replica._calls._seconds = 2.0
    hanging, other = replicas(api)
    os.kill(hanging.pids[0], signal.SIGSTOP)
    requests = [await api.sample(sampler, 10 + at, sampling_params=with_seed(at)) for at in range(8)]
    assert [await tokens(api, request) for request in requests] == wanted
    await all_work(api)
    assert [each.restarts for each in served(api).metrics().replicas.values()] == [1, 0]
    assert not other.ended


async def test_without_any_replica_samples_wait_for_the_next_on_fakes(start: Start) -> None:
    api = await start()
    sampler = await api.base_sampler()
    wanted = await tokens(api, await api.sample(sampler, 0))
    for replica in replicas(api):
        os.kill(replica.pids[0], signal.SIGKILL)
    await api.until(lambda: served(api).problem is not None)
    answer = await api.get("healthz")
    assert answer.status_code == 503
    assert "the sampler replica 0's process was ended by SIGKILL" in answer.json()["detail"]
    assert "the sampler replica 1's process was ended by SIGKILL" in answer.json()["detail"]
    assert await tokens(api, await api.sample(sampler, 1)) == wanted
    await works_again(api)
    await all_work(api)


async def test_a_replica_that_computes_something_else_is_not_served_on_fakes(
    start: Start, samplers: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "tinker_local.backend.models.load_engines.environment_of",
        lambda gpus: {samplers.ANOTHER_MODEL: "1"} if tuple(gpus) == (1,) else {},
    )
    with pytest.raises(ValueError, match="trainer and sampler compute this model differently"):
        await start()


def test_replicas_are_processes_that_see_the_gpus_of_the_option_on_fakes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    engines = load_fake(ModelSource(BASE, BASE), BackendOptions(data_dir=tmp_path, sample_gpus=(2, 5)))
    assert isinstance(engines.sampler, ReplicaPool)
    assert engines.sequences == 512
    environments = []
    for replica in engines.sampler.replicas:
        assert isinstance(replica, ProcessSampler)
        text = Path(f"/proc/{replica.pids[0]}/environ").read_bytes().split(b"\0")
        environments += [each for each in text if each.startswith(b"CUDA_VISIBLE_DEVICES=")]
        replica.end()
    assert environments == [b"CUDA_VISIBLE_DEVICES=2", b"CUDA_VISIBLE_DEVICES=5"]
    with pytest.raises(ValueError, match="--sampler inline and --sample-gpus exclude each other"):
        load_fake(ModelSource(BASE, BASE), BackendOptions(data_dir=tmp_path, sample_gpus=(0, 1), sampler="inline"))
    one = load_fake(ModelSource(BASE, BASE), BackendOptions(data_dir=tmp_path, sample_gpus=(3,))).sampler
    assert isinstance(one, ProcessSampler), "one GPU: no pool"
    one.end()


def test_gpus_are_counted_among_those_that_the_server_sees_with_fake_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, 6,GPU-8f2a")
    assert environment_of([1, 2]) == {"CUDA_VISIBLE_DEVICES": "6,GPU-8f2a"}
    assert parse_gpus("0,2-4, 7") == (0, 2, 3, 4, 7)
    for wrong in ("", "a", "1,,2", "3-1", "1,0-2", "-1"):
        with pytest.raises(ValueError, match=r"expected numbers|ends before it begins|names a GPU twice"):
            parse_gpus(wrong)
