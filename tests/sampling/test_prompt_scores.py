"""What a request asks about its prompt: each answer is what HF's distribution in float32 says."""

import asyncio
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tinker_local.backend.sampling.interface import SampleWork
from tinker_local.backend.sampling.vllm_sampler import VLLMSampler
from tinker_local.types import InvalidRequestError, SampleOutput, SamplingParams, TensorData

TEXT = list(range(20, 60))
EMPTY = (0, -99999.0)
EVERYTHING = r"self_attn\.(q|k|v|o)_proj$|mlp\.(gate|up|down)_proj$|^lm_head$"


async def ask(served: Any, prompt: Any, version: Any = None, **options: Any) -> SampleOutput:
    params = options.pop("params", SamplingParams(max_tokens=1))
    result: SampleOutput = await served.sampler.sample(SampleWork(prompt, version, params, **options))
    return result


def log_p(served: Any, prompt: Any, adapter: Any = None) -> torch.Tensor:
    """[P - 1, V]"""
    with served.hf.merged(adapter):
        result: torch.Tensor = served.hf.logits(prompt)[:-1].log_softmax(-1)
    return result


def same_topk(served: Any, topk: Any, expected: torch.Tensor, first_row: int = 0) -> None:
    """`topk` [P, k] has the likeliest of `expected` [P - 1, V] from `first_row` on and nothing before."""
    k = topk.token_ids.shape[1]
    assert topk.token_ids.shape == (len(expected) + 1, k)
    assert (topk.token_ids[: first_row + 1] == EMPTY[0]).all()
    assert (topk.logprobs[: first_row + 1] == EMPTY[1]).all()
    ids = torch.from_numpy(topk.token_ids[first_row + 1 :].astype(np.int64))
    assert all(len(set(row.tolist())) == k for row in ids)
    served.same(topk.logprobs[first_row + 1 :], expected[first_row:].topk(k).values.numpy())
    served.same(topk.logprobs[first_row + 1 :], expected[first_row:].gather(1, ids).numpy())


def targets(shape: tuple[int, int], seed: int = 0, share: float = 0.5) -> np.ndarray:
    """Random ids below 300, -1 in some cells."""
    random = np.random.default_rng(seed)
    return np.where(random.random(shape) < share, random.integers(0, 300, shape), -1)


def sparse(ids: np.ndarray) -> TensorData:
    rows, columns = np.nonzero(ids != -1)
    crow = np.searchsorted(rows, np.arange(len(ids) + 1))
    return TensorData(
        data=ids[rows, columns], dtype="int64", shape=ids.shape, sparse_crow_indices=crow, sparse_col_indices=columns
    )


@pytest.fixture(params=["base", "adapter"])
def case(request: pytest.FixtureRequest, served: Any, tmp_path: Path, noise: Callable[..., Any]) -> Any:
    """(served, prompt, adapter or None), text for text models, images and text for the others."""
    adapter = served.adapter(tmp_path / "v1", EVERYTHING, 4) if request.param == "adapter" else None
    parts = [TEXT] if served.model_class.endswith("CausalLM") else [[7, 8], noise(70, 70), [9], noise(33, 120, 2), TEXT]
    return served, served.prompt(*parts), adapter


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


def same_sampled_topk(served: Any, prompt: Any, sequence: Any, temperature: float, k: int, adapter: Any = None) -> None:
    with served.hf.merged(adapter):
        logits = served.hf.logits(prompt, sequence.tokens.tolist())[prompt.length - 1 : -1]
    expected = (logits / (temperature or 1.0)).log_softmax(-1)
    scale = 1 / (temperature or 1.0)
    chosen = torch.from_numpy(sequence.tokens.astype(np.int64))[:, None]
    served.same(sequence.logprobs, expected.gather(1, chosen)[:, 0].numpy(), scale)
    topk = sequence.topk_logprobs
    assert topk.token_ids.shape == (sequence.tokens.size, k)
    served.same(topk.logprobs, expected.topk(k).values.numpy(), scale)
    ids = torch.from_numpy(topk.token_ids.astype(np.int64))
    assert all(len(set(row.tolist())) == k for row in ids)
    served.same(topk.logprobs, expected.gather(1, ids).numpy(), scale)


async def test_sampled_topk_of_requests_that_share_steps_agree_with_hf(vl: Any, noise: Callable[..., Any]) -> None:
    """Some ask for none, others for few or the whole vocabulary; greedy, random, cut and at low temperature, where
    probabilities underflow."""
    prompts = [vl.prompt(TEXT), vl.prompt([5], noise(70, 70), [6, 7])]
    settings: list[dict[str, Any]] = [
        {},
        {"temperature": 0.0},
        {"temperature": 0.02, "top_k": 3},
        {"temperature": 2.0, "top_p": 0.3},
    ]
    works = [
        SampleWork(
            prompt, None, SamplingParams(max_tokens=5, stop=(), **setting), num_samples=2, topk_sample_logprobs=k
        )
        for prompt in prompts
        for setting in settings
        for k in (0, 1, 20, 400)
    ]
    outputs = await asyncio.gather(*(vl.sampler.sample(work) for work in works))
    for work, output in zip(works, outputs, strict=True):
        for sequence in output.sequences:
            if work.topk_sample_logprobs:
                same_sampled_topk(vl, work.prompt, sequence, work.params.temperature, work.topk_sample_logprobs)
            else:
                assert sequence.topk_logprobs is None
                expected = vl.hf.logprobs(work.prompt, sequence.tokens, work.params.temperature or 1.0)
                vl.same(sequence.logprobs, expected, 1 / (work.params.temperature or 1.0))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_sampled_topk_of_a_request_alone_agrees_with_hf(text: Any, temperature: float) -> None:
    prompt = text.prompt(TEXT)
    params = SamplingParams(max_tokens=6, temperature=temperature, stop=())
    (sequence,) = (await ask(text, prompt, params=params, topk_sample_logprobs=3)).sequences
    same_sampled_topk(text, prompt, sequence, temperature, 3)


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
    monkeypatch.setattr("tinker_local.backend.sampling.vllm_prompt_scores.CHUNK_NUMBERS", 50_000)
    ids = np.random.default_rng(0).integers(0, 300, 2500).tolist()
    prompt = vl.prompt(ids[:2000], noise(150, 100), ids[2000:])
    wanted = targets((prompt.length - 1, 2), share=0.01)
    output = await ask(
        vl, prompt, prompt_logprobs=True, topk_prompt_logprobs=4, target_prompt_logprobs=TensorData.from_numpy(wanted)
    )
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
    output = await ask(text, text.prompt([5]), prompt_logprobs=True, topk_prompt_logprobs=2)
    assert output.topk_prompt_logprobs is not None
    assert output.topk_prompt_logprobs.token_ids.tolist() == [[0, 0]]
    assert output.topk_prompt_logprobs.logprobs.tolist() == [[EMPTY[1]] * 2]


# The last n -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("last_n", [1, 7, 16, 39])
async def test_last_n_leaves_out_what_is_before(text: Any, last_n: int) -> None:
    prompt = text.prompt(TEXT)
    expected, first = log_p(text, prompt), 39 - last_n
    ids = targets((39, 2))
    output = await ask(
        text,
        prompt,
        prompt_logprobs=True,
        topk_prompt_logprobs=3,
        prompt_logprobs_last_n=last_n,
        target_prompt_logprobs=TensorData.from_numpy(ids),
        prompt_alt_tokens_k=2,
    )
    assert output.prompt_logprobs is not None
    assert np.isnan(output.prompt_logprobs[: first + 1]).all()
    text.same(output.prompt_logprobs[first + 1 :], text.hf.prompt_logprobs(prompt)[first:])
    same_topk(text, output.topk_prompt_logprobs, expected, first)
    # What else is asked is not restricted.
    assert output.target_prompt_logprobs is not None
    scored = expected.gather(1, torch.from_numpy(ids).clamp(min=0)).numpy()
    text.same(output.target_prompt_logprobs.to_numpy(), np.where(ids == -1, 0.0, scored))
    same_drawn(text, output, expected)


@pytest.mark.parametrize("with_adapter", [False, True])
async def test_last_n_reads_the_prefix_from_the_cache(
    vl: Any, tmp_path: Path, noise: Callable[..., Any], with_adapter: bool
) -> None:
    """All whole blocks before the first row that is asked for; also what comes before the first id that is named."""
    thread, engine = vl.sampler._thread, vl.sampler._engine
    block = thread.call(engine, lambda vllm: vllm.vllm_config.cache_config.block_size).result(10)
    adapter = vl.adapter(tmp_path / "v1", EVERYTHING, 4) if with_adapter else None
    version = adapter and adapter.version
    ids = np.random.default_rng(5 + with_adapter).integers(0, 300, 5 * block).tolist()
    prompt = vl.prompt(ids[:30], noise(70, 70, 40), ids[30:])
    await ask(vl, prompt, version)
    expected = log_p(vl, prompt, adapter)
    rows = len(expected)
    chosen = expected.gather(1, torch.from_numpy(prompt.token_ids[1:].astype(np.int64))[:, None])[:, 0].numpy()
    for first_row in (rows - 1, 4 * block, 2 * block + 1, 2 * block, 2 * block - 1, block // 2, 0):
        output = await ask(
            vl, prompt, version, prompt_logprobs=True, prompt_logprobs_last_n=rows - first_row, topk_prompt_logprobs=2
        )
        assert output.prompt_cache_hit_tokens == first_row // block * block
        assert output.prompt_logprobs is not None
        vl.same(output.prompt_logprobs[first_row + 1 :], chosen[first_row:])
        same_topk(vl, output.topk_prompt_logprobs, expected, first_row)
    named = np.full((rows, 1), -1)
    named[3 * block + 5 :] = 7
    output = await ask(vl, prompt, version, target_prompt_logprobs=TensorData.from_numpy(named))
    assert output.prompt_cache_hit_tokens == 3 * block
    assert output.target_prompt_logprobs is not None
    scored = output.target_prompt_logprobs.to_numpy()[:, 0]
    assert not scored[: 3 * block + 5].any()
    vl.same(scored[3 * block + 5 :], expected[3 * block + 5 :, 7].numpy())


# Drawn alternatives ---------------------------------------------------------------------------------------------------


def same_drawn(served: Any, output: SampleOutput, expected: torch.Tensor) -> np.ndarray:
    """The drawn tokens [P - 1, k], whose logprobs are the model's at temperature 1."""
    assert output.prompt_alt_tokens is not None
    drawn, logprobs = output.prompt_alt_tokens.tokens, output.prompt_alt_tokens.logprobs
    assert (drawn.dtype, logprobs.dtype) == ("int64", "float32")
    assert drawn.shape == logprobs.shape
    tokens: np.ndarray = drawn.to_numpy()
    served.same(logprobs.to_numpy(), expected.gather(1, torch.from_numpy(tokens.copy())).numpy())
    return tokens


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 2.0])
async def test_alternatives_are_drawn_at_the_temperature_with_the_models_logprobs(
    case: Any, temperature: float
) -> None:
    """Neither top-k nor top-p cuts them; 4000 draws at every position have the distribution's frequencies."""
    served, prompt, adapter = case
    expected = log_p(served, prompt, adapter)
    params = SamplingParams(max_tokens=1, temperature=temperature, top_k=2, top_p=0.5, seed=4)
    output = await ask(
        served, prompt, None if adapter is None else adapter.version, params=params, prompt_alt_tokens_k=4000
    )
    drawn = same_drawn(served, output, expected)
    assert drawn.shape == (prompt.length - 1, 4000)
    if temperature == 0:
        assert (drawn == expected.argmax(-1).numpy()[:, None]).all()
        return
    p = (expected / temperature).softmax(-1).double().numpy()
    counts = np.stack([np.bincount(row, minlength=p.shape[1]) for row in drawn])
    often = 4000 * p > 20
    deviation = (counts - 4000 * p) / np.sqrt(4000 * p * (1 - p) + 1e-9)
    assert np.abs(deviation[often]).max() < 5.5
    # What is rare is drawn as often as it should be, too.
    rare = (4000 * p * ~often).sum()
    assert abs(counts[~often].sum() - rare) < 5.5 * rare**0.5 + 1
    # Positions, and draws at one position, are independent: pairs agree as often as chance has it.
    agree = (drawn[:, 0::2] == drawn[:, 1::2]).mean(axis=1)
    chance = (p**2).sum(axis=1)
    assert (np.abs(agree - chance) < 5.5 * np.sqrt(chance * (1 - chance) / 2000) + 1e-3).all()
    agree = (drawn[:-1] == drawn[1:]).mean(axis=1)
    chance = (p[:-1] * p[1:]).sum(axis=1)
    assert (np.abs(agree - chance) < 5.5 * np.sqrt(chance * (1 - chance) / 4000) + 1e-3).all()


async def test_alternatives_repeat_with_their_seed_whatever_runs_beside_them(text: Any) -> None:
    prompt = text.prompt(TEXT)

    async def draw(seed: int | None, others: int = 0) -> list[list[int]]:
        params = SamplingParams(max_tokens=2, seed=seed, stop=())
        output, *_ = await asyncio.gather(
            ask(text, prompt, params=params, prompt_alt_tokens_k=20, num_samples=3),
            *(ask(text, prompt, prompt_logprobs=True) for _ in range(others)),
        )
        assert output.prompt_alt_tokens is not None
        tokens: list[list[int]] = output.prompt_alt_tokens.tokens.to_numpy().tolist()
        return tokens

    first = await draw(7)
    assert await draw(7, 5) == first
    assert await draw(8) != first
    assert await draw(None) != await draw(None)


async def test_alternatives_of_a_long_prompt_do_not_depend_on_its_parts(
    vl: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = vl.prompt(np.random.default_rng(1).integers(0, 300, 2500).tolist())
    params = SamplingParams(max_tokens=1, seed=2)
    expected = log_p(vl, prompt)
    whole = same_drawn(vl, await ask(vl, prompt, params=params, prompt_alt_tokens_k=3), expected)
    monkeypatch.setattr("tinker_local.backend.sampling.vllm_prompt_scores.CHUNK_NUMBERS", 80_000)
    parts = same_drawn(vl, await ask(vl, prompt, params=params, prompt_alt_tokens_k=3), expected)
    # A product of matrices rounds otherwise with other rows beside it; a draw at an edge may fall on its other side.
    assert (whole != parts).mean() < 1e-3


# Preemption -----------------------------------------------------------------------------------------------------------


def kv_bytes(served: Any) -> int:
    """Of the KV cache, for one position."""
    config = served.hf.model.config
    return int(2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4)


async def test_a_prompt_that_is_preempted_in_its_middle_is_answered_rightly(text: Any) -> None:
    """The KV cache has no room for all; whoever came last starts again from its beginning."""
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
        scheduler = engine.engine_core.engine_core.scheduler
        preempt = scheduler._preempt_request

        def noted(request: Any, *args: Any, **kwargs: Any) -> Any:
            if 0 < request.num_computed_tokens < request.num_prompt_tokens:
                halfway.append(request.num_computed_tokens)
            return preempt(request, *args, **kwargs)

        scheduler._preempt_request = noted

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
    assert halfway
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


# Refused --------------------------------------------------------------------------------------------------------------

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
