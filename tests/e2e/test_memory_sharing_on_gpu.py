"""One GPU, full: a sequence that trains only with the sampler's memory, and samples before and after it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tinker_local.backend import BackendOptions, InProcessBackend, ModelSource
from tinker_local.types import AdamParams, Datum, LoraConfig, ModelInput, SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

KV_CACHE = 4 * 2**30
LONG = 8000
PROMPT = ModelInput.from_ints([5, 9, 20, 31])
GREEDY = SamplingParams(max_tokens=32, temperature=0.0, stop=())


def datum(positions: int) -> Datum:
    tokens = [5 + 7 * at % 200 for at in range(positions + 1)]
    return Datum(model_input=ModelInput.from_ints(tokens[:-1]), loss_fn_inputs={"target_tokens": tokens[1:]})


def fill_the_device() -> list[torch.Tensor]:
    """All but a few MiB."""
    torch.cuda.empty_cache()
    taken = []
    for size in (2**30, 2**26, 2**23):
        while torch.cuda.mem_get_info()[0] > 2 * size:
            taken.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
    return taken


def state(driver: Any) -> tuple[int, bool]:
    (metrics,) = driver.backend.metrics().values()
    return metrics.sampler_sleeps, metrics.sampler_asleep


def test_a_sequence_that_needs_the_samplers_memory_gets_it_and_samples_stay_the_same(
    start_in_process: Any, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    options = BackendOptions(data_dir=tmp_path / "data", kv_cache_bytes=KV_CACHE, max_rank=32, trainer="process")
    driver = start_in_process(InProcessBackend([ModelSource("tiny/text", str(tiny_models["tiny/text"]))], options))
    model = driver.create("tiny/text", LoraConfig(rank=8, seed=7))
    for positions in (LONG, 16, LONG):  # kernels are loaded, and libraries have their workspaces
        expected = driver.gradient(model, [datum(positions)], "cross_entropy")[1]
    driver.step(model, AdamParams(learning_rate=0.0))
    sampler, base = driver.sampler(model), driver.base_sampler("tiny/text")
    before = [driver.sample(each, PROMPT, 1, GREEDY)[0] for each in (base, sampler)]
    assert state(driver) == (0, False)
    trainer = driver.backend.models.get("tiny/text").engines.trainer
    driver.run(driver.backend.models.get("tiny/text").scheduler.call(trainer.release_memory))
    others = fill_the_device()
    driver.gradient(model, [datum(16)], "cross_entropy")
    first = state(driver)
    loss = driver.gradient(model, [datum(LONG)], "cross_entropy")[1]
    assert loss == pytest.approx(expected, rel=1e-2)
    assert state(driver) == (1, True)
    print(f"asleep after 16 positions: {first[1]}, after {LONG}: True")
    driver.step(model, AdamParams(learning_rate=0.0))
    after = [driver.sample(each, PROMPT, 1, GREEDY)[0] for each in (base, sampler)]
    assert state(driver) == (1, False)
    for (tokens, logprobs, _), (wanted_tokens, wanted, _) in zip(after, before, strict=True):
        assert tokens == wanted_tokens
        np.testing.assert_array_equal(logprobs, wanted)
    del others
