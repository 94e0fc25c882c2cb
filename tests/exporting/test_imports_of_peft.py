"""What PEFT loads without a difference becomes the same adapter here: earlier names, patterns of ranks and scales, some
modules or layers, the head beside its matrix. What an adapter lacks is 0, and stays 0 when it is trained on."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from tinker_local.backend.adapters.peft_adapters import read_peft_adapter
from tinker_local.backend.adapters.whole_matrices import check_whole_matrices
from tinker_local.backend.families import family_of
from tinker_local.backend.training.run.worker import HFTrainer
from tinker_local.backend.training.trainer import TrainDatum, TrainWork
from tinker_local.types import AdamParams, InvalidRequestError

from tests.exporting.conftest import Tuned, asked, hf_logprobs, load, rendered
from tests.exporting.test_imports import CONFIG, WEIGHTS, assert_computes, by_from_pretrained, imported

Make = Callable[..., Tuned]

LANGUAGE = r".*language_model.*\.(q_proj|v_proj)"
BOTH = r".*language_model.*\.q_proj|.*visual.*\.(qkv|linear_fc1|up_proj)"


def write(folder: Path, model: Path, rename: Callable[[str], str] = str, **config: Any) -> np.ndarray:
    """Have PEFT's save_pretrained write an adapter with random factors, and rename its tensors; the logprobs of PEFT's
    model."""
    torch.manual_seed(3)
    wrapped = peft.get_peft_model(load(model), peft.LoraConfig(**{"r": 4, "lora_alpha": 32, **config})).eval()
    for name, weight in wrapped.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(weight, std=0.1)
    wrapped.save_pretrained(str(folder))
    tensors = {rename(name): tensor for name, tensor in load_file(folder / WEIGHTS).items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    return hf_logprobs(wrapped, asked(model))


def of_gemma3_4_51(name: str) -> str:
    return name.replace("model.model.language_model.", "model.language_model.model.")


def of_qwen_4_51(name: str) -> str:
    return name.replace("model.model.language_model.", "model.model.").replace("model.model.visual.", "model.visual.")


def of_a_state_dict(name: str) -> str:
    return re.sub(r"lora_([AB])", r"lora_\1.default", name)


def train_on(trainer: HFTrainer, model: Path, steps: int = 4) -> None:
    prompt = rendered(model, asked(model))
    targets = np.append(prompt.token_ids[1:], 0).astype(np.int64)
    datum = TrainDatum(prompt, targets, {"weights": np.ones(prompt.length, np.float32)})
    for _ in range(steps):
        trainer.forward_backward([TrainWork("a", [datum], "cross_entropy")])
        trainer.optim_step("a", AdamParams(learning_rate=0.01, weight_decay=0.1, grad_clip_norm=1.0))


CASES = [
    pytest.param("gemma3", of_gemma3_4_51, {"target_modules": LANGUAGE}, ["has no k_proj"], id="gemma3-earlier"),
    pytest.param("gemma3", of_a_state_dict, {"target_modules": LANGUAGE}, ["has no k_proj"], id="state-dict"),
    pytest.param("qwen2_5_vl", of_qwen_4_51, {"target_modules": BOTH}, ["has no"], id="qwen2_5_vl-earlier"),
    pytest.param(
        "llama",
        str,
        {"target_modules": "all-linear", "use_rslora": True, "r": 8, "lora_alpha": 16},
        ["scale is 5.65685, and 32 / r = 4 here: B was multiplied by 1.41421, rounded to float32"],
        id="llama-rslora",
    ),
    pytest.param(
        "qwen3",
        str,
        {
            "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
            "rank_pattern": {
                r"layers\.0\.self_attn\.(q|k)_proj": 2,
                "v_proj": 6,
                "^model.layers.1.self_attn.k_proj": 3,
            },
            "alpha_pattern": {"v_proj": 12, r".*\.1\..*\.o_proj": 4},
        },
        [
            "ranks below 6: 2 in k_proj, q_proj; 3 in k_proj; 4 in o_proj, q_proj",
            "B of o_proj was multiplied by 0.1875",
        ],
        id="qwen3-patterns",
    ),
    pytest.param(
        "mistral",
        str,
        {"target_modules": ["q_proj", "down_proj"], "use_rslora": True, "rank_pattern": {"down_proj": 8}},
        ["has no", "ranks below 8: 4 in q_proj", "B of q_proj was multiplied by 4", "B of down_proj was"],
        id="mistral-rslora-patterns",
    ),
    pytest.param(
        "gemma3_text",
        str,
        {"target_modules": ["q_proj", "o_proj", "up_proj"], "layers_to_transform": [1], "layers_pattern": "layers"},
        ["has no", "on some layers only: of q_proj (1 missing)"],
        id="gemma3_text-layers",
    ),
    pytest.param(
        "qwen3_vl",
        str,
        {"target_modules": LANGUAGE, "exclude_modules": r".*layers\.0\..*v_proj"},
        ["has no", "some layers only: of v_proj (1 missing)"],
        id="qwen3_vl-excluded",
    ),
    pytest.param(
        "qwen3_5",
        str,
        {"target_modules": ["in_proj_qkv", "q_proj"], "rank_pattern": {"in_proj_qkv": 8}},
        ["an A for each", "has no", "ranks below 8: 4 in q_proj", "B of q_proj was multiplied by 2, exactly"],
        id="qwen3_5-parts",
    ),
    pytest.param("qwen2", str, {"target_modules": ["q_proj", "lm_head"]}, ["has no"], id="qwen2-head"),
    pytest.param(
        "gemma3",
        of_gemma3_4_51,
        {"target_modules": ["q_proj", "lm_head"], "exclude_modules": ".*vision.*"},
        ["has no"],
        id="gemma3-head-earlier",
    ),
]


@pytest.mark.rotated(3)
@pytest.mark.mutation(
    "what-an-adapter-lacks-begins-at-random",
    "PeftAdapter.state",
    "{**fresh.tensors, **zeros, **found}",
    "{**zeros, **fresh.tensors, **found}",
    cases=("gemma3_text-layers",),
)
@pytest.mark.mutation(
    "earlier-names-are-the-modules", "_own_path", "name_now(path, family)", "path", cases=("gemma3-earlier",)
)
@pytest.mark.parametrize(("family", "rename", "config", "notes"), CASES)
def test_what_peft_loads_is_the_same_adapter_and_what_it_lacks_stays_0_in_training(
    tuned: Make, tmp_path: Path, family: str, rename: Any, config: dict[str, Any], notes: list[str]
) -> None:
    trained = tuned(family)
    expected = write(tmp_path, trained.model, rename, **config)
    assert np.abs(expected - trained.base).max() > 0.1
    if family != "qwen2_5_vl":  # PEFT 0.21 finds transformers' rules by model_type, and these are by class
        np.testing.assert_allclose(by_from_pretrained(tmp_path, trained.model), expected, atol=1e-6, rtol=0)
    with imported(tmp_path, trained.model) as (trainer, state, told):
        assert all(part in "; ".join(told) for part in notes), told
        assert_computes(trainer, trained.model, expected)
        before = {name: array.copy() for name, array in state.tensors.items()}
        lacking = {name: array == 0 for name, array in before.items()}
        assert any(zero.any() for zero in lacking.values()) == any("stay 0" in note for note in told)
        train_on(trainer, trained.model)
        after = trainer.capture("a", optimizer=True)
        assert after.optimizer is not None
        for name, zero in lacking.items():
            assert zero.all() or (after.tensors[name] != before[name])[~zero].any(), name
            for found in (after.tensors[name], *(after.optimizer[f"{m}.{name}"] for m in ("exp_avg", "exp_avg_sq"))):
                assert not found[zero].any(), name


def test_a_head_beside_another_matrix_is_refused_with_the_difference(tuned: Make, tmp_path: Path) -> None:
    model = tuned("qwen3", False).model
    write(tmp_path, model, target_modules=["q_proj", "lm_head"])
    name = "base_model.model.lm_head.base_layer.weight"
    tensors = load_file(tmp_path / WEIGHTS)
    assert name in tensors
    with imported(tmp_path, model):
        pass
    tensors[name][3, 5] += 0.25
    save_file(tensors, tmp_path / WEIGHTS)
    message = (
        rf"{re.escape(name)}: differs from the base model's lm_head.weight in 1 of [\d,]+ numbers, by 0.25 at most"
    )
    with pytest.raises(InvalidRequestError, match=message), imported(tmp_path, model):
        pass
    adapter = read_peft_adapter(tmp_path, family_of("qwen3", ""))
    with pytest.raises(InvalidRequestError, match="has no safetensors file with that matrix to compare it with"):
        check_whole_matrices(adapter.matrices, str(tmp_path / "elsewhere"))


@pytest.mark.parametrize("saved", [{}, {"save_embedding_layers": False}])
def test_an_adapter_of_the_embedding_is_refused_for_itself(tuned: Make, tmp_path: Path, saved: dict[str, bool]) -> None:
    model = tuned("qwen3").model
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "embed_tokens"])
    peft.get_peft_model(load(model), config).save_pretrained(str(tmp_path), **saved)
    with pytest.raises(InvalidRequestError, match="is an adapter of the embedding") as refused:
        read_peft_adapter(tmp_path, family_of("qwen3", ""))
    assert "save_embedding_layers" not in str(refused.value)


def test_null_and_false_fields_of_any_name_are_taken(tuned: Make, tmp_path: Path) -> None:
    """As PEFT, unsloth and others write them."""
    model = tuned("qwen3").model
    write(tmp_path, model, target_modules=["q_proj"])
    names = ["corda_config", "eva_config", "lora_bias", "target_parameters", "trainable_token_indices", "bias"]
    names += ["exclude_modules", "megatron_config", "layer_replication", "new_method", "init_lora_weights", "use_dora"]
    given = json.loads((tmp_path / CONFIG).read_text()) | dict.fromkeys(names)
    given |= {"another_method": False, "qalora_group_size": 16, "loftq_config": {}, "rank_pattern": None}
    given["auto_mapping"] = {"base_model_class": "Qwen3ForCausalLM", "unsloth_fixed": True}
    (tmp_path / CONFIG).write_text(json.dumps(given))
    with imported(tmp_path, model) as (_, _, notes):
        assert len(notes) == 1


def test_patterns_that_take_for_ever_are_refused(tuned: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinker_local.backend.adapters.peft_config.MATCHING_SECONDS", 0.2)
    model = tuned("qwen3").model
    write(tmp_path, model, target_modules=["q_proj"])
    given = json.loads((tmp_path / CONFIG).read_text()) | {"alpha_pattern": {"(?:.|..|...)+[0-9]": 3}}
    (tmp_path / CONFIG).write_text(json.dumps(given))
    with pytest.raises(InvalidRequestError, match=r"alpha_pattern: .* matching takes more than 0.2 seconds"):
        read_peft_adapter(tmp_path, family_of("qwen3", ""))


def test_a_pattern_of_another_scale_under_the_earlier_name_is_refused(tuned: Make, tmp_path: Path) -> None:
    """PEFT would load it with the scale of the others."""
    model = tuned("gemma3").model
    write(tmp_path, model, of_gemma3_4_51, target_modules=LANGUAGE)
    pattern = {"^language_model.model.layers.0.self_attn.q_proj": 8}
    (tmp_path / CONFIG).write_text(json.dumps(json.loads((tmp_path / CONFIG).read_text()) | {"alpha_pattern": pattern}))
    with pytest.raises(InvalidRequestError, match=r"alpha_pattern: says 8 of language_model\.model\.layers\.0\."):
        read_peft_adapter(tmp_path, family_of("gemma3", ""))
