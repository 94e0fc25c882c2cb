"""vLLM says which experts each position took: those that the routers of transformers choose, here in float32."""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tinker_local.backend.rendering.rendered_input import RenderedInput
from tinker_local.backend.sampling.sampler import SampleWork
from tinker_local.backend.tiny_models import make_tiny_text_model
from tinker_local.backend.training.routes import RouteArray, RoutedLayers
from tinker_local.backend.vllm_engine.build_engine import EngineOptions
from tinker_local.backend.vllm_engine.engine_thread import EngineThread
from tinker_local.backend.vllm_engine.vllm_sampler import VLLMSampler
from tinker_local.types import SampledSequence, SamplingParams

FAMILY = "qwen3_moe"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_text_model(tmp_path_factory.mktemp("routes") / "model", family=FAMILY)


@pytest.fixture(scope="module")
def sampler(folder: Path) -> Iterator[VLLMSampler]:
    """Steps of 48 positions at most, so that long prompts take several."""
    thread = EngineThread()
    options = EngineOptions(str(folder), record_routes=True, max_sequences=8, max_batched_tokens=48)
    made = VLLMSampler(options, thread)
    yield made
    asyncio.run(made.close())
    thread.stop()


class Reference:
    """The experts that transformers' model takes, sorted, [N, L, K]."""

    def __init__(self, folder: Path) -> None:
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.no_grad()
    def __call__(self, ids: Sequence[int]) -> RouteArray:
        found: list[torch.Tensor] = []
        routers = [module for module in self.model.modules() if "Router" in type(module).__name__]
        hooks = [router.register_forward_hook(lambda *args: found.append(args[2][2])) for router in routers]
        self.model(input_ids=torch.tensor([list(ids)]))
        for hook in hooks:
            hook.remove()
        return np.sort(torch.stack(found, 1).numpy(), axis=-1)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


def work(prompt: Sequence[int], **more: Any) -> SampleWork:
    params = {"max_tokens": 12, "seed": 3, "stop": (), **more.pop("params", {})}
    return SampleWork(RenderedInput(np.array(prompt, np.int32)), None, SamplingParams(**params), routes=True, **more)


def ids(seed: int, length: int) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(20, 380, length).tolist()
    return found


def assert_routes(sequence: SampledSequence, prompt: Sequence[int], reference: Reference) -> None:
    tokens, routes = sequence.tokens.tolist(), sequence.routes
    assert len(routes) == len(prompt) + len(tokens) - 1
    found = np.sort(routes.read(0, len(routes)).astype(np.int64), axis=-1)
    np.testing.assert_array_equal(found, reference([*prompt, *tokens[:-1]]))


def test_experts_of_all_positions_are_those_of_the_model(sampler: VLLMSampler, reference: Reference) -> None:
    """Of prompts longer than a step, which other requests begin with, and of requests that run side by side."""
    prompt = ids(0, 130)
    prompts = [prompt, [*prompt[:100], *ids(1, 20)], ids(2, 3), prompt]

    async def run() -> list[Any]:
        found = [await sampler.sample(work(prompt))]
        return [*found, *await asyncio.gather(*(sampler.sample(work(each, num_samples=3)) for each in prompts))]

    first, *others = asyncio.run(run())
    assert_routes(first.sequences[0], prompt, reference)
    assert others[0].prompt_cache_hit_tokens > 100
    for each, output in zip(prompts, others, strict=True):
        assert len(output.sequences) == 3
        for sequence in output.sequences:
            assert_routes(sequence, each, reference)


def test_what_sequences_have_in_common_is_one_array(sampler: VLLMSampler) -> None:
    output = asyncio.run(sampler.sample(work(ids(4, 60), num_samples=3)))
    first, *others = (sequence.routes for sequence in output.sequences)
    assert len(first.common) == 60
    assert [other.common is first.common for other in others] == [True, True]
    np.testing.assert_array_equal(first.read(50, 65), np.concatenate([first.common[50:], first.own[:5]]))


def test_a_sequence_that_a_string_ends_has_the_experts_of_its_positions(
    sampler: VLLMSampler, reference: Reference
) -> None:
    """vLLM has computed more of it by then, perhaps."""
    prompt = ids(5, 20)
    whole = asyncio.run(sampler.sample(work(prompt, params={"max_tokens": 40}))).sequences[0]
    stop = int(whole.tokens[9])
    output = asyncio.run(sampler.sample(work(prompt, params={"max_tokens": 40, "stop": (stop,)})))
    assert output.sequences[0].stop_reason == "stop"
    assert_routes(output.sequences[0], prompt, reference)


def test_a_request_that_does_not_ask_gets_none(sampler: VLLMSampler) -> None:
    output = asyncio.run(sampler.sample(replace(work(ids(6, 9)), routes=False)))
    assert output.sequences[0].routes is None


def test_a_sampler_says_which_layers_it_records(sampler: VLLMSampler, folder: Path) -> None:
    config = transformers.AutoConfig.from_pretrained(folder)
    layers = tuple(range(config.num_hidden_layers))
    assert sampler.routed == RoutedLayers(layers, config.num_experts_per_tok, config.num_experts)
