"""max_tokens, the context, stops and what a result says about its end."""

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tinker_local.backend.rendering.rendered_input import RenderedInput
from tinker_local.backend.sampling.sampler import SampleWork
from tinker_local.backend.vllm_engine.compat_vllm import scheduler
from tinker_local.backend.vllm_engine.engine_inputs import engine_params, engine_prompt
from tinker_local.backend.vllm_engine.engine_thread import EngineRequest
from tinker_local.backend.vllm_engine.vllm_sampler import VLLMSampler
from tinker_local.types import InvalidRequestError, SampledSequence, SamplingParams

PROMPT = list(range(30, 45))
CONTEXT = 512
"""A part of what the model has, and a multiple of vLLM's blocks."""


async def sample(served: Any, prompt: list[int] = PROMPT, **params: Any) -> SampledSequence:
    output = await served.sampler.sample(SampleWork(served.prompt(prompt), None, SamplingParams(**params)))
    result: SampledSequence = output.sequences[0]
    return result


async def greedy(served: Any, length: int = 30) -> list[int]:
    """What the model says at temperature 0, without any stop."""
    return (await sample(served, max_tokens=length, temperature=0.0, stop=())).tokens.tolist()


async def test_without_max_tokens_the_sample_goes_up_to_the_context(text: Any) -> None:
    prompt = [i % 300 for i in range(1000)]
    sequence = await sample(text, prompt, stop=())
    assert sequence.tokens.size == 24
    assert sequence.stop_reason == "length"


async def test_prompt_and_max_tokens_may_fill_the_context_but_not_exceed_it(text: Any) -> None:
    prompt = [i % 300 for i in range(1000)]
    assert (await sample(text, prompt, max_tokens=24, stop=())).tokens.size == 24
    for length, params, numbers in (
        (1000, {"max_tokens": 25}, r"1000 prompt tokens \+ 25 max_tokens > 1024"),
        (1024, {}, r"1024 prompt tokens \+ 1 max_tokens > 1024"),
        (2000, {"max_tokens": 1}, r"2000 prompt tokens \+ 1 max_tokens > 1024"),
    ):
        message = "Prompt length plus max_tokens exceeds the model's context window: " + numbers
        with pytest.raises(InvalidRequestError, match=message):
            await sample(text, [i % 300 for i in range(length)], **params)


async def test_a_context_that_the_cache_bounds_is_served_to_its_end(text: Any) -> None:
    cache = scheduler(text.sampler._engine.live()).kv_cache_config
    block = sum(each.size for each in cache.kv_cache_tensors) // cache.num_blocks
    positions = cache.kv_cache_groups[0].kv_cache_spec.block_size
    blocks = CONTEXT // positions + 1  # vLLM leaves one empty
    options = dataclasses.replace(text.options, kv_cache_bytes=blocks * block, max_context_length=None)
    sampler = VLLMSampler(options, text.sampler._thread)
    try:
        assert sampler.max_context_length == CONTEXT
        work = SampleWork(text.prompt([i % 300 for i in range(CONTEXT - 1)]), None, SamplingParams(max_tokens=1))
        output = await asyncio.wait_for(sampler.sample(work), 60)
    finally:
        await sampler.close()
    assert output.sequences[0].tokens.size == 1


async def test_an_empty_prompt_is_refused(text: Any) -> None:
    work = SampleWork(RenderedInput(np.empty(0, np.int32)), None, SamplingParams(max_tokens=1))
    with pytest.raises(InvalidRequestError, match="prompt"):
        await text.sampler.sample(work)


async def test_stop_ids_end_a_sample_and_are_kept_with_their_logprob(text: Any) -> None:
    tokens = await greedy(text)
    stop = next(token for token in tokens[4:] if token not in tokens[:4])
    sequence = await sample(text, max_tokens=30, temperature=0.0, stop=(stop, 1))
    assert sequence.tokens.tolist() == tokens[: tokens.index(stop) + 1]
    assert sequence.stop_reason == "stop"
    assert sequence.logprobs is not None
    assert sequence.logprobs.size == sequence.tokens.size


@pytest.mark.parametrize("as_list", [False, True])
async def test_stop_strings_end_a_sample_with_the_token_that_completes_them(text: Any, as_list: bool) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(text.folder)
    tokens = await greedy(text)
    decoded = tokenizer.decode(tokens)
    stop = next(decoded[i : i + 3] for i in range(6, len(decoded) - 3) if decoded[i : i + 3].isascii())
    sequence = await sample(text, max_tokens=30, temperature=0.0, stop=("not in there", stop) if as_list else stop)
    count = next(n for n in range(1, 31) if stop in tokenizer.decode(tokens[:n]))
    assert sequence.tokens.tolist() == tokens[:count]
    assert sequence.stop_reason == "stop"
    assert sequence.logprobs is not None
    assert sequence.logprobs.size == count


async def test_a_special_token_may_be_named_by_its_text(text: Any) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(text.folder)
    params = {"max_tokens": 200, "temperature": 30.0, "seed": 1}
    tokens = (await sample(text, stop=(), **params)).tokens.tolist()
    specials = set(tokenizer.added_tokens_decoder) - set(eos_ids(text))
    special = next(token for token in tokens if token in specials)
    stopped = await sample(text, stop=tokenizer.decode([special]), **params)
    end = next(i for i, token in enumerate(tokens) if token in (special, *eos_ids(text)))
    assert stopped.tokens.tolist() == tokens[: end + 1]


def eos_ids(served: Any) -> list[int]:
    from transformers import GenerationConfig

    ids = GenerationConfig.from_pretrained(served.folder).eos_token_id
    return ids if isinstance(ids, list) else [ids]


async def test_eos_stops_unless_stop_is_empty_also_beside_other_stops(text: Any) -> None:
    eos = set(eos_ids(text))
    for seed in range(20):
        params = {"max_tokens": 300, "temperature": 30.0, "seed": seed}
        tokens = (await sample(text, stop=(), **params)).tokens.tolist()
        assert len(tokens) == 300
        if eos & set(tokens[2:-2]) and not eos & set(tokens[:2]):
            break
    first = next(i for i, token in enumerate(tokens) if token in eos)
    for stop in (None, ("never said",), (tokens[first + 1],) if tokens[first + 1] not in tokens[:first] else None):
        sequence = await sample(text, stop=stop, **params)
        assert sequence.tokens.tolist() == tokens[: first + 1]
        assert sequence.stop_reason == "stop"


async def test_a_stop_id_outside_the_vocabulary_is_refused_by_name(text: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"sampling_params.stop\[1\]: token id 100000 .* vocabulary of 512"):
        await sample(text, max_tokens=1, stop=(3, 100000))


async def test_hundreds_of_stop_ids_stop_at_the_first_that_is_sampled(text: Any) -> None:
    params = {"max_tokens": 50, "temperature": 30.0, "seed": 1}
    tokens = (await sample(text, stop=(), **params)).tokens.tolist()
    passed = set(tokens[:5])
    end = next(i for i, token in enumerate(tokens) if token not in passed or token in eos_ids(text))
    stopped = await sample(text, stop=tuple(set(range(512)) - passed), **params)
    assert stopped.tokens.tolist() == tokens[: end + 1]
    assert stopped.stop_reason == "stop"


async def test_the_budget_ends_a_sample_with_length(text: Any) -> None:
    sequence = await sample(text, max_tokens=5, stop=())
    assert sequence.stop_reason == "length"
    assert sequence.tokens.size == 5


async def test_requests_that_do_not_fit_the_kv_cache_together_give_what_they_give_alone(text: Any) -> None:
    """vLLM preempts some of them and computes them again."""
    thread = text.sampler._thread
    small = VLLMSampler(dataclasses.replace(text.options, kv_cache_bytes=2 * 2**20), thread)
    preempted = []

    def watch(engine: Any) -> None:
        scheduler = engine.engine_core.engine_core.scheduler
        preempt = scheduler._preempt_request

        def counted(*args: Any, **named: Any) -> Any:
            preempted.append(1)
            return preempt(*args, **named)

        scheduler._preempt_request = counted

    await asyncio.wrap_future(thread.call(small._engine, watch))
    works = [
        SampleWork(
            text.prompt(np.random.default_rng(seed).integers(0, 300, 500 + seed).tolist()),
            None,
            SamplingParams(max_tokens=200, seed=seed, stop=()),
            prompt_logprobs=seed % 2 == 0,
        )
        for seed in range(6)
    ]
    squeezed = await asyncio.gather(*(small.sample(work) for work in works))
    assert preempted
    assert sum(output.times.preemptions for output in squeezed) == len(preempted)
    for work, output in zip(works, squeezed, strict=True):
        (sequence,) = output.sequences
        text.same(sequence.logprobs, text.hf.logprobs(work.prompt, sequence.tokens))
        if work.prompt_logprobs:
            assert output.prompt_logprobs is not None
            text.same(output.prompt_logprobs[1:], text.hf.prompt_logprobs(work.prompt))
    await small.close()


async def test_several_samples_share_one_prefill_and_the_cache_is_counted_once(
    vl: Any, noise: Callable[..., Any]
) -> None:
    """Whole blocks are shared (128 tokens on CPU)."""
    prompt = vl.prompt(np.random.default_rng(5).integers(0, 300, 250).tolist(), noise(64, 64, 9), list(range(150)))
    work = SampleWork(prompt, None, SamplingParams(max_tokens=2, stop=()), num_samples=4)
    request = EngineRequest(engine_prompt(prompt), engine_params(work, 4096, 512, None))
    thread, engine = vl.sampler._thread, vl.sampler._engine
    block = thread.call(engine, lambda vllm: vllm.vllm_config.cache_config.block_size).result(10)
    shared = (prompt.length - 1) // block * block
    outputs = await asyncio.wrap_future(thread.submit(engine, lambda _: request))
    assert [output.num_cached_tokens for output in outputs] == [0, shared, shared, shared]
    assert (await vl.sampler.sample(work)).prompt_cache_hit_tokens == shared > 0
