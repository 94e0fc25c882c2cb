"""vLLM's processes are killed and stopped under load: training goes on, and samples too, with the same numbers."""

import asyncio
import os
import signal
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tinker_local.backend import BackendOptions, InProcessBackend, ModelSource
from tinker_local.types import LoraConfig, SampleOutput, SampleRequest, SamplingParams

from tests.e2e.test_trainer_restarts import GREEDY, PROMPT, free_memory, trained

LOAD, TOKENS = 24, 100


def begin(driver: Any, sampler: str, count: int) -> list["Future[SampleOutput]"]:
    """Long samples, all at once."""

    async def one(seq_id: int) -> SampleOutput:
        request = SampleRequest(
            sampling_session_id=sampler,
            seq_id=seq_id,
            prompt=PROMPT,
            num_samples=2,
            sampling_params=SamplingParams(max_tokens=TOKENS, seed=seq_id, stop=()),
        )
        result: SampleOutput = await (await driver.backend.sampling.sample(request))
        return result

    return [asyncio.run_coroutine_threadsafe(one(driver.next(sampler, 0)), driver.loop) for _ in range(count)]


def wait_until(condition: Any, seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.001)


@pytest.mark.rotated(2)
@pytest.mark.more
@pytest.mark.parametrize("ranks", [1, 2])
def test_sampling_goes_on_after_a_kill_and_a_hang_as_if_there_had_been_none(
    start_in_process: Any, tiny_models: dict[str, Path], tmp_path: Path, ranks: int
) -> None:
    if torch.cuda.is_available() and torch.cuda.device_count() < ranks:
        pytest.skip(f"{ranks} GPUs are needed")
    place: dict[str, Any] = {"sampler": "process"} if ranks == 1 else {"sample_gpus": (0, 1), "sample_tp": 2}
    options = BackendOptions(
        data_dir=tmp_path / "data",
        sampler_timeout=3.0,
        max_rank=8,
        kv_cache_bytes=2**28,
        max_context_length=256,
        **place,
    )
    began = time.monotonic()
    driver = start_in_process(InProcessBackend([ModelSource("tiny/text", str(tiny_models["tiny/text"]))], options))
    print(f"started in {time.monotonic() - began:.1f} s on {'a GPU' if torch.cuda.is_available() else 'CPU'}")
    base = driver.backend.models.get("tiny/text")
    process = base.engines.sampler._sampler
    process.load_seconds = 12.0  # so that the hang, in the next process, is noticed after 15 s
    model = driver.create("tiny/text", LoraConfig(rank=4, seed=7))
    trained(driver, model, 2)
    samplers = [driver.sampler(model), driver.named_sampler(model, "two-steps")[1], driver.base_sampler("tiny/text")]
    before = [driver.sample(each, PROMPT, 1, GREEDY)[0] for each in samplers]
    free = free_memory()
    faults = [(how, rank) for rank in range(ranks) for how in (signal.SIGKILL, signal.SIGSTOP)]
    for number, (how, rank) in enumerate(faults, 1):
        killed = process.pids
        assert len(killed) == ranks
        load = begin(driver, samplers[0], LOAD)
        wait_until(lambda: base.sample_turns.sequences >= LOAD)
        began = time.monotonic()
        os.kill(killed[rank], how)
        wait_until(lambda: base.sampler_supervisions[0].problem is not None)  # before that, that sampling stalls
        noticed = time.monotonic() - began
        assert driver.backend.problems()[0].startswith("tiny/text: the sampler's process")
        trained(driver, model, 1)
        trains = base.problem is not None
        driver.sample(samplers[0], PROMPT, 1, GREEDY)
        print(
            f"{how.name} of rank {rank}: noticed after {noticed:.2f} s, sampled {time.monotonic() - began:.1f} s "
            f"after it; trained meanwhile: {trains}"
        )
        for output in (each.result(3600) for each in load):
            assert [len(sequence.tokens) for sequence in output.sequences] == [TOKENS, TOKENS]
        after = [driver.sample(each, PROMPT, 1, GREEDY)[0] for each in samplers]  # alone, as before
        for (tokens, logprobs, _), (wanted_tokens, wanted, _) in zip(after, before, strict=True):
            assert tokens == wanted_tokens
            np.testing.assert_array_equal(logprobs, wanted)
        (supervision,) = base.sampler_supervisions
        assert supervision.restarts == number
        assert not any(Path(f"/proc/{pid}").exists() for pid in killed)
        assert driver.backend.problems() == []
    assert free_memory() >= free - 2**28
    newest = driver.sample(driver.sampler(model), PROMPT, 1, GREEDY)[0]
    assert newest[0] != before[2][0] or not np.array_equal(newest[1], before[2][1])
