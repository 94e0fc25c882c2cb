"""vLLM in a separate process answers as in the server's, to the bit, and when it ends the next one does."""

import asyncio
import functools
import gc
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tinker_local.backend.process import async_calls
from tinker_local.backend.process.process_group import ProcessEndedError
from tinker_local.backend.rendering.grammar import Grammar
from tinker_local.backend.sampling.process_sampler import ProcessSampler
from tinker_local.backend.sampling.sampler import SampleWork
from tinker_local.types import InternalError, InvalidRequestError, SampleOutput, SamplingParams
from transformers import AutoTokenizer

from tests.sampling.sampling_answers import EVERYTHING, TEXT
from tests.sampling.test_handover import Unwritten

pytestmark = pytest.mark.more


@pytest.fixture(scope="module")
def processed(vl: Any) -> Any:
    """A sampler of `vl`'s model in a process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parent))
        import odd_vllm_samplers  # type: ignore[import-not-found]

        sampler = ProcessSampler(functools.partial(odd_vllm_samplers.odd, vl.options), timeout=10)
        sampler.load()
        yield sampler
        sampler.end()


@pytest.fixture
async def sampler(processed: ProcessSampler) -> ProcessSampler:
    """`processed`, which works."""
    if processed.ended:
        await asyncio.to_thread(processed.restart)
        await asyncio.to_thread(processed.load)
    return processed


def same(one: SampleOutput, other: SampleOutput, rounding: float = 0.0) -> None:
    """`rounding`: how far logprobs may differ, in nats."""
    for a, b in zip(one.sequences, other.sequences, strict=True):
        assert a.tokens.tolist() == b.tokens.tolist()
        np.testing.assert_allclose(a.logprobs, b.logprobs, rtol=0, atol=rounding)
    if other.prompt_logprobs is not None:
        np.testing.assert_array_equal(one.prompt_logprobs, other.prompt_logprobs)  # type: ignore[arg-type]
    if other.topk_prompt_logprobs is not None:
        assert one.topk_prompt_logprobs is not None
        np.testing.assert_array_equal(one.topk_prompt_logprobs.token_ids, other.topk_prompt_logprobs.token_ids)


def sampled(prompt: Any, version: Any = None, seed: int = 7, tokens: int = 12, **options: Any) -> SampleWork:
    return SampleWork(prompt, version, SamplingParams(max_tokens=tokens, seed=seed, stop=()), **options)


async def test_text_images_and_adapters_give_the_same_bits_as_in_the_servers_process(
    sampler: ProcessSampler, vl: Any, noise: Any, tmp_path: Path
) -> None:
    assert (sampler.max_context_length, sampler.adapter_dtype, sampler.can_sleep) == (
        vl.sampler.max_context_length,
        vl.sampler.adapter_dtype,
        vl.sampler.can_sleep,
    )
    adapter = vl.adapter(tmp_path / "v1", EVERYTHING, 4).version
    picture = vl.prompt([7, 8], noise(70, 70), [9], noise(33, 120, 2), TEXT)
    before = sampler.images_encoded
    for version in (None, adapter):
        for prompt in (vl.prompt(TEXT), picture):
            work = sampled(prompt, version, num_samples=3, prompt_logprobs=True, topk_prompt_logprobs=4)
            same(await sampler.sample(work), await vl.sampler.sample(work))
    assert sampler.images_encoded - before >= 2
    assert sampler.versions_loaded >= 1
    digits = Grammar("regex", "[0-9]{12}", "structured_outputs.regex")
    work = sampled(picture, adapter, num_samples=3, grammar=digits)
    found = await sampler.sample(work)
    # vLLM compiles grammars in threads, so the sequences may begin in different steps, in batches of other sizes.
    same(found, await vl.sampler.sample(work), rounding=1e-5)
    tokenizer = AutoTokenizer.from_pretrained(vl.folder)
    assert all(tokenizer.decode(sequence.tokens).isdigit() for sequence in found.sequences)
    with pytest.raises(InvalidRequestError, match=r"structured_outputs.regex: .*parenthesis"):
        await sampler.sample(sampled(picture, grammar=Grammar("regex", "(a", "structured_outputs.regex")))
    with pytest.raises(InvalidRequestError, match="exceeds the model's context window"):
        await sampler.sample(sampled(vl.prompt(TEXT), tokens=10**6))
    await vl.sampler.remove_version(adapter)
    await sampler.remove_version(adapter)


async def test_a_version_in_memory_is_served_then_read_from_its_folder_also_by_the_next_process(
    sampler: ProcessSampler, vl: Any, tmp_path: Path
) -> None:
    unwritten = Unwritten(vl.adapter(tmp_path / "v1", EVERYTHING, 4))
    await sampler.load_version(unwritten.version)
    work = sampled(vl.prompt(TEXT), unwritten.version, prompt_logprobs=True)
    first = await sampler.sample(work)
    same(first, await vl.sampler.sample(work))
    for written in (False, True):
        if written:
            unwritten.write()
        os.kill(sampler.pids[0], signal.SIGKILL)
        assert sampler._group.wait(60)
        with pytest.raises(ProcessEndedError, match="SIGKILL"):
            await sampler.sample(work)
        await asyncio.to_thread(sampler.restart)
        await asyncio.to_thread(sampler.load)
        same(await sampler.sample(work), first)
    gc.collect()
    await sampler.remove_version(unwritten.version)
    await vl.sampler.remove_version(unwritten.version)


async def test_cancelled_samples_free_their_slots(sampler: ProcessSampler, vl: Any) -> None:
    slots = vl.options.max_sequences + 32
    began = [asyncio.Event() for _ in range(2)]
    loop = asyncio.get_running_loop()
    told = [functools.partial(loop.call_soon_threadsafe, event.set) for event in began]
    long = sampled(vl.prompt(TEXT), tokens=3000, num_samples=slots, begun=told[0])
    running = asyncio.create_task(sampler.sample(long))
    await began[0].wait()
    waiting = asyncio.create_task(sampler.sample(sampled(vl.prompt(TEXT), begun=told[1])))
    while not sampler.sequences_waiting:
        await sampler.pulse()
    assert not began[1].is_set()
    running.cancel()
    await asyncio.wait_for(waiting, 100)
    while sampler.sequences_waiting:  # told once more
        await sampler.pulse()
    assert running.cancelled()


async def test_an_exception_in_a_step_stays_in_the_process(sampler: ProcessSampler, vl: Any) -> None:
    import odd_vllm_samplers

    pids = sampler.pids
    with pytest.raises(InternalError, match="RuntimeError: torn"):
        await sampler.sample(sampled(vl.prompt(TEXT), seed=odd_vllm_samplers.FAIL))
    same(await sampler.sample(sampled(vl.prompt(TEXT))), await vl.sampler.sample(sampled(vl.prompt(TEXT))))
    assert (sampler.pids, sampler.ended) == (pids, False)


async def test_a_step_that_hangs_ends_the_process(
    sampler: ProcessSampler, vl: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import odd_vllm_samplers

    monkeypatch.setattr(sampler._calls, "_seconds", 2.0)
    assert async_calls.PULSE_SECONDS == 1
    with pytest.raises(ProcessEndedError, match="gave no answer for 2 s, and was killed"):
        await sampler.sample(sampled(vl.prompt(TEXT), seed=odd_vllm_samplers.HANG))
