"""What a request asks about its prompt: each answer is what HF's distribution in float32 says."""

import asyncio
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tinker_local.backend.sampling.sampler import SampleWork
from tinker_local.backend.vllm_engine import score_prompts
from tinker_local.backend.vllm_engine.compat_vllm import runs_on_cpu
from tinker_local.backend.vllm_engine.vllm_sampler import VLLMSampler
from tinker_local.types import InvalidRequestError, SamplingParams, TensorData

from tests.sampling.sampling_answers import (
    EMPTY,
    EVERYTHING,
    TEXT,
    ask,
    log_p,
    same_drawn,
    same_sampled_topk,
    same_topk,
    sparse,
    targets,
)


async def test_everything_at_once_agrees_with_hf(case: Any) -> None:
    served, prompt, adapter = case
    expected = log_p(served, prompt, adapter)
    ids = targets((prompt.length - 1, 3))
    output = await ask(
        served,
        prompt,
        None if adapter is None else adapter.version,
        params=SamplingParams(max_tokens=4, temperature=0.5, top_k=5, stop=()),
        num_samples=3,
        prompt_logprobs=True,
        topk_prompt_logprobs=5,
        topk_sample_logprobs=7,
        target_prompt_logprobs=TensorData.from_numpy(ids),
    )
    next_ids = torch.from_numpy(prompt.token_ids[1:].astype(np.int64))
    assert output.prompt_logprobs is not None
    served.same(output.prompt_logprobs[1:], expected.gather(1, next_ids[:, None])[:, 0].numpy())
    same_topk(served, output.topk_prompt_logprobs, expected)
    scored = output.target_prompt_logprobs
    assert scored is not None
    assert (scored.dtype, scored.shape, scored.is_sparse) == ("float32", ids.shape, False)
    wanted = expected.gather(1, torch.from_numpy(ids).clamp(min=0)).numpy()
    served.same(scored.to_numpy(), np.where(ids == -1, 0.0, wanted))
    assert (scored.to_numpy()[ids == -1] == 0.0).all()
    for sequence in output.sequences:
        same_sampled_topk(served, prompt, sequence, 0.5, 7, adapter)


async def test_requests_with_different_questions_and_adapters_share_steps(vl: Any, tmp_path: Path) -> None:
    prompts = [vl.prompt(list(range(start, start + 30))) for start in (20, 60, 100, 140)]
    adapters = [
        None,
        vl.adapter(tmp_path / "v1", EVERYTHING, 4, 1),
        vl.adapter(tmp_path / "v2", "^lm_head$", 8, 2),
        None,
    ]
    widths = [3, 0, 1, 440]
    outputs = await asyncio.gather(
        *(
            ask(vl, prompt, adapter and adapter.version, topk_prompt_logprobs=width)
            for prompt, adapter, width in zip(prompts, adapters, widths, strict=True)
        )
    )
    for prompt, adapter, width, output in zip(prompts, adapters, widths, outputs, strict=True):
        assert output.prompt_logprobs is None  # not asked for
        if width:
            same_topk(vl, output.topk_prompt_logprobs, log_p(vl, prompt, adapter))
        else:
            assert output.topk_prompt_logprobs is None


async def test_a_prompt_longer_than_one_step_and_computed_in_parts(
    vl: Any, noise: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    parts: list[int] = []

    answer_rows = score_prompts.answer_rows

    def counted(logits: torch.Tensor, *args: Any) -> None:
        parts.append(logits.numel())
        answer_rows(logits, *args)

    monkeypatch.setattr(score_prompts, "answer_rows", counted)
    monkeypatch.setattr(score_prompts, "CHUNK_NUMBERS", 50_000)
    ids = np.random.default_rng(0).integers(0, 300, 2500).tolist()
    prompt = vl.prompt(ids[:2000], noise(150, 100), ids[2000:])
    wanted = targets((prompt.length - 1, 2), share=0.01)
    output = await ask(
        vl, prompt, prompt_logprobs=True, topk_prompt_logprobs=4, target_prompt_logprobs=TensorData.from_numpy(wanted)
    )
    # No more of the vocabulary's numbers at a time than that, and every row once.
    assert max(parts) <= 50_000
    assert sum(parts) == (prompt.length - 1) * vl.sampler._vocab_size
    expected = log_p(vl, prompt)
    same_topk(vl, output.topk_prompt_logprobs, expected)
    assert output.prompt_logprobs is not None
    assert output.target_prompt_logprobs is not None
    vl.same(output.prompt_logprobs[1:], vl.hf.prompt_logprobs(prompt))
    scored = expected.gather(1, torch.from_numpy(wanted).clamp(min=0)).numpy()
    vl.same(output.target_prompt_logprobs.to_numpy(), np.where(wanted == -1, 0.0, scored))


async def test_sparse_targets_are_answered_sparsely_and_only_where_they_name_an_id(text: Any) -> None:
    prompt = text.prompt(TEXT)
    ids = targets((39, 6), share=0.1)
    ids[5], ids[:3] = -1, -1
    request = sparse(ids)
    # A listed cell may say -1 too.
    request = request.model_copy(update={"data": np.where(np.arange(request.data.size) == 2, -1, request.data)})
    scored = (await ask(text, prompt, target_prompt_logprobs=request)).target_prompt_logprobs
    assert scored is not None
    assert np.array_equal(scored.sparse_crow_indices, request.sparse_crow_indices)
    assert np.array_equal(scored.sparse_col_indices, request.sparse_col_indices)
    assert (scored.dtype, scored.shape) == ("float32", (39, 6))
    rows, columns = np.nonzero(ids != -1)
    expected = log_p(text, prompt)[rows, ids[rows, columns]].numpy()
    expected[2] = 0.0
    text.same(scored.data, expected)


async def test_a_prompt_of_one_token_has_empty_answers(text: Any) -> None:
    output = await ask(text, text.prompt([5]), prompt_logprobs=True, topk_prompt_logprobs=2, prompt_alt_tokens_k=3)
    assert output.prompt_alt_tokens is not None
    assert output.prompt_alt_tokens.tokens.shape == output.prompt_alt_tokens.logprobs.shape == (0, 3)
    assert output.topk_prompt_logprobs is not None
    assert output.topk_prompt_logprobs.token_ids.tolist() == [[0, 0]]
    assert output.topk_prompt_logprobs.logprobs.tolist() == [[EMPTY[1]] * 2]


def kv_bytes(served: Any) -> int:
    """Of the KV cache, for one position."""
    config = served.hf.model.config
    return int(
        2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * (4 if runs_on_cpu() else 2)
    )


async def test_a_prompt_that_is_preempted_in_its_middle_is_answered_rightly(text: Any) -> None:
    """Whatever takes its place in the KV cache: it starts again from its beginning."""
    options = dataclasses.replace(
        text.options,
        kv_cache_bytes=640 * kv_bytes(text),
        max_context_length=400,
        max_batched_tokens=32,
        max_sequences=8,
    )
    thread = text.sampler._thread
    small = VLLMSampler(options, thread)
    halfway: list[int] = []

    def watch(engine: Any) -> None:
        """Preempt each prompt once in its middle, as the scheduler does it; what makes it do so differs by version."""
        scheduler = engine.engine_core.engine_core.scheduler
        schedule = scheduler.schedule
        seen: set[str] = set()

        def interrupted(*args: Any, **kwargs: Any) -> Any:
            for request in list(scheduler.running):
                if 0 < request.num_computed_tokens < request.num_prompt_tokens and request.request_id not in seen:
                    seen.add(request.request_id)
                    halfway.append(request.num_computed_tokens)
                    scheduler.running.remove(request)
                    scheduler._preempt_request(request, time.monotonic())
                    # It may be taken up again at once, as one that was not in the last step.
                    scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
            return schedule(*args, **kwargs)

        scheduler.schedule = interrupted

    await asyncio.wrap_future(thread.call(small._engine, watch))
    try:
        prompts = [text.prompt([(7 * i * i + start) % 300 for i in range(250)]) for start in range(6)]
        wanted = [targets((249, 2), seed) for seed in range(6)]
        outputs = await asyncio.gather(
            *(
                small.sample(
                    SampleWork(
                        prompt,
                        None,
                        SamplingParams(max_tokens=100, stop=(), seed=5),
                        prompt_logprobs=True,
                        topk_prompt_logprobs=3,
                        target_prompt_logprobs=TensorData.from_numpy(ids),
                        prompt_alt_tokens_k=2,
                    )
                )
                for prompt, ids in zip(prompts, wanted, strict=True)
            )
        )
    finally:
        await small.close()
    assert len(halfway) >= len(prompts)
    for prompt, ids, output in zip(prompts, wanted, outputs, strict=True):
        expected = log_p(text, prompt)
        assert output.prompt_logprobs is not None
        assert output.target_prompt_logprobs is not None
        text.same(output.prompt_logprobs[1:], text.hf.prompt_logprobs(prompt))
        same_topk(text, output.topk_prompt_logprobs, expected)
        scored = expected.gather(1, torch.from_numpy(ids).clamp(min=0)).numpy()
        text.same(output.target_prompt_logprobs.to_numpy(), np.where(ids == -1, 0.0, scored))
        same_drawn(text, output, expected)
        (sequence,) = output.sequences
        text.same(sequence.logprobs, text.hf.logprobs(prompt, sequence.tokens))


REFUSED: dict[str, dict[str, Any]] = {
    r"prompt_logprobs_last_n: 5 needs prompt_logprobs": {"prompt_logprobs_last_n": 5, "topk_prompt_logprobs": 1},
    r"prompt_logprobs_last_n: 40 is not between 1 and 39 \(the prompt has 40 tokens": {
        "prompt_logprobs_last_n": 40,
        "prompt_logprobs": True,
    },
    r"prompt_alt_tokens_k: 40 prompt tokens times 1000000 are 40000000, this server's limit is 33554432": {
        "prompt_alt_tokens_k": 10**6
    },
    "topk_prompt_logprobs: 600 is more than the vocabulary's": {"topk_prompt_logprobs": 600},
    "topk_sample_logprobs: 600 is more than the vocabulary's": {"topk_sample_logprobs": 600},
    r"topk_sample_logprobs: num_samples 1000 times up to 900 tokens times 100 are 90000000 logprobs": {
        "topk_sample_logprobs": 100,
        "num_samples": 1000,
        "params": SamplingParams(max_tokens=900),
    },
    r"target_prompt_logprobs: token ids are int64, not float32": {
        "target_prompt_logprobs": TensorData.from_numpy(np.zeros((39, 1), np.float32))
    },
    r"target_prompt_logprobs: shape \[40, 1\], expected \[39, K\]": {
        "target_prompt_logprobs": TensorData.from_numpy(np.zeros((40, 1), np.int64))
    },
    r"target_prompt_logprobs: shape \[39\], expected \[39, K\]": {
        "target_prompt_logprobs": TensorData.from_numpy(np.zeros(39, np.int64))
    },
    r"target_prompt_logprobs: names no token id, every one of its 39 cells is -1": {
        "target_prompt_logprobs": TensorData.from_numpy(np.full((39, 1), -1))
    },
    r"target_prompt_logprobs: token id 9999 \(data\[0\]\) is outside the vocabulary of": {
        "target_prompt_logprobs": TensorData.from_numpy(np.full((39, 1), 9999))
    },
    r"target_prompt_logprobs: token id -2 \(data\[0\]\) is outside the vocabulary of": {
        "target_prompt_logprobs": TensorData.from_numpy(np.full((39, 1), -2))
    },
}


@pytest.mark.parametrize("message", REFUSED)
async def test_what_cannot_be_answered_is_refused_with_the_numbers(text: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        await ask(text, text.prompt(TEXT), **REFUSED[message])
