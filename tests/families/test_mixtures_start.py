"""Servers of mixtures of experts start: both engines agree with an adapter on all modules. What one of them cannot
compute is refused in a sentence, by `check` too, before an engine starts."""

import asyncio
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tinker_local.backend.tiny_models import make_tiny_text_model
from tinker_local.backend.tiny_models.text_families import TEXT_FAMILIES, TextFamilyName

from tests.families.starts import check_refused, started

pytestmark = pytest.mark.more

EXPERTS = "w1, w3, w2"
MLP = "gate_proj, up_proj, down_proj"
ATTENTION = "q_proj, k_proj, v_proj, o_proj"
TRAINS: dict[str, str] = {
    "mixtral": f"the written-out decoder; adapters reach {ATTENTION}, {EXPERTS}, lm_head",
    "olmoe": f"the written-out decoder; adapters reach {ATTENTION}, {EXPERTS}, lm_head",
    "qwen2_moe": f"the written-out decoder; adapters reach {ATTENTION}, {EXPERTS}, {MLP}, lm_head",
    "glm4_moe": f"the written-out decoder; adapters reach {ATTENTION}, {MLP}, {EXPERTS}, lm_head",
    "ernie4_5_moe": f"the written-out decoder; adapters reach {ATTENTION}, {MLP}, {EXPERTS}, lm_head",
    "minimax_m2": f"the written-out decoder; adapters reach {ATTENTION}, {EXPERTS}, lm_head",
    "qwen3_next": "the written-out decoder; adapters reach in_proj_qkvz, out_proj, "
    f"{EXPERTS}, {MLP}, {ATTENTION}, lm_head",
    "lfm2_moe": f"the autograd decoder; adapters reach in_proj, out_proj, {EXPERTS}, q_proj, k_proj, v_proj, lm_head",
}
"""What the start says of each."""


def altered(
    folder: Path, family: TextFamilyName, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch, *, tied: bool = False
) -> Path:
    """A tiny model of `family` with `fields` of its config set otherwise."""
    kind = TEXT_FAMILIES[family]
    own = replace(kind, settings=lambda shape: {**kind.settings(shape), **fields})
    monkeypatch.setitem(TEXT_FAMILIES, family, own)
    return make_tiny_text_model(folder, family=family, tie_word_embeddings=tied)


@pytest.mark.parametrize("family", TRAINS)
def test_a_mixture_of_experts_starts_and_says_what_adapters_reach(family: Any, tmp_path: Path) -> None:
    said = asyncio.run(started(make_tiny_text_model(tmp_path / "model", family=family), tmp_path / "data"))
    (trains,) = (line for line in said if line.startswith("tiny/other: trained by "))
    assert trains.partition("trained by ")[2].startswith(TRAINS[family])
    agreed = re.search(r"agree to (\S+) nats", said[-1])
    assert agreed is not None
    assert float(agreed[1]) < 1e-4


VARIANTS: dict[str, tuple[TextFamilyName, dict[str, Any]]] = {
    "mixtral-window": ("mixtral", {"sliding_window": 16}),
    "qwen2_moe-every-second": ("qwen2_moe", {"norm_topk_prob": True, "decoder_sparse_step": 2}),
    "glm4_moe-one-group": (
        "glm4_moe",
        {"n_group": 1, "topk_group": 1, "use_qk_norm": False, "attention_bias": False, "norm_topk_prob": False},
    ),
    "ernie4_5_moe-nothing-shared": ("ernie4_5_moe", {"moe_num_shared_experts": 0, "moe_layer_start_index": 0}),
    "minimax_m2-whole-heads": (
        "minimax_m2",
        {"rotary_dim": 32, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    ),
    "lfm2_moe-without-bias": (
        "lfm2_moe",
        {"use_expert_bias": False, "norm_topk_prob": False, "routed_scaling_factor": 1.0, "conv_bias": True},
    ),
    "lfm2_moe-experts-everywhere": ("lfm2_moe", {"num_dense_layers": 0, "layer_types": ["conv", "conv", "conv"]}),
    "qwen3_next-listed": ("qwen3_next", {"mlp_only_layers": [0], "norm_topk_prob": False}),
}
"""Families with fields that published models have otherwise than the tiny ones."""


@pytest.mark.parametrize("case", VARIANTS)
def test_other_settings_of_published_models_start(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = altered(tmp_path / "model", *VARIANTS[case], monkeypatch, tied=case.startswith("lfm2_moe"))
    said = asyncio.run(started(folder, tmp_path / "data"))
    agreed = re.search(r"agree to (\S+) nats", said[-1])
    assert agreed is not None
    assert float(agreed[1]) < 1e-4


REFUSED: dict[str, tuple[TextFamilyName, dict[str, Any], str]] = {
    "olmoe-normalised": ("olmoe", {"norm_topk_prob": True}, "norm_topk_prob is True, and vLLM's OlmoeForCausalLM"),
    "olmoe-clipped": ("olmoe", {"clip_qkv": 8.0}, "clip_qkv is 8.0, and vLLM's OlmoeForCausalLM"),
    "qwen2_moe-biases": ("qwen2_moe", {"qkv_bias": False}, "qkv_bias is False, and vLLM's Qwen2MoeForCausalLM"),
    "glm4_moe-tied": ("glm4_moe", {}, "tie_word_embeddings is True, and vLLM's Glm4MoeFor"),
    "ernie4_5_moe-biases": ("ernie4_5_moe", {"use_bias": True}, "use_bias is True, and vLLM's Ernie4_5_MoeForCausalLM"),
    "minimax_m2-bias": (
        "minimax_m2",
        {"use_routing_bias": False},
        "use_routing_bias is False, and transformers' MiniMaxM2ForCausalLM computes as if it were True",
    ),
    "lfm2_moe-untied": ("lfm2_moe", {}, "tie_word_embeddings is False, and vLLM's Lfm2MoeForCausalLM computes as if"),
    "lfm2_moe-heads": ("lfm2_moe", {"head_dim": 64}, "head_dim is 64, and vLLM's Lfm2MoeForCausalLM computes as if it"),
    "olmoe-epsilon": ("olmoe", {"rms_norm_eps": 1e-6}, "rms_norm_eps is 1e-06, and vLLM's OlmoeForCausalLM"),
}
"""The family, fields of its config, and why a model of them is refused."""


@pytest.mark.parametrize("case", REFUSED)
def test_check_and_serve_refuse_what_vllm_computes_otherwise_before_an_engine_starts(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, fields, why = REFUSED[case]
    folder = altered(tmp_path / "model", family, fields, monkeypatch, tied=case.endswith(("-tied", "-heads")))
    check_refused(folder, tmp_path / "data", why, monkeypatch)
