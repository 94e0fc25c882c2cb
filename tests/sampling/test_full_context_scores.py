"""A prompt that fills the context is scored, as `compute_logprobs` asks for a sample that the context has ended."""

import asyncio
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tinker_local.backend.models.load_engines import load_renderer
from tinker_local.backend.rendering.rendered_input import RenderedInput
from tinker_local.backend.sampling.sampler import SampleWork
from tinker_local.backend.tiny_models import make_tiny_text_model, make_tiny_vl_model
from tinker_local.backend.training.run.worker import HFTrainer
from tinker_local.backend.training.trainer_config import TrainerConfig
from tinker_local.backend.vllm_engine.build_engine import EngineOptions
from tinker_local.backend.vllm_engine.engine_thread import EngineThread
from tinker_local.backend.vllm_engine.vllm_sampler import VLLMSampler
from tinker_local.types import (
    ContextOverflowError,
    EncodedTextChunk,
    ImageChunk,
    ModelInput,
    SamplingParams,
    TensorData,
)

from tests.float64 import Exact
from tests.sampling.conftest import noise_image, png
from tests.sampling.sampling_answers import EVERYTHING

CONTEXT = 256
ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0)


@pytest.fixture(params=["text", "vl", "vl25"])
def short(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Each model with a context of 256."""
    served = copy(request.getfixturevalue(request.param))
    served.options = dataclasses.replace(served.options, max_context_length=CONTEXT)
    served.sampler = VLLMSampler(served.options, served.sampler._thread)
    yield served
    asyncio.run(served.sampler.close())


def text(length: int) -> list[int]:
    return [20 + 7 * index % 61 for index in range(length)]


def full(served: Any, *parts: Any) -> RenderedInput:
    """`parts`, and as much text as there is room for."""
    missing = CONTEXT - served.prompt([5], *parts).length + 1
    prompt: RenderedInput = served.prompt(*parts, text(missing))
    assert prompt.length == CONTEXT
    return prompt


def full_before(served: Any, image: Image.Image) -> RenderedInput:
    """Text, and an image at the end of the context."""
    prompt: RenderedInput = served.prompt(text(CONTEXT - served.prompt(image).length), image)
    assert prompt.length == CONTEXT
    assert prompt.ends_with_image
    return prompt


async def ask(served: Any, prompt: RenderedInput, **asked: Any) -> Any:
    return await served.sampler.sample(SampleWork(prompt, None, asked.pop("params", ONE_TOKEN), **asked))


@pytest.mark.mutation(
    "scores-of-a-full-context-without-the-last",
    "prompt_scores",
    ">= len(request.prompt_token_ids)",
    "> questions.num_rows",
)
async def test_scores_of_a_full_context_agree_with_hf(
    short: Any, tmp_path: Path, noise: Callable[..., Image.Image]
) -> None:
    prompts = [full(short)]
    if not short.model_class.endswith("CausalLM"):
        prompts += [full(short, [7], noise(70, 70), [9]), full(short, noise(33, 120, 2), noise(64, 64, 3))]
        prompts += [full_before(short, noise(64, 64, 3))]
    adapter = short.adapter(tmp_path / "v1", EVERYTHING, 4)
    for used in (None, adapter):
        with short.hf.merged(used):
            expected = [short.hf.prompt_logprobs(prompt) for prompt in prompts]
        version = None if used is None else used.version
        # Twice: what is in the prefix cache then must not be left out.
        scores = await asyncio.gather(*(short.score(prompt, version) for prompt in prompts * 2))
        for score, wanted in zip(scores, expected * 2, strict=True):
            short.same(score, wanted)


async def test_a_full_context_has_the_scores_of_its_part_and_no_sample(short: Any) -> None:
    """Every question about a prompt, against the prompt and one token less."""
    whole = full(short)
    part = RenderedInput(whole.token_ids[:-1])
    k, rows = 3, CONTEXT - 1
    ids = np.random.default_rng(0).integers(0, 300, (rows, 2))
    params = SamplingParams(max_tokens=1, seed=7)
    asked = {"params": params, "topk_prompt_logprobs": k, "prompt_alt_tokens_k": k, "topk_sample_logprobs": k}
    output = await ask(short, whole, prompt_logprobs=True, target_prompt_logprobs=tensor(ids), **asked)
    other = await ask(short, part, prompt_logprobs=True, target_prompt_logprobs=tensor(ids[:-1]), **asked)
    (sequence,) = output.sequences
    assert (sequence.tokens.size, sequence.logprobs.size, sequence.stop_reason) == (0, 0, "length")
    assert sequence.topk_logprobs.token_ids.shape == (0, k)
    short.same(output.prompt_logprobs[1:-1], other.prompt_logprobs[1:])
    assert np.isfinite(output.prompt_logprobs[1:]).all()
    assert np.array_equal(output.topk_prompt_logprobs.token_ids[:-1], other.topk_prompt_logprobs.token_ids)
    short.same(output.topk_prompt_logprobs.logprobs[1:-1], other.topk_prompt_logprobs.logprobs[1:])
    assert (output.topk_prompt_logprobs.logprobs[-1] > -50).all()
    short.same(output.target_prompt_logprobs.data[:-2], other.target_prompt_logprobs.data)
    assert (output.target_prompt_logprobs.data < 0).all()
    drawn, of_part = output.prompt_alt_tokens, other.prompt_alt_tokens
    assert drawn.tokens.dense_shape == (rows, k)
    assert of_part.tokens.dense_shape == (rows - 1, k)
    assert (drawn.logprobs.data < 0).all()


def tensor(ids: Any) -> TensorData:
    return TensorData(data=ids.reshape(-1).astype(np.int64), dtype="int64", shape=ids.shape)


async def test_the_last_scores_alone_are_those_of_the_whole(short: Any) -> None:
    whole = full(short)
    every = await short.score(whole)
    for last in (1, 2, CONTEXT - 1):
        output = await ask(short, whole, prompt_logprobs=True, prompt_logprobs_last_n=last)
        assert np.isnan(output.prompt_logprobs[:-last]).all()
        short.same(output.prompt_logprobs[-last:], every[-last:])


async def test_whatever_is_sampled_must_fit_as_before(short: Any) -> None:
    """No question about the prompt, more samples or tokens, or a prompt that is longer."""
    whole = full(short)
    longer = RenderedInput(np.append(whole.token_ids, whole.token_ids[:1]))
    two, any_number = SamplingParams(max_tokens=2), SamplingParams()
    for prompt, asked in (
        (whole, {}),
        (whole, {"topk_sample_logprobs": 2}),
        (whole, {"prompt_logprobs": True, "num_samples": 2}),
        (whole, {"prompt_logprobs": True, "params": two}),
        (whole, {"prompt_logprobs": True, "params": any_number}),
        (RenderedInput(whole.token_ids[:-1]), {"prompt_logprobs": True, "params": two}),
        (longer, {"prompt_logprobs": True}),
    ):
        with pytest.raises(ContextOverflowError, match=rf"{prompt.length} prompt tokens \+ \d max_tokens > {CONTEXT}"):
            await ask(short, prompt, **asked)


def prompts_of(folder: Path, images: bool) -> list[RenderedInput]:
    """That fill the context: text, images before it, and an image at the end."""
    renderer = load_renderer(str(folder))

    def rendered(*parts: Any) -> RenderedInput:
        chunks = tuple(
            ImageChunk(data=png(part), format="png")
            if isinstance(part, Image.Image)
            else EncodedTextChunk(tokens=np.asarray(part, np.int32))
            for part in parts
        )
        return renderer.render(ModelInput(chunks=chunks), "prompt")

    if not images:
        return [rendered(text(CONTEXT))]
    shown = [noise_image(70, 90, seed) for seed in range(2)]
    length = rendered(*shown).length
    return [rendered(text(CONTEXT)), rendered(*shown, text(CONTEXT - length)), rendered(text(CONTEXT - length), *shown)]


@pytest.mark.more
@pytest.mark.skipif(torch.cuda.is_available(), reason="compares in float32")
@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "qwen3_5", "gemma3"])
def test_a_full_context_has_the_trainers_logprobs(family: Any, tmp_path: Path) -> None:
    """Windows, states instead of a cache, and images whose positions see each other, which cannot end the context."""
    vision = family in ("qwen3_5", "gemma3")
    folder = (make_tiny_vl_model if vision else make_tiny_text_model)(tmp_path / "model", family=family)
    prompts = prompts_of(folder, vision)
    trainer = HFTrainer(TrainerConfig(str(folder), name="tiny"))
    exact = Exact(trainer)
    options = EngineOptions(str(folder), max_rank=8, kv_cache_bytes=2**26, max_context_length=CONTEXT)
    outputs = asyncio.run(scored(options, prompts))
    if family == "gemma3":
        assert isinstance(outputs.pop(), ContextOverflowError)
    for prompt, output in zip(prompts, outputs, strict=family != "gemma3"):
        exact.assert_near(None, [prompt], trainer.logprobs(None, prompt), output.prompt_logprobs[1:])


async def scored(options: EngineOptions, prompts: Sequence[RenderedInput]) -> list[Any]:
    """The outputs, or errors."""
    sampler = VLLMSampler(options, EngineThread())
    works = [SampleWork(prompt, None, ONE_TOKEN, prompt_logprobs=True) for prompt in prompts]
    try:
        return await asyncio.gather(*map(sampler.sample, works), return_exceptions=True)
    finally:
        await sampler.close()
