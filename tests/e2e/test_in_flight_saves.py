"""A long asynchronous loop on vLLM: what its in-flight saves leave in memory, on disk and in slots of the sampler."""

import gc
import itertools
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tinker_local.backend import BackendOptions, InProcessBackend, ModelSource
from tinker_local.backend.heap import give_memory_back
from tinker_local.types import LoraConfig, ModelInput, SamplingParams, SaveWeightsForSamplerRequest

from tests.e2e.test_trainer_restarts import ADAM, DATA

TEXT = "tiny/text"
FIRST, LAST = 100, 1000
EVERY = 10
"""So many saves take one optimizer step."""
PROMPT = ModelInput.from_ints([5, 9, 20])


def resident() -> int:
    """Bytes of this process in memory, without what it keeps free."""
    gc.collect()
    give_memory_back()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def files(folders: Sequence[Path | None]) -> list[str]:
    """What is in these folders, without names that are drawn at random."""
    paths = itertools.chain.from_iterable(folder.rglob("*") for folder in folders if folder is not None)
    return sorted(path.suffix if path.suffix == ".link" else path.name for path in paths if not path.is_dir())


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.rotated(3)
@pytest.mark.more
@pytest.mark.timeout(1200)
def test_a_thousand_in_flight_saves_leave_no_more_than_a_hundred(
    start_in_process: Any, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    """Each save is published to vLLM, since its client samples."""
    options = BackendOptions(
        data_dir=tmp_path, trainer="inline", sampler="inline", max_rank=32, kv_cache_bytes=2**28, sampler_sleeps=False
    )
    driver = start_in_process(InProcessBackend([ModelSource(TEXT, str(tiny_models[TEXT]))], options))
    backend, model = driver.backend, driver.create(TEXT, LoraConfig(rank=32, seed=0))
    adapters = backend.models.get(TEXT).engines.sampler._sampler._adapters

    def found() -> dict[str, Any]:
        backend.folders.flush()
        return {
            "slots": len(adapters._worker.list_adapters()),
            "versions and targets of the sampler": (len(adapters), len(adapters._targets), len(adapters._versions)),
            "versions of the backend": len(backend.folders._versions),
            "files": files((backend.folders._disk, backend.folders._memory)),
            "bytes": backend.models.get(TEXT).counts.ephemeral_bytes,
            "open files": open_files(),
        }

    seen: dict[int, tuple[dict[str, Any], int]] = {}
    began = time.process_time()
    for number in range(1, LAST + 1):
        if number % EVERY == 1:
            driver.gradient(model, DATA, "cross_entropy")
            driver.step(model, ADAM)
        request = SaveWeightsForSamplerRequest(
            model_id=model, seq_id=driver.next(model), sampling_session_seq_id=number, kind="inflight"
        )
        saved = driver.result(backend.training.save_weights_for_sampler(request))
        driver.sample(saved["sampling_session_id"], PROMPT, 1, SamplingParams(max_tokens=2, stop=()))
        if number in (FIRST, LAST):
            seen[number] = found(), resident()
    (before, memory), (after, later) = seen[FIRST], seen[LAST]
    size = after["bytes"]
    print(f"{after}, an adapter has {size} bytes, {memory} bytes after {FIRST} saves, {later - memory:+} after {LAST}")
    print(f"{1000 * (time.process_time() - began) / LAST:.1f} ms of processor time for each")
    assert after == before
    assert after["versions of the backend"] == 1
    assert backend.metrics()[TEXT].in_flight_published == LAST
    assert later - memory < size * (LAST - FIRST) // 10
