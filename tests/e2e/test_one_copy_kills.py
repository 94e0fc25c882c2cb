"""Trainer and sampler read one copy of the weights, and one of them, or both, is killed at any moment of a gradient, a
step, a save, a new sampler version and a sample: what was acknowledged is there, and each number is the usual one."""

import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tinker_local.backend import InProcessBackend, ModelSource
from tinker_local.backend.process.process_group import ProcessEndedError
from tinker_local.types import ApiError, LoraConfig

from tests.conftest import TURN
from tests.e2e.test_one_copy_restarts import killed, one_copy
from tests.e2e.test_trainer_restarts import ADAM, DATA, GREEDY, PROMPT, trained

KILLS = int(os.environ.get("ONE_COPY_KILLS", "3"))
STAGES = ("gradient", "step", "save", "version", "sample")
VICTIMS = ("trainer", "sampler", "both")
STEPS = 2
"""That a run takes in a round."""


def working(call: Callable[[], None]) -> None:
    """Make `call`, again as long as it fails since an engine has just ended, which the server may not have seen."""
    until = time.monotonic() + 120
    while True:
        try:
            call()
        except (ApiError, ProcessEndedError):
            assert time.monotonic() < until
            time.sleep(0.1)
        else:
            return


class Rounds:
    """Runs that begin from one checkpoint. Of an undisturbed one: losses and norms of the gradient of its steps, and
    samples before the first and after each."""

    def __init__(self, driver: Any, name: str) -> None:
        self._driver = driver
        self._base = driver.backend.models.get(name)
        model = driver.create(name, LoraConfig(rank=4, seed=7))
        trained(driver, model, 2)
        self._start = driver.save(model, "start")
        self.outcomes: Counter[tuple[str, str, str]] = Counter()
        self._saves = 0
        model = self._new_run()
        self._losses: list[float] = []
        self._norms: list[float] = []
        self._samples, self._seconds = [self._sampled(driver.sampler(model))], dict[str, float]()
        for stage in STAGES:
            (_, call), began = self._prepared(stage), time.monotonic()
            call()
            self._seconds[stage] = time.monotonic() - began
        for _ in range(STEPS):
            self._losses.append(driver.gradient(model, DATA, "cross_entropy")[1])
            self._norms.append(driver.step(model, ADAM)["grad_norm"])
            self._samples.append(self._sampled(driver.sampler(model)))

    def _new_run(self) -> Any:
        return self._driver.resume(self._start, optimizer=True)

    def _sampled(self, sampler: Any) -> tuple[list[int], list[float]]:
        tokens, logprobs, _ = self._driver.sample(sampler, PROMPT, 1, GREEDY)[0]
        return tokens, np.asarray(logprobs).tolist()

    def _prepared(self, stage: str) -> tuple[Any, Callable[[], Any]]:
        """A new run and a call of `stage` in it; each but the first two come after one step, which is acknowledged."""
        driver, run = self._driver, self._new_run()
        if stage == "gradient":
            return run, lambda: driver.gradient(run, DATA, "cross_entropy")[1]
        driver.gradient(run, DATA, "cross_entropy")
        if stage == "step":
            return run, lambda: driver.step(run, ADAM)["grad_norm"]
        driver.step(run, ADAM)
        if stage == "save":
            return run, lambda: self._saved(run)
        if stage == "version":
            return run, lambda: driver.sampler(run)
        sampler = driver.sampler(run)
        return run, lambda: self._sampled(sampler)

    def _saved(self, run: Any) -> str:
        self._saves += 1
        return str(self._driver.save(run, f"saved-{self._saves}"))

    def disturb(self, stage: str, victim: str, moment: float) -> None:
        """Kill `victim` at `moment` of a call of `stage`, 0 where it begins and 1 about where it ends."""
        (run, call), driver = self._prepared(stage), self._driver
        with ThreadPoolExecutor(1) as pool:
            begun = threading.Event()

            def begin() -> Any:
                begun.set()
                return call()

            running = pool.submit(begin)
            begun.wait()
            time.sleep(moment * self._seconds[stage])
            engines = self._base.engines
            processes = {"trainer": engines.trainer, "sampler": engines.sampler._sampler}
            for name in processes if victim == "both" else (victim,):
                killed(processes[name])
            try:
                result = running.result(3600)
            except (ApiError, ProcessEndedError):
                self.outcomes[stage, victim, "refused"] += 1
            else:
                self.outcomes[stage, victim, "answered"] += 1
                if stage == "step":
                    result = self._checked_step(run, result, victim)
                working(lambda: self._check(stage, result))
        working(self._all_as_usual)
        assert driver.backend.problems() == []

    def _all_as_usual(self) -> None:
        run = self._new_run()
        assert trained(self._driver, run, STEPS) == self._losses
        assert self._sampled(self._driver.sampler(run)) == self._samples[STEPS]

    def _checked_step(self, run: Any, norm: float, victim: str) -> str | None:
        """Where the state after an acknowledged step is saved. None if the run has ended with the trainer, which alone
        had that state."""
        assert norm == self._norms[0]
        try:
            return self._saved(run)
        except (ApiError, ProcessEndedError):
            assert victim != "sampler"
            return None

    def _check(self, stage: str, result: Any) -> None:
        """That what was answered is right, and is there after the kill."""
        if stage == "gradient":
            assert result == self._losses[0]
        if stage in ("step", "save") and result is not None:
            run = self._driver.resume(result, optimizer=True)
            assert trained(self._driver, run, STEPS - 1) == self._losses[1:]
        if stage == "version":
            assert self._sampled(result) == self._samples[1]
        if stage == "sample":
            assert result == self._samples[1]


@pytest.mark.more
@pytest.mark.timeout(7200)
def test_no_kill_loses_what_was_acknowledged_or_changes_a_number(
    start_in_process: Any, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    """ONE_COPY_KILLS=100 for as many; of the whole suite, each commit has others."""
    source = ModelSource("tiny/text", str(tiny_models["tiny/text"]))
    options = replace(one_copy(tmp_path / "data"), max_adapters=20 * (KILLS + 10))  # no run of a round is finished
    backend = InProcessBackend([source], options)
    turn = int(os.environ[TURN] or "0", 16)
    rounds, chance = Rounds(start_in_process(backend), "tiny/text"), random.Random(turn)
    for number in range(turn, turn + KILLS):
        stage = STAGES[number % len(STAGES)]
        victim, moment, began = chance.choice(VICTIMS), chance.uniform(0, 1.2), time.monotonic()
        rounds.disturb(stage, victim, moment)
        print(f"{number - turn + 1}: {stage}, {victim} killed at {moment:.2f} of it, {time.monotonic() - began:.0f} s")
    print(dict(rounds.outcomes))
