"""Models that see, with CUDA graphs and without: what a picture leaves in buffers reaches no later prompt."""

import asyncio
import io
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image
from tinker_local.backend.families import FAMILIES
from tinker_local.backend.models.load_engines import load_renderer
from tinker_local.backend.rendering.rendered_input import RenderedInput
from tinker_local.backend.sampling.sampler import SampleWork
from tinker_local.backend.tiny_models import make_experts_alike, make_tiny_vl_model
from tinker_local.backend.vllm_engine.build_engine import EngineOptions
from tinker_local.backend.vllm_engine.engine_thread import EngineThread
from tinker_local.backend.vllm_engine.vllm_sampler import VLLMSampler
from tinker_local.types import EncodedTextChunk, ImageChunk, ModelInput, SamplingParams

from tests.families.test_experts import tokens

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SEEING = [name for name, family in FAMILIES.items() if family.vision is not None]
TEXT, SAMPLED = 200, 32


def with_picture(folder: Path, seed: int) -> RenderedInput:
    """A picture and then text; its features are what later steps must not read, from their first position on."""
    pixels, file = np.random.default_rng(seed).integers(0, 256, (320, 320, 3), np.uint8), io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    picture, text = ImageChunk(data=file.getvalue(), format="png"), EncodedTextChunk(tokens=tokens(seed, TEXT))
    return load_renderer(str(folder)).render(ModelInput(chunks=(picture, text)), "prompt")


def work(prompt: RenderedInput, num_sampled: int) -> SampleWork:
    params = SamplingParams(max_tokens=num_sampled, seed=1, stop=[])
    return SampleWork(prompt, None, params, prompt_logprobs=True)


async def logprobs(sampler: VLLMSampler, works: list[SampleWork]) -> list[tuple[list[int], npt.NDArray[np.float32]]]:
    """Of each work at once: the sampled tokens, and the logprobs of all tokens but the first."""
    outputs = await asyncio.gather(*map(sampler.sample, works))
    return [
        (
            [int(token) for token in output.sequences[0].tokens],
            np.concatenate([np.asarray(output.prompt_logprobs, np.float32)[1:], output.sequences[0].logprobs]),
        )
        for output in outputs
    ]


@pytest.mark.parametrize("family", SEEING)
def test_prompts_after_a_picture_are_as_without_graphs(family: Any, tmp_path: Path) -> None:
    """A prompt with a picture, then text alone, then both at once; each samples 32 tokens in graphs. Without graphs,
    the same tokens have the same logprobs but for rounding."""
    folder = make_tiny_vl_model(tmp_path / "model", family=family)
    if family == "qwen3_5_moe":
        make_experts_alike(folder)
    texts = [RenderedInput(tokens(seed, TEXT)) for seed in (2, 3)]
    turns = [[with_picture(folder, 0)], [texts[0]], [with_picture(folder, 1), texts[1]]]

    async def with_graphs() -> list[Any]:
        sampler = VLLMSampler(options(eager=False), EngineThread())
        try:
            return [await logprobs(sampler, [work(prompt, SAMPLED) for prompt in prompts]) for prompts in turns]
        finally:
            await sampler.close()

    async def without_graphs(prompts: list[RenderedInput]) -> list[npt.NDArray[np.float32]]:
        sampler = VLLMSampler(options(eager=True), EngineThread())
        try:
            return [(await logprobs(sampler, [work(prompt, 1)]))[0][1][:-1] for prompt in prompts]
        finally:
            await sampler.close()

    def options(eager: bool) -> EngineOptions:
        return EngineOptions(
            str(folder), dtype="bfloat16", max_rank=16, kv_cache_bytes=2**28, adapters_per_step=1, enforce_eager=eager
        )

    asyncio.run(with_graphs())  # its graphs are gone when the next engine captures its own
    sampled = [each for turn in asyncio.run(with_graphs()) for each in turn]
    prompts = [prompt for turn in turns for prompt in turn]
    whole = [
        RenderedInput(np.append(prompt.token_ids, np.asarray(new, np.int32)), prompt.images)
        for prompt, (new, _) in zip(prompts, sampled, strict=True)
    ]
    for prompt, (_, found), wanted in zip(prompts, sampled, asyncio.run(without_graphs(whole)), strict=True):
        is_text = np.ones(len(found), bool)
        for placed in prompt.images:
            is_text[max(placed.offset - 1, 0) : placed.offset - 1 + placed.image.num_tokens] = False
        gaps = np.abs(found - wanted)[is_text]
        print(f"{family}: {len(prompt.images)} pictures, mean gap {gaps.mean():.4f}, largest {gaps.max():.3f}")
        assert gaps.mean() < 0.05
