"""Text models without a family: adapters on every Linear module of a layer, and the decoder that takes them."""

import asyncio
import importlib
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
from click.testing import CliRunner
from safetensors.torch import save_file
from tinker_local.backend import BackendOptions, InProcessBackend, ModelSource
from tinker_local.backend.adapters.adapter import AdapterVersion
from tinker_local.backend.adapters.adapter_files import write_adapter
from tinker_local.backend.cli.models_command import models
from tinker_local.backend.families import FAMILIES, OTHER, family_of
from tinker_local.backend.families.line_up import NOT_SERVED, OTHERS
from tinker_local.backend.models import load_engines
from tinker_local.backend.models.agreement import with_random_b
from tinker_local.backend.rendering.rendered_input import RenderedInput
from tinker_local.backend.sampling.sampler import SampleWork
from tinker_local.backend.tiny_models.marks import QWEN, VOCAB_SIZE
from tinker_local.backend.tiny_models.tokenizer import write_tokenizer
from tinker_local.backend.training.model.load_model import config_of
from tinker_local.backend.training.run.worker import HFTrainer
from tinker_local.backend.training.trainer import TrainDatum, TrainWork
from tinker_local.backend.training.trainer_config import TrainerConfig
from tinker_local.backend.vllm_engine import adapter_targets
from tinker_local.backend.vllm_engine.build_engine import EngineOptions
from tinker_local.backend.vllm_engine.engine_thread import EngineThread
from tinker_local.backend.vllm_engine.refusals import check_runs
from tinker_local.backend.vllm_engine.vllm_sampler import VLLMSampler
from tinker_local.types import AdamParams, LoraConfig, SamplingParams, UnsupportedError

from tests.families.starts import check_refused, started
from tests.float64 import Exact, InFloat64
from tests.training.autograd_reference import assert_computes_like

pytestmark = pytest.mark.more

OWN: dict[str, dict[str, Any]] = {
    "phi3": {},  # joined projections, in vLLM's own class
    "olmo2": {},  # vLLM has no class that takes adapters, and runs transformers' instead
    "granite": {"embedding_multiplier": 3.0, "attention_multiplier": 0.1, "logits_scaling": 2.0},
    "apertus": {},
    "arcee": {},
    "bitnet": {},
    "cohere": {"logit_scale": 0.5, "tie_word_embeddings": True},
    "cohere2": {
        **{"tie_word_embeddings": True, "head_dim": 32, "sliding_window": 16},
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "cwm": {"head_dim": 32, "bos_token_id": 1},
    "ernie4_5": {"head_dim": 32},
    "exaone4": {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
    "gemma": {"head_dim": 32},
    "glm": {"head_dim": 32},
    "glm4": {"head_dim": 32},
    "granite_swa": {"sliding_window": 16},
    "helium": {"head_dim": 32},
    "hyperclovax": {"logits_scaling": 0.3},
    "hunyuan_v1_dense": {"head_dim": 32},
    "jais2": {"head_dim": 32},
    "lfm2": {
        **{"conv_dim": 128, "block_dim": 128, "block_auto_adjust_ff_dim": False, "tie_word_embeddings": True},
        "layer_types": ["conv", "full_attention"],
    },
    "ministral": {"head_dim": 32, "layer_types": ["full_attention"] * 2},
    "ministral3": {"head_dim": 32},
    "nanochat": {},
    "nemotron": {"head_dim": 32},  # its layers pass no arguments on to attention
    "olmo": {},
    "olmo3": {"sliding_window": 16},
    "persimmon": {"num_key_value_heads": 4},
    "phi": {},
    "seed_oss": {"head_dim": 32},
    "smollm3": {"no_rope_layers": [1, 0]},
    "starcoder2": {},
    "vaultgemma": {"head_dim": 32},
}
"""Fields of each config, beyond what all have."""


REACHED = {
    "lfm2": "in_proj, out_proj, w1, w3, w2, q_proj, k_proj, v_proj, lm_head",
    "apertus": "q_proj, k_proj, v_proj, o_proj, up_proj, down_proj, lm_head",
    "glm4": "q_proj, k_proj, v_proj, o_proj, gate_up_proj, down_proj, lm_head",
    "phi3": "o_proj, qkv_proj, gate_up_proj, down_proj, lm_head",
    "olmo2": "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj, lm_head",
}


def tiny(model_type: str, out: Path) -> Path:
    """A model of random weights."""
    config = transformers.AutoConfig.for_model(
        model_type,
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
        initializer_range=0.1,
        pad_token_id=QWEN.token_id(QWEN.pad),
        eos_token_id=QWEN.token_id(QWEN.stops[0]),
        dtype="float32",
        **{
            "tie_word_embeddings": False,
            "bos_token_id": None,
            "num_key_value_heads": 2,
            **OWN.get(model_type, {"head_dim": 32}),
        },
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(out)
    write_tokenizer(out, QWEN, 256)
    return out


def data(seed: int) -> list[TrainDatum]:
    """Two sequences, which share a row."""
    random = np.random.default_rng(seed)
    tokens = [random.integers(20, 380, length).astype(np.int32) for length in (18, 34)]
    return [
        TrainDatum(RenderedInput(ids[:-1]), ids[1:].astype(np.int64), {"weights": np.ones(len(ids) - 1, np.float32)})
        for ids in tokens
    ]


@pytest.mark.parametrize("model_type", ["phi3", "granite"])
def test_its_checkpoint_gives_the_trainers_logprobs_in_peft(model_type: str, tmp_path: Path) -> None:
    folder = tiny(model_type, tmp_path / "model")
    trainer = HFTrainer(TrainerConfig(str(folder), name="tiny", decoder="autograd"))
    for name, config in {
        "all": LoraConfig(rank=4, seed=1),
        "mlp": LoraConfig(rank=2, seed=2, train_attn=False),
    }.items():
        trainer.create_adapter(name, config)
    for _ in range(3):
        trainer.forward_backward([TrainWork(name, data(1), "cross_entropy") for name in ("all", "mlp")])
        for name in ("all", "mlp"):
            trainer.optim_step(name, AdamParams(learning_rate=0.01))
    attention = {name for name in trainer.capture("mlp", optimizer=False).tensors if "attn" in name}
    assert attention == set()
    (tmp_path / "adapter").mkdir()
    write_adapter(tmp_path / "adapter", trainer.capture("all", optimizer=False))
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapter")).eval()
    inputs, found = [datum.input for datum in data(2)], []
    for each in inputs:
        with torch.no_grad():
            ids = torch.from_numpy(each.token_ids.astype(np.int64))
            logprobs = theirs(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
        found.append(logprobs.gather(1, ids[1:, None])[:, 0].numpy())
    Exact(trainer).assert_near("all", inputs, trainer.logprobs("all", *inputs), np.concatenate(found))


@pytest.mark.parametrize("model_type", ["glm", "glm4", "cwm"])
def test_layers_of_known_parts_are_written_out_and_compute_what_transformers_does(
    model_type: str, tmp_path: Path
) -> None:
    """GLM has gate and up in one module, GLM 4 norms after attention and MLP. Gradients in float64, to 1e-9."""
    folder = tiny(model_type, tmp_path / "model")
    with InFloat64():
        ours = HFTrainer(TrainerConfig(str(folder), name="tiny", dtype="float64", device="cpu"))
        theirs = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float64, attn_implementation="eager"
        )
    assert ours.trains.startswith("trained by the written-out decoder; ")
    ours.create_adapter("fresh", LoraConfig(rank=3, seed=1))
    ours.load_adapter("a", with_random_b(ours.capture("fresh", optimizer=False)))
    ours.remove_adapter("fresh")
    assert_computes_like(ours, theirs, [TrainWork("a", data(1), "cross_entropy")])


@pytest.mark.parametrize("model_type", OWN)
def test_a_model_without_a_family_starts_and_says_what_adapters_reach(model_type: str, tmp_path: Path) -> None:
    said = asyncio.run(started(tiny(model_type, tmp_path / "model"), tmp_path / "data"))
    (trains,) = (line for line in said if line.startswith("tiny/other: trained by the "))
    assert trains.rpartition("; serves")[0].endswith(REACHED.get(model_type, "lm_head"))
    agreed = re.search(r"agree to (\S+) nats", said[-1])
    assert agreed is not None
    assert float(agreed[1]) < 1e-4
    assert said[-1].endswith("rotary positions compared at all 256")


def test_each_module_of_short_convolutions_reaches_the_sampler(tmp_path: Path) -> None:
    """At the first token that is sampled as in the prompt, and at those that go on from what a convolution kept."""
    folder = tiny("lfm2", tmp_path / "model")
    trainer = HFTrainer(TrainerConfig(str(folder), name="tiny", dtype="float32"))
    trainer.create_adapter("fresh", LoraConfig(rank=4, seed=1))
    fresh = trainer.capture("fresh", optimizer=False)
    modules = ("conv.in_proj", "conv.out_proj", "self_attn.out_proj", "feed_forward.w1", "feed_forward.w2")
    versions: dict[str, AdapterVersion | None] = {"base": None}
    for module in modules:
        random = np.random.default_rng(1)
        tensors = {
            name: 0.3 * random.standard_normal(matrix.shape).astype(np.float32)
            if f"{module}.lora_B" in name
            else np.asarray(matrix, np.float32)
            for name, matrix in fresh.tensors.items()
        }
        trainer.load_adapter(module, replace(fresh, tensors=tensors))
        (tmp_path / module).mkdir()
        write_adapter(tmp_path / module, trainer.capture(module, optimizer=False))
        versions[module] = AdapterVersion(module, tmp_path / module)
    prompts = [datum.input for datum in data(3)]

    async def sample() -> Sequence[Any]:
        sampler = VLLMSampler(EngineOptions(str(folder), max_rank=8, kv_cache_bytes=2**26), EngineThread())
        params = SamplingParams(max_tokens=6, seed=0, stop=[])
        works = [SampleWork(each, version, params) for version in versions.values() for each in prompts]
        try:
            return await asyncio.gather(*map(sampler.sample, works))
        finally:
            await sampler.close()

    asked = [(name, prompt) for name in versions for prompt in prompts]
    for (name, prompt), output in zip(asked, asyncio.run(sample()), strict=True):
        (sequence,) = output.sequences
        whole = RenderedInput(np.concatenate([prompt.token_ids, sequence.tokens.astype(np.int32)]))
        adapter, sampled = None if name == "base" else name, slice(prompt.length - 1, None)
        ours = trainer.logprobs(adapter, whole)[sampled]
        assert np.abs(ours - sequence.logprobs).max() < 1e-4, name
        if adapter is not None:
            assert np.abs(ours - trainer.logprobs(None, whole)[sampled]).max() > 0.1, name


def test_an_adapter_that_is_compared_shows_in_16_bits_if_one_kind_of_module_is_left_out(tmp_path: Path) -> None:
    """By more than 0.1 nats: three times what rounding moves logprobs by."""
    trainer = HFTrainer(TrainerConfig(str(tiny("phi3", tmp_path / "model")), name="tiny", decoder="autograd"))
    trainer.create_adapter("a", LoraConfig(rank=1, seed=0))
    state = with_random_b(trainer.capture("a", optimizer=False))
    prompts = [datum.input for datum in data(1)]
    trainer.load_adapter("a", state)
    whole = trainer.logprobs("a", *prompts)
    for kind in REACHED["phi3"].split(", "):
        left_out = {
            name: np.zeros_like(matrix) if f"{kind}.lora_B" in name else matrix
            for name, matrix in state.tensors.items()
        }
        assert sum(not matrix.any() for matrix in left_out.values()) in (1, 2)
        trainer.load_adapter("a", replace(state, tensors=left_out))
        assert np.abs(trainer.logprobs("a", *prompts) - whole).mean() > 0.1, kind


def test_the_page_of_models_lists_them() -> None:
    assert sorted(OWN) == list(OTHERS)
    assert not {*OTHERS} & {*FAMILIES, *NOT_SERVED}


def test_a_model_whose_adapters_vllm_does_not_take_is_refused_at_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its class in vLLM calls a joined projection two."""
    module = importlib.import_module("vllm.model_executor.models.glm4")
    parts = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
    monkeypatch.setattr(module.Glm4ForCausalLM, "packed_modules_mapping", parts)
    monkeypatch.setattr(adapter_targets, "_last_names", lambda _: set())
    with pytest.raises(ValueError, match=r"could not be compared with an adapter: .*gate_up_proj is 128 to 192 wide"):
        asyncio.run(started(tiny("glm4", tmp_path / "model"), tmp_path / "data"))


def test_what_is_known_not_to_work_is_refused_with_its_reason() -> None:
    assert family_of("olmo2", "m") is OTHER
    with pytest.raises(UnsupportedError, match=r"m: model_type 'nemotron_h' is not supported: .*Mamba-2 layers"):
        family_of("nemotron_h", "m")


@pytest.mark.parametrize(
    ("model_type", "why"),
    [
        ("gpt2", "needs its layers at model.layers"),
        ("opt", "needs its layers at model.layers"),
        ("t5", "transformers makes no language model of model_type 't5'"),
    ],
)
def test_a_model_that_is_built_otherwise_is_refused_before_engines_start(
    model_type: str, why: str, tmp_path: Path
) -> None:
    transformers.AutoConfig.for_model(model_type).save_pretrained(tmp_path / "model")
    save_file({"of_another_class": torch.zeros(1)}, tmp_path / "model" / "model.safetensors")
    with pytest.raises(UnsupportedError, match=why) as no:
        asyncio.run(started(tmp_path / "model", tmp_path / "data"))
    assert "\n" not in str(no.value)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "biogpt": ({}, "needs its layers at model.layers"),
    "falcon": ({}, "needs its layers at model.layers"),
    "gpt_neox": ({}, "needs its layers at model.layers"),
    "hrm_text": ({}, "needs its layers at model.layers"),
    "jetmoe": ({"num_local_experts": 4}, "has 4 routed experts"),
    "modernbert-decoder": ({"bos_token_id": 1}, "its lm_head is a ModernBertDecoderPredictionHead"),
    "stablelm": ({}, "vLLM runs it as StablelmForCausalLM, which takes no adapters"),
    "doge": ({}, "it makes its own attention mask"),
    "cohere2": ({"head_dim": 32}, "has the embedding for its LM head, and this model has another one"),
    "deepseek_v32": ({}, "the trainer cannot run its layers (TypeError: "),
    "diffllama": ({}, "vLLM has no class DiffLlamaForCausalLM, and cannot run transformers' in its place"),
    "falcon_h1": ({}, "model.layers.0.mamba.conv1d is a convolution along the sequence"),
    "granitemoe": ({"num_local_experts": 4}, "has 4 routed experts"),
    "persimmon": (
        {},
        "config.json says num_key_value_heads 2, which vLLM reads and transformers' PersimmonConfig does",
    ),
    "arcee": (
        {"head_dim": 16},
        "its attention heads are 16 wide, and vLLM on a CPU computes those of 32,",
    ),
}
"""Fields of configs, and why models of them are refused."""


@pytest.mark.rotated(3)
@pytest.mark.parametrize("model_type", REFUSED)
def test_check_and_serve_refuse_a_model_in_the_same_sentence_before_an_engine_starts(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, why = REFUSED[model_type]
    monkeypatch.setitem(OWN, model_type, own)
    folder = tiny(model_type, tmp_path / "model")
    check_refused(folder, tmp_path / "data", why, monkeypatch)


def test_the_second_of_two_models_is_refused_before_the_first_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = [ModelSource(name, str(tiny(name, tmp_path / name))) for name in ("phi3", "stablelm")]
    monkeypatch.setattr(load_engines, "load_real", lambda *_, **__: pytest.fail("an engine starts"))

    async def start() -> None:
        async with InProcessBackend(sources, BackendOptions(data_dir=tmp_path / "data")):
            pass

    with pytest.raises(UnsupportedError, match="stablelm: vLLM runs it as StablelmForCausalLM, which takes"):
        asyncio.run(start())


def test_a_class_of_vllm_that_takes_no_adapters_is_refused() -> None:
    """StableLM's, with whatever trainer."""
    config = transformers.AutoConfig.for_model("stablelm", architectures=["StableLmForCausalLM"])
    config.head_dim = 64
    with pytest.raises(UnsupportedError, match="m: vLLM runs it as StablelmForCausalLM, which takes no adapters"):
        check_runs("m", config, OTHER)
    config.architectures = ["UnknownForCausalLM"]
    with pytest.raises(UnsupportedError, match="m: vLLM has no class UnknownForCausalLM"):
        check_runs("m", config, OTHER)


def test_a_model_that_brings_code_is_refused_without_advice_that_does_not_exist_here(tmp_path: Path) -> None:
    told = {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(told))
    (tmp_path / "mine.py").write_text("raise RuntimeError('code that came with a model ran')")
    with pytest.raises(UnsupportedError, match="runs no code that comes with a model") as no:
        config_of(str(tmp_path))
    assert "trust" not in str(no.value)


@pytest.mark.parametrize("model_type", ["granitemoe", "minimax"])
def test_a_mixture_of_experts_without_a_family_is_refused_in_a_sentence(model_type: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
    transformers.AutoConfig.for_model(model_type, vocab_size=VOCAB_SIZE, **sizes).save_pretrained(tmp_path / "model")
    save_file({"of_another_class": torch.zeros(1)}, tmp_path / "model" / "model.safetensors")
    with pytest.raises(UnsupportedError) as no:
        asyncio.run(started(tmp_path / "model", tmp_path / "data"))
    assert re.search(
        f"model: model_type '{model_type}' is not supported: model.layers.0.* has [0-9]+ routed experts", str(no.value)
    )
    assert "are served with model_type " in str(no.value)
    assert "mixtral, " in str(no.value)
    assert "\n" not in str(no.value)
    done = CliRunner().invoke(models, [f"m={tmp_path / 'model'}", "--gpu", "80"])
    assert done.exit_code == 2
    assert "routed experts" in done.output
