"""LoRA: what vLLM samples is the base plus the adapter of the version asked for, and of no other."""

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tinker_local.backend.adapters.adapter import AdapterVersion
from tinker_local.backend.sampling.sampler import SampleWork
from tinker_local.types import InvalidRequestError, NotFoundError, SamplingParams

ATTENTION = r"self_attn\.(q|k|v|o)_proj$"
MLP = r"mlp\.(gate|up|down)_proj$"
LM_HEAD = r"^lm_head$"
ALL = f"{ATTENTION}|{MLP}|{LM_HEAD}"
TEXT = list(range(20, 60))


def expected_score(served: Any, prompt: Any, adapter: Any) -> Any:
    with served.hf.merged(adapter):
        return served.hf.prompt_logprobs(prompt)


@pytest.mark.rotated(3)
@pytest.mark.parametrize("rank", [4, 8])
@pytest.mark.parametrize("modules", [ATTENTION, MLP, LM_HEAD, ALL, r"q_proj$|down_proj$"])
async def test_an_adapter_agrees_with_hf(served: Any, tmp_path: Path, modules: str, rank: int) -> None:
    adapter = served.adapter(tmp_path / "v1", modules, rank)
    await served.sampler.load_version(adapter.version)
    prompt = served.prompt(TEXT)
    expected = expected_score(served, prompt, adapter)
    assert np.abs(expected - served.hf.prompt_logprobs(prompt)).max() > 0.05
    served.same(await served.score(prompt, adapter.version), expected)


@pytest.mark.mutation(
    "lora-ids-used-again", "VLLMAdapters.request", "next(self._ids), str(version.path)", "1, str(version.path)"
)
async def test_base_and_adapters_in_one_step_do_not_touch_each_other(
    vl: Any, tmp_path: Path, noise: Callable[..., Any]
) -> None:
    """vLLM 0.32 on CPU gives the base's requests the adapter of the last of its (4) slots."""
    adapters = [None, *(vl.adapter(tmp_path / f"v{i}", ALL, (4, 8)[i % 2], seed=i) for i in range(4)), None]
    prompts = [vl.prompt(TEXT), vl.prompt([5], noise(70, 70), TEXT[:10])]
    for adapter in adapters:
        if adapter is not None:
            await vl.sampler.load_version(adapter.version)
    pairs = [(adapter, prompt) for prompt in prompts for adapter in adapters]

    def sample(adapter: Any, prompt: Any, **params: Any) -> Any:
        version = None if adapter is None else adapter.version
        return vl.sampler.sample(
            SampleWork(prompt, version, SamplingParams(max_tokens=6, stop=(), **params), prompt_logprobs=True)
        )

    outputs = await asyncio.gather(*(sample(adapter, prompt, temperature=0.7) for adapter, prompt in pairs))
    for (adapter, prompt), output in zip(pairs, outputs, strict=True):
        vl.same(output.prompt_logprobs[1:], expected_score(vl, prompt, adapter))
        (sequence,) = output.sequences
        with vl.hf.merged(adapter):
            vl.same(sequence.logprobs, vl.hf.logprobs(prompt, sequence.tokens, 0.7))


@pytest.mark.parametrize("model", ["text", "untied"])
async def test_prompt_logprobs_of_several_requests_have_their_own_lm_head(
    model: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """vLLM scores prompts with the mapping of the sampled rows: an exception on CPU, the base's head on CUDA."""
    served = request.getfixturevalue(model)
    adapters = [served.adapter(tmp_path / f"v{i}", LM_HEAD, 8, seed=i) for i in range(2)]
    prompts = [served.prompt(TEXT[i : 30 + i]) for i in range(3)]
    cases = [(adapter, prompt) for prompt in prompts for adapter in (*adapters, None)]
    scores = await asyncio.gather(
        *(served.score(prompt, None if adapter is None else adapter.version) for adapter, prompt in cases)
    )
    for (adapter, prompt), score in zip(cases, scores, strict=True):
        served.same(score, expected_score(served, prompt, adapter))


async def test_a_version_stays_what_it_was_when_newer_ones_are_loaded(text: Any, tmp_path: Path) -> None:
    """More versions than vLLM has slots (4) and keeps in memory (32); shared prefixes must not mix them either."""
    prompt = text.prompt([i % 300 for i in range(300)])
    adapters = [text.adapter(tmp_path / f"v{i}", ALL, 4, seed=i) for i in range(36)]

    def greedy(version: AdapterVersion) -> Any:
        params = SamplingParams(max_tokens=4, temperature=0.0, stop=())
        return text.sampler.sample(SampleWork(prompt, version, params))

    first = await greedy(adapters[0].version)
    for adapter in adapters[1:]:
        await greedy(adapter.version)
    again, *_ = await asyncio.gather(*(greedy(adapter.version) for adapter in adapters[:8]))
    assert np.array_equal(again.sequences[0].tokens, first.sequences[0].tokens)
    text.same(again.sequences[0].logprobs, first.sequences[0].logprobs)
    text.same(await text.score(prompt, adapters[0].version), expected_score(text, prompt, adapters[0]))
    for adapter in adapters:
        await text.sampler.remove_version(adapter.version)


async def still_healthy(served: Any) -> None:
    prompt = served.prompt(TEXT)
    served.same(await served.score(prompt), served.hf.prompt_logprobs(prompt))


async def test_a_missing_folder_fails_its_request_alone(text: Any, tmp_path: Path) -> None:
    version = AdapterVersion("never-written", tmp_path / "nowhere")
    work = SampleWork(text.prompt(TEXT), version, SamplingParams(max_tokens=1))
    with pytest.raises(NotFoundError, match="never-written"):
        await text.sampler.load_version(version)
    results = await asyncio.gather(text.sampler.sample(work), still_healthy(text), return_exceptions=True)
    assert isinstance(results[0], NotFoundError)
    assert results[1] is None
    assert text.sampler._engine.restarts == 0


def truncate(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:200])


def rename_module(folder: Path) -> None:
    edit(folder, lambda tensors: {name.replace("layers.0.", "layers.9."): tensors[name] for name in tensors})


def add_vision_tensors(folder: Path) -> None:
    prefix = "base_model.model.model.visual.blocks.0.attn.proj."
    more = {f"{prefix}lora_A.weight": torch.ones(4, 64), f"{prefix}lora_B.weight": torch.ones(64, 4)}
    edit(folder, lambda tensors: tensors | more)


def drop_a_matrix(folder: Path) -> None:
    edit(folder, lambda tensors: {name: tensors[name] for name in tensors if "0.self_attn.o_proj.lora_A" not in name})


def rename_matrix(folder: Path) -> None:
    edit(folder, lambda tensors: {name.replace("o_proj.lora_A", "o_proj.lora_C"): tensors[name] for name in tensors})


def wrong_shape(folder: Path) -> None:
    edit(folder, lambda tensors: {name: t[..., :7] if "lora_A" in name else t for name, t in tensors.items()})


def not_a_number(folder: Path) -> None:
    edit(folder, lambda tensors: {name: tensor * float("nan") for name, tensor in tensors.items()})


def edit(folder: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    file = folder / "adapter_model.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in change(load_file(file)).items()}, file)


def configure(**values: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return change


@pytest.mark.mutation(
    "unmatched-keys-ignored",
    "check_adapter_taken",
    "    if ignored:\n",
    "    weights = {name: weights[name] for name in weights if name not in ignored}\n    if False:\n",
)
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, "cannot be read"),
        (rename_module, "vLLM does not use the tensors of .*layers.9"),
        (add_vision_tensors, "it changes the vision tower, .*; start the server with --train-vision"),
        (drop_a_matrix, "o_proj.lora_B.weight is not a LoRA matrix, or the other one of its pair is missing"),
        (rename_matrix, "o_proj.lora_[BC].weight is not a LoRA matrix"),
        (wrong_shape, "o_proj is 7 to 64 wide in the adapter, and 128 to 64 in the model"),
        (not_a_number, "NaN"),
        (configure(r=8), "adapter_config.json says rank 8"),
        (configure(r=64), "rank 64, but the sampler serves ranks up to 8"),
        (configure(r="four"), "r is 'four'"),
        (configure(use_dora=True), "DoRA"),
        (configure(alpha_pattern={"q_proj": 3}), "alpha_pattern"),
        (lambda folder: (folder / "adapter_config.json").write_text("{"), "cannot be read"),
    ],
)
async def test_an_adapter_that_is_not_served_whole_is_refused(
    vl: Any, tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    adapter = vl.adapter(tmp_path / "v1", ATTENTION, 4)
    damage(adapter.version.path)
    with pytest.raises(InvalidRequestError, match=message):
        await vl.sampler.load_version(adapter.version)
    work = SampleWork(vl.prompt(TEXT), adapter.version, SamplingParams(max_tokens=1))
    with pytest.raises(InvalidRequestError, match=message):
        await vl.sampler.sample(work)
    await still_healthy(vl)
    assert vl.sampler._engine.restarts == 0


async def test_a_removed_version_is_forgotten_and_its_folder_free(text: Any, tmp_path: Path) -> None:
    adapter = text.adapter(tmp_path / "v1", ATTENTION, 4)
    prompt = text.prompt(TEXT)
    work = SampleWork(prompt, adapter.version, SamplingParams(max_tokens=60, temperature=0.0, stop=()))
    running = asyncio.create_task(text.sampler.sample(work))
    await asyncio.sleep(0.02)
    await text.sampler.remove_version(adapter.version)
    assert running.done()
    shutil.rmtree(adapter.version.path)
    assert running.result().sequences[0].tokens.size == 60
    with pytest.raises(NotFoundError):
        await text.sampler.sample(work)


async def test_a_version_whose_folder_is_gone_is_served_while_it_is_in_memory(text: Any, tmp_path: Path) -> None:
    adapter = text.adapter(tmp_path / "v1", ATTENTION, 4)
    prompt = text.prompt(TEXT)
    before = await text.score(prompt, adapter.version)
    shutil.rmtree(adapter.version.path)
    text.same(await text.score(prompt, adapter.version), before)
