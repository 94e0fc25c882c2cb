"""vLLM samplers that fail on demand, for the tests of processes. The processes import this file: it has no tests."""

import time
from typing import Any

from tinker_local.backend.models.load_engines import engine_thread
from tinker_local.backend.sampling.sampler import SampleWork
from tinker_local.backend.vllm_engine.build_engine import EngineOptions
from tinker_local.backend.vllm_engine.vllm_sampler import VLLMSampler
from tinker_local.types import SampleOutput

FAIL, HANG = 1001, 1002
"""Seeds of requests in whose first step the engine fails, or hangs."""


class OddVLLMSampler(VLLMSampler):
    """`deed`: what the next step does."""

    deed: int | None = None

    def _build(self, options: EngineOptions) -> Any:
        engine = super()._build(options)
        step = engine.step

        def odd_step() -> Any:
            deed, self.deed = self.deed, None
            if deed == FAIL:
                raise RuntimeError("torn")
            if deed == HANG:
                time.sleep(600)
            return step()

        engine.step = odd_step
        return engine

    async def sample(self, work: SampleWork) -> SampleOutput:
        self.deed = work.params.seed if work.params.seed in (FAIL, HANG) else self.deed
        return await super().sample(work)


def odd(options: EngineOptions) -> OddVLLMSampler:
    return OddVLLMSampler(options, engine_thread())
