"""Engines for tests of how a server stops. Their processes import this file, so it contains no tests."""

import os
import time

from tinker_local.backend.fakes import FakeMemory, FakeModel, FakeSampler, FakeTrainer

SLOW_START = "TINKER_LOCAL_TEST_SLOW_START"
"""Variable of the environment: the engine whose process takes 600 s to start."""

SIZE, SAMPLERS = 100, 60
"""Positions that fit into memory, and that the sampler takes of them. Each process counts for itself."""


def trainer(name: str) -> FakeTrainer:
    _start("trainer")
    return FakeTrainer(FakeModel(name), FakeMemory(SIZE, SAMPLERS))


def sampler(name: str) -> FakeSampler:
    _start("sampler")
    return FakeSampler(FakeModel(name), FakeMemory(SIZE, SAMPLERS))


def _start(engine: str) -> None:
    if os.environ.get(SLOW_START) == engine:
        time.sleep(600)
