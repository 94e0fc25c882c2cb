"""Promise 10: a group of samples of one prompt pays for its image once, in the renderer and in vLLM's vision tower."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tinker_local.backend.sampling.sampler import SampleWork
from tinker_local.backend.vllm_engine import compat_vllm
from tinker_local.types import SamplingParams


@pytest.fixture
def encoded(vl: Any) -> Iterator[list[int]]:
    """How many patches vLLM's vision tower has encoded, one entry per run."""
    runs: list[int] = []

    def note(module: Any, args: Any, kwargs: Any) -> None:
        pixels = args[0] if args else next(iter(kwargs.values()))
        runs.append(int(pixels.shape[0]))

    thread, engine = vl.sampler._thread, vl.sampler._engine
    tower = thread.call(engine, lambda vllm: compat_vllm.model_runner(vllm).model.visual).result(10)
    handle = tower.register_forward_pre_hook(note, with_kwargs=True)
    yield runs
    handle.remove()


@pytest.mark.mutation(
    "image-encoded-for-every-sample",
    "engine_prompt",
    '"image": [image.content_hash for image in images]',
    '"image": [f"{image.content_hash}{id(ids)}" for image in images]',
)
async def test_sixteen_samples_of_one_prompt_encode_its_image_once(
    vl: Any, encoded: list[int], noise: Callable[..., Any]
) -> None:
    image = noise(128, 96, 77)
    before = vl.renderer.images_processed
    prompt = vl.prompt([5, 6], image, [7, 8])
    patches = int(np.prod(prompt.images[0].image.grid_thw))
    group = SampleWork(prompt, None, SamplingParams(max_tokens=2, stop=()), num_samples=16)
    # Other requests with the image share it too: one that asks for logprobs, one with other text.
    again = SampleWork(vl.prompt([9], image, [7, 8]), None, SamplingParams(max_tokens=2, stop=()), prompt_logprobs=True)
    outputs = await asyncio.gather(vl.sampler.sample(group), vl.sampler.sample(again))
    assert len(outputs[0].sequences) == 16
    assert vl.renderer.images_processed - before == 1
    assert encoded == [patches]


@pytest.mark.parametrize("with_adapter", [False, True])
async def test_a_group_with_prompt_logprobs_encodes_its_images_once(
    vl: Any, encoded: list[int], noise: Callable[..., Any], tmp_path: Path, with_adapter: bool
) -> None:
    """A prompt that is scored does not read the prefix cache, so it needs its images again, which come from
    memory. The same holds for a separate request before, beside or after the group, and for another version."""
    seed = 90 + with_adapter
    images = [noise(128, 96, seed), noise(64, 64, seed)]
    version = vl.adapter(tmp_path / "v1", r"(q|k|v|o)_proj$", 4).version if with_adapter else None
    prompt = vl.prompt([5, 6], images[0], [7, 8], images[1], list(range(20, 40)))
    params = SamplingParams(max_tokens=2, stop=())
    group = SampleWork(prompt, version, params, num_samples=16, prompt_logprobs=True)
    score = SampleWork(prompt, version, SamplingParams(max_tokens=1), prompt_logprobs=True)
    alone = await vl.sampler.sample(score)
    outputs = await asyncio.gather(vl.sampler.sample(group), vl.sampler.sample(score))
    await vl.sampler.sample(SampleWork(prompt, None, SamplingParams(max_tokens=1), prompt_logprobs=True))
    assert len(outputs[0].sequences) == 16
    assert sum(encoded) == sum(int(np.prod(placed.image.grid_thw)) for placed in prompt.images)
    for output in outputs:
        vl.same(output.prompt_logprobs[1:], alone.prompt_logprobs[1:])
