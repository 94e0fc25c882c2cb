"""Output tokens per second of many requests that begin together: vLLM alone, our sampler, in process, over HTTP."""

import asyncio
import itertools
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
from harness.lines import Line
from harness.scale import Scale
from harness.timing import DeviceMemory

from measurements.hosting import Host
from measurements.ways import Way

_seeds = itertools.count(1000)


def alone(scale: Scale, models: Path) -> None:
    """vLLM by itself: base without logprobs, then LoRA with logprobs, which is what the others are compared with."""
    from baselines.vllm_alone import VLLMAlone, write_random_adapter

    with tempfile.TemporaryDirectory() as folder:
        adapter = write_random_adapter(Path(folder) / "adapter", scale.text, scale.rank)
        with DeviceMemory() as memory:
            engine = VLLMAlone(scale, models / "text", adapter)
            engine.warm_up()
            for name, lora in (("sampling.alone_base", False), ("sampling.alone", True)):
                rate = engine.output_tokens_per_second(lora=lora, logprobs=lora, seed=next(_seeds))
                note = f"LoRA of rank {scale.rank}, logprobs" if lora else "base, no logprobs"
                Line(name, rate, "tokens/s", peak_gib=memory.peak_gib, note=f"{note}, {requests(scale)}").emit()


def requests(scale: Scale) -> str:
    """In words."""
    return f"{scale.requests} requests of {scale.prompt_tokens} in, {scale.output_tokens} out"


async def ours(host: Host) -> None:
    """The sampler itself, then `InProcessBackend`, then the SDK over HTTP."""
    await through_sampler(host)
    await many_at_once(host.way, host.scale)
    await host.in_sdk_process("sampling")


async def through_sampler(host: Host) -> None:
    """Prints `sampling.sampler`."""
    from baselines.vllm_alone import write_random_adapter
    from tinker_local.backend.rendering.interface import RenderedInput
    from tinker_local.backend.sampling.interface import AdapterVersion, SampleWork
    from tinker_local.types import SamplingParams

    sampler = host.backend.models.get(host.model).engines.sampler
    with tempfile.TemporaryDirectory() as folder:
        version = AdapterVersion(
            "bench-random", write_random_adapter(Path(folder) / "adapter", host.scale.text, host.scale.rank)
        )
        await sampler.load_version(version)

        async def sample(prompt: list[int], max_tokens: int) -> int:
            params = SamplingParams(max_tokens=max_tokens, stop=())
            work = SampleWork(RenderedInput(np.array(prompt, np.int32)), version, params)
            (sequence,) = (await sampler.sample(work)).sequences
            return len(sequence.tokens)

        await _measure("sampling.sampler", host.scale, sample)
        await sampler.remove_version(version)


async def many_at_once(way: Way, scale: Scale) -> None:
    """Prints `sampling.in_process` or `sampling.sdk`."""
    sampler = await way.sampler(await way.create(scale.rank))
    await _measure(f"sampling.{way.name}", scale, lambda prompt, count: way.sample(sampler, prompt, count))


async def _measure(name: str, scale: Scale, sample: Callable[[list[int], int], Awaitable[int]]) -> None:
    with DeviceMemory() as memory:
        await at_once(scale, sample, min(64, scale.requests), 8)
        rate = await at_once(scale, sample, scale.requests, scale.output_tokens)
    note = f"LoRA of rank {scale.rank}, logprobs, {requests(scale)}"
    Line(name, rate, "tokens/s", peak_gib=memory.peak_gib, note=note).emit()


async def at_once(
    scale: Scale, sample: Callable[[list[int], int], Awaitable[int]], count: int, output_tokens: int
) -> float:
    """Output tokens per second of `count` requests with prompts of their own."""
    rng = np.random.default_rng(next(_seeds))
    prompts = [rng.integers(0, scale.text.vocab, scale.prompt_tokens).tolist() for _ in range(count)]
    start = time.perf_counter()
    counts = await asyncio.gather(*[sample(prompt, output_tokens) for prompt in prompts])
    return sum(counts) / (time.perf_counter() - start)
