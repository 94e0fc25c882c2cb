"""Trainer and sampler read one copy of the weights, and each is killed: neither frees what the other reads, and what
comes back finds it there."""

import os
import signal
import time
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from tinker_local.backend import BackendOptions, InProcessBackend, ModelSource
from tinker_local.backend.weights.precision import parts_of
from tinker_local.types import LoraConfig

from tests.e2e.test_sampler_restarts import wait_until
from tests.e2e.test_trainer_restarts import DATA, GREEDY, PROMPT, trained


def killed(process: Any) -> float:
    """When the first process of an engine was killed."""
    os.kill(process.pids[0], signal.SIGKILL)
    return time.monotonic()


def one_copy(folder: Path, precision: str | None = None) -> BackendOptions:
    """Of a server whose engines share their weights, each in a process. `precision`: of the base, in one word."""
    layers, head = parts_of(precision)
    return BackendOptions(
        data_dir=folder,
        trainer="process",
        sampler="process",
        shared_weights="always",
        base_precision=cast(Any, layers),
        head_precision=cast(Any, head),
        max_rank=8,
        kv_cache_bytes=2**28,
        max_context_length=256,
        sampler_sleeps=False,
    )


@pytest.mark.more
@pytest.mark.parametrize(
    ("name", "precision"), [("tiny/text", None), ("tiny/vision", None), ("tiny/vision", "int4+head-int8")]
)
def test_what_one_engine_leaves_the_other_reads(
    name: str, precision: Any, start_in_process: Any, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    said: list[str] = []
    source = ModelSource(name, str(tiny_models[name]))
    backend = InProcessBackend([source], one_copy(tmp_path / "data", precision), progress=said.append)
    driver = start_in_process(backend)
    assert any("trainer and sampler share" in line for line in said), said
    base = driver.backend.models.get(name)
    trainer, sampler = base.engines.trainer, base.engines.sampler._sampler
    model = driver.create(name, LoraConfig(rank=4, seed=7))
    trained(driver, model, 2)
    path = driver.save(model, "two-steps")
    samplers = [driver.sampler(model), driver.base_sampler(name)]
    before = [driver.sample(each, PROMPT, 1, GREEDY)[0] for each in samplers]

    def samples_are_the_same() -> None:
        for each, (wanted_tokens, wanted, _) in zip(samplers, before, strict=True):
            tokens, logprobs, _ = driver.sample(each, PROMPT, 1, GREEDY)[0]
            assert tokens == wanted_tokens
            np.testing.assert_array_equal(logprobs, wanted)

    for _ in range(2):
        began = killed(trainer)
        wait_until(lambda: base.supervision.problem is not None)
        samples_are_the_same()
        driver.gradient(model, DATA, "cross_entropy", forward_only=True)  # waits for the new process
        print(f"trained {time.monotonic() - began:.1f} s after the trainer was killed")
        expected = trained(driver, driver.resume(path, optimizer=True), 2)
        began = killed(sampler)
        wait_until(lambda: base.sampler_supervisions[0].problem is not None)
        assert trained(driver, driver.resume(path, optimizer=True), 2) == expected
        samples_are_the_same()
        print(f"sampled {time.monotonic() - began:.1f} s after the sampler was killed")
    killed(sampler)
    killed(trainer)
    wait_until(lambda: base.supervision.problem is not None)
    wait_until(lambda: base.sampler_supervisions[0].problem is not None)
    assert trained(driver, driver.resume(path, optimizer=True), 2) == expected
    samples_are_the_same()
    assert (base.supervision.restarts, base.sampler_supervisions[0].restarts) == (3, 3)
    assert driver.backend.problems() == []
