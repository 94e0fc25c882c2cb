"""Engines in processes load side by side, and a start that fails does not wait for the other one."""

import functools
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tinker_local.backend import BackendOptions
from tinker_local.backend.models.load_engines import load_both, starting
from tinker_local.backend.sampling.process_sampler import ProcessSampler
from tinker_local.backend.training.process_trainer import ProcessTrainer
from tinker_local.types import UnsupportedError


def test_both_load_at_the_same_time_only_if_told_to() -> None:
    met = threading.Barrier(2)
    order: list[str] = []

    def together(name: str) -> Any:
        met.wait(20)
        return name

    def alone(name: str) -> Any:
        order.append(name)
        return name

    def of(load: Callable[[str], Any], at_once: bool) -> Any:
        both = load_both(functools.partial(load, "sampler"), functools.partial(load, "trainer"), at_once=at_once)
        assert order == []  # in turn, nothing is loaded before the function is called
        sampler, _, trainer, _ = both()
        return sampler, trainer

    assert of(together, at_once=True) == ("sampler", "trainer")
    assert of(alone, at_once=False) == ("sampler", "trainer")
    assert order == ["sampler", "trainer"]


@pytest.mark.more
@pytest.mark.parametrize("broken", ["sampler", "trainer"])
def test_a_start_whose_one_engine_fails_ends_the_other_one_that_still_loads(
    broken: str, tmp_path: Path, samplers: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[ProcessSampler | ProcessTrainer] = []
    for kind in (ProcessSampler, ProcessTrainer):
        begin = kind._begin

        def noted(self: Any, begin: Callable[[Any], None] = begin) -> None:
            started.append(self)
            begin(self)

        monkeypatch.setattr(kind, "_begin", noted)
    makes = {name: samplers.no_such_model if name == broken else samplers.hang for name in ("sampler", "trainer")}
    began = time.monotonic()
    with (
        pytest.raises(UnsupportedError, match="not supported"),
        starting(BackendOptions(data_dir=tmp_path), "process", makes["sampler"], "process", makes["trainer"]) as loads,
    ):
        load_both(*loads, at_once=True)()
    assert time.monotonic() - began < 60  # the other one would load for ten minutes
    assert len(started) == 2
    assert all(engine._group.wait(10) for engine in started)
