"""vLLM says which experts each position took: those that the routers of transformers choose, here in float32."""

import asyncio
import time
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
from tinker_local.backend.training.routes import RouteArray, RoutedLayers, recorded
from tinker_local.backend.training.run.worker import HFTrainer
from tinker_local.backend.training.trainer_config import TrainerConfig
from tinker_local.backend.vllm_engine.build_engine import EngineOptions
from tinker_local.backend.vllm_engine.compat_vllm import scheduler
from tinker_local.backend.vllm_engine.engine_thread import EngineThread
from tinker_local.backend.vllm_engine.vllm_sampler import VLLMSampler
from tinker_local.types import SampledSequence, SamplingParams

from tests.training.gemma4_models import make_gemma4

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
    assert [len(other.own) for other in others] == [11, 11]
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


def test_questions_about_the_prompt_leave_the_experts(sampler: VLLMSampler, reference: Reference) -> None:
    prompt = ids(8, 70)
    output = asyncio.run(sampler.sample(work(prompt, prompt_logprobs=True, num_samples=2)))
    assert len(output.prompt_logprobs) == len(prompt)
    for sequence in output.sequences:
        assert_routes(sequence, prompt, reference)


def test_a_request_that_ends_while_it_has_given_way_to_others_has_no_experts_and_hurts_none(
    sampler: VLLMSampler,
) -> None:
    """It has no blocks then, and vLLM ends it all the same: a stop string is found, or its client has gone."""
    of_engine, seen = scheduler(sampler._engine.built), []

    def give_way(engine: Any) -> None:
        for request in list(of_engine.running):
            of_engine.running.remove(request)
            of_engine._preempt_request(request, time.monotonic())
            seen.append(request.num_computed_tokens)

    async def run() -> Any:
        drawn = asyncio.Event()
        loop = asyncio.get_running_loop()
        long = replace(
            work(ids(9, 20), params={"max_tokens": 400}), drawn=lambda *_: loop.call_soon_threadsafe(drawn.set)
        )
        task = asyncio.create_task(sampler.sample(long))
        await drawn.wait()
        preempted = sampler._thread.call(sampler._engine, give_way)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.wrap_future(preempted)
        return await sampler.sample(work(ids(9, 20)))

    output = asyncio.run(run())
    assert seen == [0]
    assert sampler._engine.restarts == 0
    assert output.sequences[0].routes is not None


def test_a_sampler_says_which_layers_it_records(sampler: VLLMSampler, folder: Path) -> None:
    config = transformers.AutoConfig.from_pretrained(folder)
    layers = tuple(range(config.num_hidden_layers))
    assert sampler.routed == RoutedLayers(layers, config.num_experts_per_tok, config.num_experts)


def test_a_sequence_that_a_text_ends_has_the_experts_of_its_positions(
    sampler: VLLMSampler, reference: Reference, folder: Path
) -> None:
    """vLLM finds the text after the step, and aborts the request."""
    prompt, params = ids(7, 20), {"max_tokens": 40}
    whole = asyncio.run(sampler.sample(work(prompt, params=params))).sequences[0]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = tokenizer.decode(whole.tokens[12:14])
    output = asyncio.run(sampler.sample(work(prompt, params={**params, "stop": text})))
    assert output.sequences[0].stop_reason == "stop"
    assert 0 < len(output.sequences[0].tokens) < 40
    assert_routes(output.sequences[0], prompt, reference)


@pytest.mark.more
def test_sequences_that_give_way_to_others_have_the_experts_of_their_positions(
    folder: Path, reference: Reference
) -> None:
    """A KV cache of three blocks of 128: requests of two of them are preempted and computed again."""
    thread = EngineThread()
    of_block = 128 * 2 * 2 * 2 * 32 * 4  # of two layers with two heads each
    options = EngineOptions(
        str(folder), record_routes=True, max_sequences=8, max_context_length=256, kv_cache_bytes=4 * of_block
    )
    sampler = VLLMSampler(options, thread)
    prompts, preempted = [ids(seed, 110) for seed in (20, 21, 22)], []
    of_engine = scheduler(sampler._engine.built)
    preempt = of_engine._preempt_request

    def counted(*args: Any, **given: Any) -> Any:
        preempted.append(args)
        return preempt(*args, **given)

    of_engine._preempt_request = counted

    async def run() -> list[Any]:
        return await asyncio.gather(
            *(sampler.sample(work(each, params={"max_tokens": 60, "seed": 5})) for each in prompts)
        )

    try:
        for prompt, output in zip(prompts, asyncio.run(run()), strict=True):
            assert_routes(output.sequences[0], prompt, reference)
        assert preempted
    finally:
        asyncio.run(sampler.close())
        thread.stop()


@pytest.mark.more
@pytest.mark.parametrize(
    "family", ["gpt_oss", "qwen3_5_moe_text", "glm4_moe", "ernie4_5_moe", "minimax_m2", "lfm2_moe", "gemma4"]
)
def test_trainer_and_sampler_have_the_same_layers_and_take_the_same_experts(family: Any, tmp_path: Path) -> None:
    """With sliding windows, states of linear attention in the same blocks, layers without experts before those with
    them, and experts beside an MLP."""
    path = tmp_path / "model"
    if family == "gemma4":
        make_gemma4(path, "experts")
    else:
        make_tiny_text_model(path, family=family)
    thread = EngineThread()
    sampler = VLLMSampler(EngineOptions(str(path), record_routes=True, max_sequences=8), thread)
    try:
        trainer = HFTrainer(TrainerConfig(str(path), name="tiny", dtype="float32", device="cpu"))
        assert sampler.routed is not None
        assert sampler.routed == trainer.routed
        prompt = ids(8, 150)
        for _ in range(2):  # the second reads what the first has left
            (sequence,) = asyncio.run(sampler.sample(work(prompt))).sequences
            found = sequence.routes.read(0, len(sequence.routes))
            assert recorded(found).all()
            wanted = Reference(path)([*prompt, *sequence.tokens[:-1].tolist()])
            assert (np.sort(found.astype(np.int64), axis=-1) == wanted).mean() > 0.995  # ties of random weights
    finally:
        asyncio.run(sampler.close())
        thread.stop()
