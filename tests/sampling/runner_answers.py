"""Run as a program: what a sampler answers on the model runner that VLLM_USE_V2_MODEL_RUNNER says, as JSON.

python runner_answers.py MODEL ADAPTER ADAPTER ANSWERS
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from tinker_local.backend.adapters.adapter import AdapterVersion
from tinker_local.backend.rendering.grammar import Grammar
from tinker_local.backend.rendering.rendered_input import RenderedInput
from tinker_local.backend.sampling.sampler import Penalties, SampleWork
from tinker_local.backend.vllm_engine.build_engine import EngineOptions
from tinker_local.backend.vllm_engine.compat_vllm import model_runner, scheduler
from tinker_local.backend.vllm_engine.engine_thread import EngineThread
from tinker_local.backend.vllm_engine.vllm_sampler import VLLMSampler
from tinker_local.types import SampleOutput, SamplingParams

BLOCK = 128
"""Positions of a block of vLLM's KV cache on a CPU."""


def prompt(length: int, first: int = 20) -> RenderedInput:
    return RenderedInput((np.arange(first, first + length) % 300).astype(np.int32))


def works(adapters: list[AdapterVersion]) -> dict[str, SampleWork]:
    """Which share steps."""

    def one(version: AdapterVersion | None = None, length: int = 30, samples: int = 2, **given: Any) -> SampleWork:
        more = {name: given.pop(name) for name in [*given] if name not in SamplingParams.model_fields}
        params = SamplingParams(**{"max_tokens": 12, "stop": (), "seed": 5, **given})
        return SampleWork(prompt(length), version, params, num_samples=samples, **more)

    first, second = adapters
    grammar = Grammar("regex", "[a-z]{3}[0-9]{4}", "structured_outputs.regex")
    return {
        "plain": one(),
        "greedy": one(temperature=0.0),
        "cut": one(temperature=1.7, top_p=0.8, top_k=40),
        "first adapter": one(first, prompt_logprobs=True),
        "second adapter": one(second, prompt_logprobs=True, topk_prompt_logprobs=3),
        "base, scored": one(prompt_logprobs=True, topk_sample_logprobs=4),
        "penalties": one(penalties=Penalties(presence=1.5, frequency=0.7), max_tokens=24, temperature=0.3),
        "a long prompt": one(length=900, prompt_logprobs=True),
        "stops": one(stop=tuple(range(0, 300, 7)), max_tokens=40),
        "a stop string": one(stop="e", max_tokens=40),
        "a grammar": one(stop=None, grammar=grammar, temperature=0.7),
    }


def answers(output: SampleOutput) -> dict[str, Any]:
    found = {
        "tokens": [each.tokens.tolist() for each in output.sequences],
        "logprobs": [each.logprobs.tolist() for each in output.sequences if each.logprobs is not None],
        "reasons": [each.stop_reason for each in output.sequences],
    }
    if output.prompt_logprobs is not None:
        found["prompt"] = output.prompt_logprobs[1:].tolist()
    if output.topk_prompt_logprobs is not None:
        found["top of the prompt"] = output.topk_prompt_logprobs.token_ids.tolist()
    if output.sequences[0].topk_logprobs is not None:
        found["top"] = [each.topk_logprobs.logprobs.tolist() for each in output.sequences if each.topk_logprobs]
    return found


async def together(sampler: Any, asked: dict[str, SampleWork]) -> dict[str, Any]:
    outputs = await asyncio.gather(*(sampler.sample(work) for work in asked.values()))
    return {name: answers(output) for name, output in zip(asked, outputs, strict=True)}


async def preempted(sampler: VLLMSampler) -> dict[str, Any]:
    """Four sequences that take a second block each, of which the KV cache has less; how often one was preempted."""
    params = SamplingParams(max_tokens=28, stop=(), seed=3, temperature=1.2)
    asked = {
        f"{kind} {first}": SampleWork(prompt(BLOCK - 9, first), None, params, penalties=penalties)
        for kind, penalties in (("seeded", None), ("lowered", Penalties(frequency=0.3)))
        for first in range(2)
    }
    core = scheduler(sampler._engine.live())
    count, original = 0, core._preempt_request

    def counted(*given: Any, **named: Any) -> Any:
        nonlocal count
        count += 1
        return original(*given, **named)

    core._preempt_request = counted
    found = await together(sampler, asked)
    return {"preemptions": count, "answers": found}


def main(model: str, first: str, second: str, path: str) -> None:
    thread = EngineThread()
    adapters = [AdapterVersion(Path(folder).name, Path(folder)) for folder in (first, second)]
    options = EngineOptions(model, max_rank=8, kv_cache_bytes=2**26, max_context_length=1024, max_batched_tokens=512)
    sampler = VLLMSampler(options, thread)
    runner = model_runner(sampler._engine.live())
    found: dict[str, Any] = {"runner": type(runner).__module__}
    found["answers"] = asyncio.run(together(sampler, works(adapters)))
    head_bytes = 2 * 2 * 32 * 2 * 4  # of a position: keys and values of two layers, two heads of 32 numbers
    small = VLLMSampler(
        EngineOptions(model, max_rank=8, kv_cache_bytes=7 * BLOCK * head_bytes, max_context_length=2 * BLOCK), thread
    )
    found["preempted"] = asyncio.run(preempted(small))
    Path(path).write_text(json.dumps(found))
    thread.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
