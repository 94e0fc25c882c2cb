"""Several images in turn: each is encoded once, although every request needs its features again."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from tinker_local.backend.sampling.sampler import SampleWork
from tinker_local.backend.vllm_engine import patches
from tinker_local.backend.vllm_engine.patches import EngineEvents
from tinker_local.types import SamplingParams


async def test_requests_of_more_images_than_a_step_holds_encode_each_once(vl: Any, noise: Callable[..., Any]) -> None:
    """The images end in the last block of each prompt, which the prefix cache does not share."""
    prompts = [vl.prompt([5, 6], noise(640, 640, 300 + number), [7, 8]) for number in range(12)]
    assert sum(prompt.length for prompt in prompts) > vl.options.max_batched_tokens
    params = SamplingParams(max_tokens=1, stop=())
    before = vl.sampler.images_encoded
    for _ in range(3):
        await asyncio.gather(*(vl.sampler.sample(SampleWork(prompt, None, params)) for prompt in prompts))
    assert vl.sampler.images_encoded - before == len(prompts)


async def test_start_of_an_engine_counts_no_image(vl: Any, text: Any, noise: Callable[..., Any]) -> None:
    """Its profiling runs do; and a text model has no tower."""
    from tinker_local.backend.vllm_engine.engine_thread import EngineThread
    from tinker_local.backend.vllm_engine.vllm_sampler import VLLMSampler

    assert text.sampler.images_encoded == 0
    thread = EngineThread()
    sampler = VLLMSampler(vl.options, thread)
    assert sampler.images_encoded == 0
    prompt = vl.prompt([5], noise(64, 64, 400), noise(96, 64, 401), [6])
    await sampler.sample(SampleWork(prompt, None, SamplingParams(max_tokens=1)))
    assert sampler.images_encoded == 2
    # Another engine in its place, as after a failure: the count goes on.
    thread.call(sampler._engine, lambda _: sampler._engine.discard()).result()
    assert sampler.images_encoded == 2
    await sampler.sample(SampleWork(prompt, None, SamplingParams(max_tokens=1)))
    assert sampler.images_encoded == 4
    await sampler.close()
    thread.stop()


def test_images_of_a_model_without_a_family_are_counted_on_a_fake() -> None:
    """Whatever its tower is called: a fake of vLLM's model gives a tensor for each image."""
    counts: list[int] = []
    model = SimpleNamespace(embed_multimodal=lambda **given: [torch.zeros(4, 8) for _ in given["pixel_values"]])
    patches._report_embeddings(model, EngineEvents(images_encoded=counts.append))
    assert len(model.embed_multimodal(pixel_values=[0, 1, 2])) == 3
    assert counts == [3]
