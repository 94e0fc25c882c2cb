"""The trainer's process is killed beside a real sampler: sampling goes on, and training too, with the same numbers."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tinker_local.backend import BackendOptions, InProcessBackend, ModelSource
from tinker_local.types import AdamParams, Datum, LoraConfig, ModelInput, SamplingParams

PROMPT = ModelInput.from_ints([5, 9, 20, 31])
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, stop=())
ADAM = AdamParams(learning_rate=0.01)
DATA = [
    Datum(model_input=ModelInput.from_ints([5, 9, 20, 31, 7]), loss_fn_inputs={"target_tokens": [9, 20, 31, 7, 8]}),
]


def free_memory() -> int:
    """Bytes free on the GPU; 0 without one."""
    return int(torch.cuda.mem_get_info()[0]) if torch.cuda.is_available() else 0


def trained(driver: Any, model: Any, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        losses.append(driver.gradient(model, DATA, "cross_entropy")[1])
        driver.step(model, ADAM)
    return losses


@pytest.mark.more
def test_training_goes_on_after_a_kill_as_if_there_had_been_none(
    start_in_process: Any, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    options = BackendOptions(
        data_dir=tmp_path / "data", trainer="process", max_rank=8, kv_cache_bytes=2**28, max_context_length=256
    )
    driver = start_in_process(InProcessBackend([ModelSource("tiny/text", str(tiny_models["tiny/text"]))], options))
    base = driver.backend.models.get("tiny/text")
    model = driver.create("tiny/text", LoraConfig(rank=4, seed=7))
    trained(driver, model, 2)
    path = driver.save(model, "two-steps")
    samplers = [driver.sampler(model), driver.base_sampler("tiny/text")]
    before = [driver.sample(each, PROMPT, 1, GREEDY)[0] for each in samplers]
    free = free_memory()
    for _ in range(2):  # the second time from the same checkpoint
        began = time.monotonic()
        os.kill(base.engines.trainer.pids[0], signal.SIGKILL)
        while base.supervision.problem is None:
            time.sleep(0.001)
        during = [driver.sample(each, PROMPT, 1, GREEDY)[0] for each in samplers]
        sampled = base.problem is not None
        driver.gradient(model, DATA, "cross_entropy", forward_only=True)  # waits for the new process
        print(f"trained {time.monotonic() - began:.1f} s after the kill; sampled meanwhile: {sampled}")
        for (tokens, logprobs, _), (wanted_tokens, wanted, _) in zip(during, before, strict=True):
            assert tokens == wanted_tokens
            np.testing.assert_array_equal(logprobs, wanted)
    assert base.supervision.restarts == 2
    assert free_memory() >= free - 2**28
    assert trained(driver, model, 3) == trained(driver, driver.resume(path, optimizer=True), 3)
