"""Processes that are started before it is known what they will run."""

import functools
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tinker_local.backend import BackendOptions
from tinker_local.backend.fakes import FakeModel, FakeTrainer
from tinker_local.backend.models import load_engines
from tinker_local.backend.process import early, process_group
from tinker_local.backend.process.early import started_early
from tinker_local.backend.sampling.process_sampler import ProcessSampler
from tinker_local.backend.training.process_trainer import ProcessTrainer
from tinker_local.types import UnsupportedError

Started = list[Any]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    """All processes that are started, early or not."""
    found: Started = []
    for module in (early, process_group):
        start = module.start_process

        def noted(*args: Any, start: Any = start) -> Any:
            popen, channel = start(*args)
            found.append(popen)
            return popen, channel

        monkeypatch.setattr(module, "start_process", noted)
    return found


async def test_an_engine_takes_the_process_of_its_name_and_the_rest_are_ended(
    started: Started, samplers: ModuleType
) -> None:
    imports = {"sampler": "gc:collect", "trainer": "json"}
    with started_early(imports):
        early_ones = {each.pid for each in started}
        sampler = ProcessSampler(samplers.odd)
    assert len(early_ones) == len(started) == 2
    assert sampler.pids[0] in early_ones
    [unused] = [each for each in started if each.pid not in sampler.pids]
    unused.wait(20)
    sampler.load()
    assert sampler.stages[0].name == "imports"
    another = ProcessSampler(samplers.odd)  # as after an end of the first one
    assert len(started) == 3
    for each in (sampler, another):
        await each.close()


async def test_imports_that_fail_are_the_error_of_the_load_and_an_end_starts_another(
    started: Started, samplers: ModuleType
) -> None:
    with started_early({"sampler": "no_such_module"}):
        sampler = ProcessSampler(samplers.no_such_model)
        with pytest.raises(UnsupportedError, match="not supported"):
            sampler.load()
    with started_early({"sampler": "os:abort"}):
        started[-1].wait(20)
        sampler = ProcessSampler(samplers.odd)
        sampler.load()
    assert len(started) == 3
    await sampler.close()


def test_one_with_another_environment_is_started_anew(started: Started) -> None:
    make = functools.partial(FakeTrainer, FakeModel("fake"))
    with started_early({"trainer": "json"}):
        trainer = ProcessTrainer(make, environments=[{"CUDA_VISIBLE_DEVICES": "1"}])
        assert len(started) == 2
        trainer.close()
    started[0].wait(20)


def test_engines_in_processes_are_started_early_where_there_is_one_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def names(gpus: int, **options: Any) -> list[str]:
        monkeypatch.setattr(load_engines, "memory_of_gpus", lambda: dict.fromkeys(range(gpus), (0, 1)))
        return [*load_engines._imports(BackendOptions(data_dir=tmp_path, **options))]

    assert names(1) == ["sampler", "trainer"]
    assert names(1, sampler="inline") == ["trainer"]
    assert names(0) == names(2) == []  # each rank and replica has another environment
    assert names(0, sampler="process", trainer="process") == ["sampler", "trainer"]
    assert names(2, sampler="process") == names(1, train_gpus=(0,)) == []
