"""Layers without experts between layers with them, and the tower of a mixture of experts: each target alone reaches the
sampler. What does not is refused before a run begins."""

import asyncio
import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tinker_local.backend import BackendOptions, InProcessBackend, ModelSource
from tinker_local.backend.adapters.adapter import AdapterState, AdapterVersion
from tinker_local.backend.models.adapter_check import TARGETS, adapter_on
from tinker_local.backend.models.agreement import compare, make_probes, sampler_logprobs, worst
from tinker_local.backend.models.load_engines import load_real
from tinker_local.backend.tiny_models import make_tiny_text_model, make_tiny_vl_model
from tinker_local.backend.vllm_engine import adapter_targets, patches
from tinker_local.types import TRAIN_VISION, CreateModelRequest, InvalidRequestError, LoraConfig

pytestmark = pytest.mark.more

LOGPROB = 1e-4
"""Nats."""

KINDS: dict[str, tuple[bool, dict[str, Any]]] = {
    "every-second": (False, {"decoder_sparse_step": 2}),
    "listed": (False, {"mlp_only_layers": [0]}),
    "vision": (True, {}),
    "vision-every-second": (True, {"decoder_sparse_step": 2}),
}
"""Whether it is Qwen3-VL-MoE, otherwise Qwen3-MoE, and what its config says of layers without experts."""


def as_it_is(state: AdapterState) -> AdapterState:
    return state


def options(data_dir: Path) -> BackendOptions:
    places: dict[str, Any] = {"trainer": "inline", "sampler": "inline"}
    return BackendOptions(
        data_dir=data_dir, dtype="float32", kv_cache_bytes=2**26, max_rank=8, train_vision=True, **places
    )


def mixed(out: Path, vision: bool, fields: dict[str, Any]) -> Path:
    """A tiny model of two layers, of which `fields` of its text config leave one without experts."""
    if not fields:
        return make_tiny_vl_model(out, family="qwen3_vl_moe")
    whole = out.with_name("whole")
    make_tiny_vl_model(whole, family="qwen3_vl_moe") if vision else make_tiny_text_model(whole, family="qwen3_moe")
    shutil.copytree(whole, out, ignore=shutil.ignore_patterns("*.safetensors"))
    content = json.loads((out / "config.json").read_text())
    text = content["text_config"] if vision else content
    text.update(fields, initializer_range=0.1)
    (out / "config.json").write_text(json.dumps(content))
    model_class = getattr(transformers, content["architectures"][0])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model_class(transformers.AutoConfig.from_pretrained(out)).save_pretrained(out)
    if vision:  # whose files have the experts' matrices transposed
        weights = {
            name: value.transpose(1, 2).contiguous() if value.dim() == 3 and ".experts." in name else value
            for name, value in load_file(out / "model.safetensors").items()
        }
        save_file(weights, out / "model.safetensors", {"format": "pt"})
    return out


@pytest.fixture(autouse=True)
def vllms_own_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is added to them for one model would be there for the next; vLLM itself adds to them, too."""
    from vllm.model_executor.models import qwen3_moe, qwen3_vl_moe

    for each in (qwen3_moe.Qwen3MoeForCausalLM, qwen3_vl_moe.Qwen3VLMoeForConditionalGeneration):
        monkeypatch.setattr(each, "packed_modules_mapping", {"qkv_proj": ["q_proj", "k_proj", "v_proj"]})


@pytest.mark.parametrize("kind", KINDS)
async def test_each_target_alone_reaches_the_sampler(kind: str, tmp_path: Path) -> None:
    vision, fields = KINDS[kind]
    source = ModelSource("tiny", str(mixed(tmp_path / "model", vision, fields)))
    engines = await asyncio.to_thread(load_real, source, options(tmp_path), lambda _: None)
    trainer, sampler = engines.trainer, engines.sampler
    assert engines.targets == ((*TARGETS, "train_vision") if vision else TARGETS)
    try:
        probes = make_probes(engines.renderer, trainer.vocab_size, trainer.max_context_length - 1, None, 10**6).base
        for target in engines.targets:
            state, draws, effect = adapter_on([target], trainer, probes, "float32")
            version = AdapterVersion(target, tmp_path / target, partial(as_it_is, state))
            (found,) = await sampler_logprobs(sampler, version, probes, 1)
            assert worst(compare(probes, draws[0], found)).difference < LOGPROB, target
            assert effect > 0.05, target
    finally:
        await sampler.close()
        trainer.close()


async def test_a_tower_that_cannot_be_sampled_is_refused_by_name_before_a_run_and_the_rest_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a vLLM whose class does not name the tower's modules."""
    others = [each for each in patches.PATCHES if each.to_config is not adapter_targets.name_stacked_modules]
    monkeypatch.setattr(patches, "PATCHES", others)
    said: list[str] = []
    source = ModelSource("tiny/tower", str(mixed(tmp_path / "model", True, {})))
    async with InProcessBackend([source], options(tmp_path / "data"), progress=said.append) as backend:
        (refusal,) = (line for line in said if "are refused" in line)
        assert refusal.startswith("tiny/tower: runs with train_vision are refused: ")
        assert "vLLM does not use the tensors of visual.blocks.0.attn.qkv" in refusal
        session = await backend.sessions.create()
        asked = CreateModelRequest(
            session_id=session,
            model_seq_id=0,
            base_model="tiny/tower",
            lora_config=LoraConfig(rank=2),
            user_metadata={TRAIN_VISION: "true"},
        )
        with pytest.raises(
            InvalidRequestError, match=r"^lora_config\.train_vision: tiny/tower would train it and could"
        ):
            await backend.runs.create(asked)
        created = await backend.runs.create(asked.model_copy(update={"user_metadata": None}))
        assert (await created)["model_id"]
