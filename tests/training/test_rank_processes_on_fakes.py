"""A trainer in several processes: they end together and start again together, and training runs go on."""

import asyncio
import functools
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tinker_local.backend import BackendOptions, ModelSource
from tinker_local.backend.fakes import FakeModel, FakeRenderer, FakeSampler
from tinker_local.backend.fakes.fake_trainer import fake_of_rank
from tinker_local.backend.models import supervision
from tinker_local.backend.models.load_engines import load_fake
from tinker_local.backend.models.served_models import Engines
from tinker_local.backend.process import process_group
from tinker_local.backend.training.process_trainer import ProcessTrainer
from tinker_local.types import UnsupportedError

from tests.http.conftest import BASE, Api, datum
from tests.http.supervised_apps import OTHER, apps, children, served, works_again

pytestmark = pytest.mark.more

RANKS = 3

Start = Callable[..., Awaitable[Api]]


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """`start(models=(...), factory=..., **options)`: an app whose trainers are in `RANKS` processes each."""

    async def begin(models: tuple[str, ...] = (BASE,), factory: Any = None, **options: Any) -> Api:
        def load(source: ModelSource, options: BackendOptions) -> Engines:
            model = FakeModel(source.name)
            make = factory or functools.partial(fake_of_rank, model)
            trainer = ProcessTrainer(make, ranks=RANKS, timeout=options.trainer_timeout)
            trainer.load()
            return Engines(FakeRenderer(model), trainer, FakeSampler(model), arch="fake", tolerance=1e-4)

        return await start_app(load, models, **options)

    async with apps(tmp_path / "data") as start_app:
        yield begin


def pids_of(api: Api, name: str = BASE) -> list[int]:
    trainer = served(api, name).engines.trainer
    assert isinstance(trainer, ProcessTrainer)
    return trainer.pids


async def losses(api: Api, model: str, seq_id: int, steps: int) -> list[float]:
    """The losses of some steps from `seq_id` on."""
    found = []
    for at in range(seq_id, seq_id + 2 * steps, 2):
        result = await api.result(await api.gradient(model, at))
        found.append(float(result.metrics["loss:sum"]))
        await api.result(await api.step(model, at + 1))
    return found


def exist(pids: list[int]) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


async def kill_in_a_step(api: Api, rank: int) -> float:
    """Kill a rank in the middle of a step, and wait until new ranks work; the seconds until the error."""
    data = [datum([5, 9, 20], logprobs=[-1.0] * 2, advantages=[1.0] * 2)]
    waiting = await api.gradient(await api.model(), 1, loss_fn="importance_sampling", data=data)
    await api.until(lambda: bool(served(api).scheduler.running))
    before = pids_of(api)
    start = time.monotonic()
    os.kill(before[rank], signal.SIGKILL)
    assert "the trainer's process was ended by SIGKILL" in await api.failure(waiting)
    seconds = time.monotonic() - start
    assert not exist(before)
    await works_again(api)
    assert len(exist(pids_of(api))) == RANKS
    return seconds


async def test_a_rank_killed_in_a_step_ends_all_and_runs_go_on_from_their_save_on_fakes(  # starts fifteen processes
    start: Start, trainers: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "SHORT_LIFE", 0.0)
    api = await start(models=(BASE, OTHER), factory=trainers.hanging_rank)
    session = await api.session()
    continued = [await api.model(session, number) for number in range(RANKS + 1)]
    elsewhere = await api.model(session, len(continued), base_model=OTHER)
    for model in continued:
        await losses(api, model, 1, 2)
        await api.save(model, 5, "one")
    others, found = pids_of(api, OTHER), []
    for rank, model in enumerate(continued[1:]):
        await kill_in_a_step(api, rank)
        await losses(api, elsewhere, 2 * rank + 1, 1)
        found.append(await losses(api, model, 6, 2))
    assert found == [await losses(api, continued[0], 6, 2)] * RANKS
    assert pids_of(api, OTHER) == others


async def test_a_rank_that_is_stopped_ends_all_when_the_time_limit_is_over_on_fakes(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_group, "TICK", 0.1)
    api = await start(trainer_timeout=1.0)
    model = await api.model()
    before = pids_of(api)
    os.kill(before[1], signal.SIGSTOP)
    assert "gave no answer for 1 s, and was killed" in await api.failure(await api.gradient(model, 1))
    await works_again(api)
    assert not exist(before)
    await losses(api, await api.model(), 1, 1)


def test_train_gpus_are_the_ranks_that_each_see_one_of_them_on_fakes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    source = ModelSource(BASE, BASE)
    for gpus in ((2, 5), (3,)):
        trainer = load_fake(source, BackendOptions(data_dir=tmp_path, train_gpus=gpus)).trainer
        assert isinstance(trainer, ProcessTrainer)
        environments = [Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") for pid in trainer.pids]
        trainer.end()
        visible = [[each for each in found if each.startswith(b"CUDA_VISIBLE")] for found in environments]
        assert visible == [[f"CUDA_VISIBLE_DEVICES={gpu}".encode()] for gpu in gpus]
    with pytest.raises(ValueError, match="--trainer inline and --train-gpus exclude each other"):
        load_fake(source, BackendOptions(data_dir=tmp_path, train_gpus=(0, 1), trainer="inline"))


async def test_a_rank_that_cannot_load_is_the_error_of_all_on_fakes(trainers: ModuleType) -> None:
    trainer = ProcessTrainer(trainers.rank_that_cannot_load, ranks=RANKS)
    loading = asyncio.create_task(asyncio.to_thread(trainer.load))
    done, _ = await asyncio.wait([loading], timeout=120)
    if not done:
        trainer.end()
    with pytest.raises(UnsupportedError, match="not supported"):
        await loading
    assert not exist(trainer.pids)


KILLS = int(os.environ.get("TINKER_LOCAL_TEST_KILLS", "20"))


async def test_random_kills_in_a_step_leave_nothing_behind_on_fakes(
    start: Start, trainers: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "SHORT_LIFE", 0.0)
    api = await start(factory=trainers.hanging_rank, session_timeout=3600.0)
    seed = random.randrange(2**32)
    print(f"{KILLS} kills, seed {seed}")
    generator = random.Random(seed)
    model = await api.model()
    await losses(api, model, 1, 1)
    await api.save(model, 3, "one")
    first = set(children(os.getpid())) - set(pids_of(api))
    seconds = [await kill_in_a_step(api, generator.randrange(RANKS)) for _ in range(KILLS)]
    assert set(children(os.getpid())) - set(pids_of(api)) == first
    await losses(api, model, 4, 1)
    print(f"seconds from the kill to the error: at most {max(seconds):.2f}")
