"""Samplers for the tests of processes. The processes import this file, so it contains no tests."""

import asyncio
import gc
import os
import time
from typing import Any

from tinker_local.backend.fakes import FakeModel, FakeSampler
from tinker_local.backend.sampling.sampler import SampleWork
from tinker_local.types import InternalError, SampleOutput, UnsupportedError

HANG, EXIT, WAIT, FAIL, LOSE_DEVICE, ODD_RESULT = range(1001, 1007)
"""Seeds of requests that an `OddSampler` treats so."""


ANOTHER_MODEL = "TINKER_LOCAL_TEST_ANOTHER_MODEL"
"""A variable of the environment: the seed of the model, if it is not 0."""


def hang() -> None:
    time.sleep(600)


class OddSampler(FakeSampler):
    """`sequences_waiting`: of requests that wait for ever; each holds a hundredth of the KV cache. It sleeps without
    memory to share."""

    def __init__(self, model: FakeModel) -> None:
        super().__init__(model)
        self.can_sleep = True
        self.waiting = 0
        self.sleeps = False

    @property
    def sequences_waiting(self) -> int:
        return self.waiting

    @property
    def kv_cache_used(self) -> float:
        return self.waiting / 100

    @property
    def asleep(self) -> bool:
        return self.sleeps

    async def sleep(self) -> None:
        self.sleeps = True

    async def wake(self) -> None:
        self.sleeps = False

    async def sample(self, work: SampleWork) -> SampleOutput:
        deed = work.params.seed
        if deed == WAIT:
            work.begun()
            self.waiting += work.num_samples
            try:
                await asyncio.Event().wait()
            finally:
                self.waiting -= work.num_samples
        if deed == HANG:
            hang()
        if deed == EXIT:
            os._exit(3)
        if deed == FAIL:
            raise RuntimeError("torn")
        if deed == LOSE_DEVICE:
            import torch

            raise InternalError("the engine failed") from torch.AcceleratorError("CUDA error: an illegal access")
        if deed == ODD_RESULT:
            return lambda: None  # type: ignore[return-value]
        return await super().sample(work)


def odd(name: str = "fake/bigram") -> OddSampler:
    return OddSampler(FakeModel(name, seed=int(os.environ.get(ANOTHER_MODEL, "0"))))


class HeapWatcher(OddSampler):
    """`sequences_waiting`: how often garbage collection finds this object, 0 or 1."""

    @property
    def sequences_waiting(self) -> int:
        return sum(each is self for each in gc.get_objects())


def heap_watcher() -> HeapWatcher:
    return HeapWatcher(FakeModel("fake/bigram"))


def no_such_model() -> Any:
    raise UnsupportedError("model_type 'gpt': not supported")
