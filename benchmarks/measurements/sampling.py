"""Output tokens per second of many requests that begin together: vLLM alone, our sampler, in process, over HTTP.

Each sends the same number of requests, with new random prompts in every round, after a short warm-up round.
"""

import asyncio
import itertools
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from harness.lines import Line
from harness.scale import Scale
from harness.timing import DeviceMemory

from measurements.hosting import Host
from measurements.ways import Way

WARM_UP_REQUESTS = 64
WARM_UP_TOKENS = 8

_seeds = itertools.count(1000)


def alone(scale: Scale, models: Path) -> None:
    """Prints `sampling.alone`: vLLM as its users run it."""
    from baselines.vllm_alone import write_random_adapter

    with tempfile.TemporaryDirectory() as folder:
        adapter = write_random_adapter(Path(folder) / "adapter", scale.text, scale.rank)
        alone_with(scale, models / "text", adapter, "sampling.alone")


def alone_with(scale: Scale, model: Path, adapter: Path, line: str) -> None:
    """Prints `line`: vLLM as its users run it, with `adapter`, which it can read."""
    from baselines.vllm_alone import VLLMAlone

    engine = VLLMAlone(scale, model, adapter)
    with DeviceMemory() as memory:
        engine.output_tokens_per_second(prompts(scale, min(WARM_UP_REQUESTS, scale.requests)), WARM_UP_TOKENS)
        found = [
            engine.output_tokens_per_second(prompts(scale, scale.requests), scale.output_tokens)
            for _ in range(scale.repeats)
        ]
    rate_line(line, scale, found, memory.peak_gib, engine.settings()).emit()


def prompts(scale: Scale, count: int) -> list[list[int]]:
    """Random tokens, different in each call."""
    rng = np.random.default_rng(next(_seeds))
    return [rng.integers(0, scale.text.vocab, scale.prompt_tokens).tolist() for _ in range(count)]


def rate_line(name: str, scale: Scale, found: Sequence[float], peak_gib: float | None, settings: str = "") -> Line:
    """A line with the median of the rates `found`, and their range in its note."""
    note = (
        f"LoRA of rank {scale.rank}, logprobs, {scale.requests} requests of {scale.prompt_tokens} in, "
        f"{scale.output_tokens} out; {min(found):,.0f} to {max(found):,.0f} in {len(found)} rounds"
    )
    if settings:
        note = f"{note}; {settings}"
    return Line(name, statistics.median(found), "tokens/s", peak_gib=peak_gib, note=note)


async def ours(host: Host) -> None:
    """The sampler itself, then `InProcessBackend`, then the SDK over HTTP."""
    await through_sampler(host)
    await many_at_once(host.way, host.scale)
    await host.in_sdk_process("sampling")


async def through_sampler(host: Host) -> None:
    """Prints `sampling.sampler`."""
    from baselines.vllm_alone import write_random_adapter
    from tinker_local.backend.adapters.adapter import AdapterVersion

    sampler = host.backend.models.get(host.model).engines.sampler
    with tempfile.TemporaryDirectory() as folder:
        version = AdapterVersion(
            "bench-random", write_random_adapter(Path(folder) / "adapter", host.scale.text, host.scale.rank)
        )
        await sampler.load_version(version)
        await with_version("sampling.sampler", host.scale, sampler, version)
        await sampler.remove_version(version)


async def with_version(line: str, scale: Scale, sampler: Any, version: Any) -> None:
    """Prints `line`: a sampler of vLLM that holds the adapter `version`."""
    from tinker_local.backend.rendering.rendered_input import RenderedInput
    from tinker_local.backend.sampling.sampler import SampleWork
    from tinker_local.types import SamplingParams

    async def sample(prompt: list[int], max_tokens: int) -> int:
        params = SamplingParams(max_tokens=max_tokens, stop=())
        work = SampleWork(RenderedInput(np.array(prompt, np.int32)), version, params)
        (sequence,) = (await sampler.sample(work)).sequences
        return len(sequence.tokens)

    await _measure(line, scale, sample)


async def many_at_once(way: Way, scale: Scale) -> None:
    """Prints `sampling.in_process` or `sampling.sdk`."""
    sampler = await way.sampler(await way.create(scale.rank))
    await _measure(f"sampling.{way.name}", scale, lambda prompt, count: way.sample(sampler, prompt, count))


async def _measure(name: str, scale: Scale, sample: Callable[[list[int], int], Awaitable[int]]) -> None:
    with DeviceMemory() as memory:
        await at_once(scale, sample, min(WARM_UP_REQUESTS, scale.requests), WARM_UP_TOKENS)
        found = [await at_once(scale, sample, scale.requests, scale.output_tokens) for _ in range(scale.repeats)]
    rate_line(name, scale, found, memory.peak_gib).emit()


async def at_once(
    scale: Scale, sample: Callable[[list[int], int], Awaitable[int]], count: int, output_tokens: int
) -> float:
    """Output tokens per second of `count` requests with different prompts."""
    asked = prompts(scale, count)
    start = time.perf_counter()
    counts = await asyncio.gather(*[sample(prompt, output_tokens) for prompt in asked])
    return sum(counts) / (time.perf_counter() - start)
