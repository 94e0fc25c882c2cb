"""The experts that are recorded of a sequence whose weights change: of kept keys those that the first weights took, of
keys that are computed again those that the last ones take."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from tinker_local.backend.adapters.adapter import AdapterVersion
from tinker_local.backend.rendering.rendered_input import RenderedInput
from tinker_local.backend.sampling.sampler import MovingWeights, SampleWork
from tinker_local.backend.tiny_models import make_tiny_text_model
from tinker_local.backend.training.routes import RouteArray
from tinker_local.backend.vllm_engine.build_engine import EngineOptions
from tinker_local.backend.vllm_engine.engine_thread import EngineThread
from tinker_local.backend.vllm_engine.vllm_sampler import VLLMSampler
from tinker_local.types import SampledSequence, SampleOutput, SamplingParams

from tests.sampling.conftest import write_adapter
from tests.sampling.test_in_flight import Watch

pytestmark = pytest.mark.more

PROMPT = [20 + at % 90 for at in range(150)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_text_model(tmp_path_factory.mktemp("routes") / "model", family="qwen3_moe")


@pytest.fixture(scope="module")
def versions(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[AdapterVersion]:
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder)
    at = tmp_path_factory.mktemp("adapters")
    return [
        write_adapter(at / str(number), f"adapters/{number}", model, r"self_attn\.(q|k|v|o)_proj$", 4, number).version
        for number in (1, 2)
    ]


@pytest.fixture(scope="module", params=[False, True], ids=["keep", "recompute"])
def sampler(folder: Path, request: pytest.FixtureRequest) -> Iterator[VLLMSampler]:
    thread = EngineThread()
    options = EngineOptions(str(folder), record_routes=True, max_sequences=8, kv_cache_bytes=2**28, max_rank=8)
    made = VLLMSampler(replace(options, moves_keys=request.param), thread)
    yield made
    asyncio.run(made.close())
    thread.stop()


def routes(sequence: SampledSequence) -> RouteArray:
    found = sequence.routes
    assert found is not None
    return np.sort(found.read(0, len(found)).astype(np.int64), axis=-1)


async def test_routes_of_a_sequence_whose_weights_change_are_those_of_its_keys(
    sampler: VLLMSampler, versions: list[AdapterVersion]
) -> None:
    target = "run/in-flight"
    params = SamplingParams(max_tokens=400, temperature=1.0, seed=5, stop=())
    await sampler.publish(target, versions[0], 1)
    watch, moving = Watch(), MovingWeights(target, 1, 1, "client")
    prompt = RenderedInput(np.array(PROMPT, np.int32))
    work = SampleWork(prompt, versions[0], params, 3, routes=True, moving=moving, drawn=watch)
    running: asyncio.Task[SampleOutput] = asyncio.create_task(sampler.sample(work))
    await watch.until(100)
    await sampler.publish(target, versions[1], 2)
    for sequence in (await running).sequences:
        assert sequence.drawn_under is not None
        first, second = sequence.drawn_under
        assert (first.version, second.version) == (1, 2)
        whole = RenderedInput(np.array([*PROMPT, *sequence.tokens[:-1]], np.int32))
        one = params.model_copy(update={"max_tokens": 1})
        under = [
            routes((await sampler.sample(SampleWork(whole, each, one, 1, routes=True))).sequences[0])
            for each in versions
        ]
        found = routes(sequence)
        assert found.shape == under[0].shape
        assert (under[0] != under[1]).any((1, 2)).mean() > 0.1  # or the adapters would say nothing
        kept = len(PROMPT) + first.tokens - 1
        expected = under[1] if second.on_older_keys is False else under[0][:kept]
        np.testing.assert_array_equal(found[: len(expected)], expected)
    await sampler.end_target(target)
