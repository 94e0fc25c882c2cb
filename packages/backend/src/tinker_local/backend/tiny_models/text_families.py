"""Configs of the tiny text models: the peculiarities of each family, at sizes where a short prompt meets them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from tinker_local.backend.tiny_models.marks import GEMMA, GPT_OSS, LLAMA3, MISTRAL, QWEN, Marks
from tinker_local.backend.tiny_models.shapes import TextShape

TextFamilyName = Literal[
    "qwen3",
    "qwen3_moe",
    "qwen2",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "llama",
    "mistral",
    "gemma2",
    "gemma3_text",
    "gemma4_text",
    "gpt_oss",
    "lfm2_moe",
    "mixtral",
    "olmoe",
    "qwen2_moe",
    "glm4_moe",
    "ernie4_5_moe",
    "minimax_m2",
    "qwen3_next",
]

SLIDING_WINDOW = 16
"""Positions that a layer with a sliding window attends to, its own included."""

_ROPE = {"rope_type": "default", "rope_theta": 1e6}


@dataclass(frozen=True, slots=True)
class TextFamily:
    """`model_class`: of transformers. `settings`: of its config, beyond `text_settings`. `tied`: whether the LM head of
    its smaller models is the embedding."""

    model_class: str
    marks: Marks
    settings: Callable[[TextShape], dict[str, Any]]
    tied: bool = True


def text_settings(shape: TextShape, marks: Marks) -> dict[str, Any]:
    """What the configs of all families have."""
    return {
        "vocab_size": marks.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "max_position_embeddings": shape.max_position_embeddings,
        "rms_norm_eps": 1e-6,
        "bos_token_id": None if marks.bos is None else marks.token_id(marks.bos),
        "eos_token_id": marks.token_id(marks.stops[0]),
        "pad_token_id": marks.token_id(marks.pad),
        "dtype": "float32",
    }


def _qwen3(shape: TextShape) -> dict[str, Any]:
    return {"head_dim": shape.head_dim, "rope_parameters": _ROPE}


def expert_settings(shape: TextShape) -> dict[str, Any]:
    """Two of eight experts, each narrower than an MLP and of a width that nothing else in the model has."""
    return {
        "moe_intermediate_size": shape.intermediate_size // 8 * 3,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    }


def _qwen3_moe(shape: TextShape) -> dict[str, Any]:
    return {**_qwen3(shape), **expert_settings(shape)}


def _qwen2(shape: TextShape) -> dict[str, Any]:
    """q, k and v have biases; attention is as wide as the hidden state."""
    return {"rope_parameters": _ROPE}


QWEN3_5_SHAPE = TextShape(num_layers=4)
"""One group of layers: three of linear attention, one of softmax attention."""


def qwen3_5_settings(shape: TextShape) -> dict[str, Any]:
    """Half of each head has rotary positions. Two value heads share a key head.

    Heads of keys and values are equally wide, as in published models: vLLM's kernels for GPUs take no others.
    """
    rotary = shape.head_dim // 2
    spatial = rotary // 8
    return {
        "head_dim": shape.head_dim,
        "rope_parameters": {
            **_ROPE,
            "partial_rotary_factor": 0.5,
            "mrope_section": [rotary // 2 - 2 * spatial, spatial, spatial],
            "mrope_interleaved": True,
        },
        "linear_conv_kernel_dim": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 24,
        "linear_num_value_heads": 4,
        "linear_value_head_dim": 24,
    }


def qwen3_5_moe_settings(shape: TextShape) -> dict[str, Any]:
    """The shared expert has another width, too."""
    return {
        **qwen3_5_settings(shape),
        **expert_settings(shape),
        "shared_expert_intermediate_size": shape.intermediate_size // 8 * 5,
    }


def _llama(shape: TextShape) -> dict[str, Any]:
    """Llama 3's rotary frequencies: those that turn less than once in 64 positions are 8 times slower."""
    rope = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    return {"head_dim": shape.head_dim, "rope_parameters": rope}


def _mistral(shape: TextShape) -> dict[str, Any]:
    """Every layer has a sliding window, as in the first models (later ones have none)."""
    return {"head_dim": shape.head_dim, "rope_parameters": _ROPE, "sliding_window": SLIDING_WINDOW}


def _layer_types(shape: TextShape) -> list[str]:
    return [("sliding_attention", "full_attention")[index % 2] for index in range(shape.num_layers)]


def _gemma2(shape: TextShape) -> dict[str, Any]:
    """Soft caps that bite at the scores and logits of random weights; a score scale that is not the head size's."""
    return {
        "head_dim": shape.head_dim,
        "query_pre_attn_scalar": shape.head_dim + 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        "sliding_window": SLIDING_WINDOW,
        "layer_types": _layer_types(shape),
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 4.0,
    }


def gemma3_settings(shape: TextShape) -> dict[str, Any]:
    """Each kind of layer has its own rotary frequencies."""
    return {
        "head_dim": shape.head_dim,
        "query_pre_attn_scalar": shape.head_dim + 16,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        },
        "sliding_window": SLIDING_WINDOW,
        "layer_types": _layer_types(shape),
    }


def _gemma4_text(shape: TextShape) -> dict[str, Any]:
    """As the large ones: heads are larger in layers without a window, and values are keys there."""
    rope = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    }
    return {
        "head_dim": shape.head_dim,
        "global_head_dim": 2 * shape.head_dim,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "rope_parameters": rope,
        "sliding_window": SLIDING_WINDOW,
        "layer_types": _layer_types(shape)[::-1] if shape.num_layers % 2 else _layer_types(shape),  # ends without one
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": GEMMA.vocab_size,
        "final_logit_softcapping": 4.0,
    }


def _gpt_oss(shape: TextShape) -> dict[str, Any]:
    """Each expert is narrower than an MLP; frequencies are stretched 32 times beyond 256 positions."""
    rope = {
        "rope_type": "yarn",
        "rope_theta": 1.5e5,
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 256,
    }
    return {
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate_size // 8 * 3,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rope_parameters": rope,
        "sliding_window": SLIDING_WINDOW,
        "layer_types": _layer_types(shape),
        "rms_norm_eps": 1e-5,
    }


def _local_experts(shape: TextShape) -> dict[str, Any]:
    """Two of eight experts, whose width has the name of an MLP's."""
    return {
        "intermediate_size": shape.intermediate_size // 8 * 3,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rope_parameters": _ROPE,
    }


def _mixtral(shape: TextShape) -> dict[str, Any]:
    return {**_local_experts(shape), "head_dim": shape.head_dim}


def _olmoe(shape: TextShape) -> dict[str, Any]:
    """Scores are shares of all experts; attention is as wide as the hidden state."""
    return {**_local_experts(shape), "rms_norm_eps": 1e-5}


def _qwen2_moe(shape: TextShape) -> dict[str, Any]:
    """The shared expert has another width, and scores are shares of all experts."""
    shared = shape.intermediate_size // 8 * 5
    settings = {**expert_settings(shape), "shared_expert_intermediate_size": shared, "norm_topk_prob": False}
    return {**settings, "rope_parameters": _ROPE}


def _half_rotary(shape: TextShape) -> dict[str, Any]:
    """Half of each head has rotary positions."""
    return {"head_dim": shape.head_dim, "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5}}


def _glm4_moe(shape: TextShape) -> dict[str, Any]:
    """Two of eight experts, from two of four groups of them; the first layer has an MLP. The scores of experts do not
    add up to 1."""
    return {
        **_half_rotary(shape),
        "moe_intermediate_size": shape.intermediate_size // 8 * 3,
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 2,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.5,
        "attention_bias": True,
        "use_qk_norm": True,
        "num_nextn_predict_layers": 0,
    }


def _ernie4_5_moe(shape: TextShape) -> dict[str, Any]:
    """Two of eight experts; the first layer has an MLP."""
    return {
        "moe_intermediate_size": shape.intermediate_size // 8 * 3,
        "moe_num_experts": 8,
        "moe_k": 2,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "rope_parameters": _ROPE,
    }


def _minimax_m2(shape: TextShape) -> dict[str, Any]:
    """vLLM reads how experts are chosen, and how much of a head has positions, from fields that transformers' config
    does not have."""
    fields = {"use_routing_bias": True, "scoring_func": "sigmoid", "rotary_dim": shape.head_dim // 2}
    return {**_local_experts(shape), **_half_rotary(shape), **fields}


def _lfm2_moe(shape: TextShape) -> dict[str, Any]:
    """Two of eight experts, whose scores do not add up to 1; the first layer has an MLP. Of three layers, the second
    attends, as wide as the hidden state, and convolutions are in front of experts and of an MLP."""
    return {
        "moe_intermediate_size": shape.intermediate_size // 8 * 3,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "num_dense_layers": 1,
        "routed_scaling_factor": 1.5,
        "layer_types": [("conv", "full_attention")[index % 2] for index in range(shape.num_layers)],
        "norm_eps": 1e-5,
        "rope_parameters": _ROPE,
    }


def _qwen3_next(shape: TextShape) -> dict[str, Any]:
    """As Qwen3.5 with experts, without the positions of images."""
    settings = qwen3_5_moe_settings(shape)
    rope = {name: value for name, value in settings["rope_parameters"].items() if not name.startswith("mrope")}
    return {**settings, "rope_parameters": rope}


TEXT_FAMILIES: dict[TextFamilyName, TextFamily] = {
    "qwen3": TextFamily("Qwen3ForCausalLM", QWEN, _qwen3),
    "qwen3_moe": TextFamily("Qwen3MoeForCausalLM", QWEN, _qwen3_moe, tied=False),
    "qwen2": TextFamily("Qwen2ForCausalLM", QWEN, _qwen2),
    "qwen3_5_text": TextFamily("Qwen3_5ForCausalLM", QWEN, qwen3_5_settings),
    "qwen3_5_moe_text": TextFamily("Qwen3_5MoeForCausalLM", QWEN, qwen3_5_moe_settings, tied=False),
    "llama": TextFamily("LlamaForCausalLM", LLAMA3, _llama, tied=False),
    "mistral": TextFamily("MistralForCausalLM", MISTRAL, _mistral, tied=False),
    "gemma2": TextFamily("Gemma2ForCausalLM", GEMMA, _gemma2),
    "gemma3_text": TextFamily("Gemma3ForCausalLM", GEMMA, gemma3_settings),
    "gemma4_text": TextFamily("Gemma4ForCausalLM", GEMMA, _gemma4_text),
    "gpt_oss": TextFamily("GptOssForCausalLM", GPT_OSS, _gpt_oss, tied=False),
    "lfm2_moe": TextFamily("Lfm2MoeForCausalLM", QWEN, _lfm2_moe),
    "mixtral": TextFamily("MixtralForCausalLM", MISTRAL, _mixtral, tied=False),
    "olmoe": TextFamily("OlmoeForCausalLM", QWEN, _olmoe, tied=False),
    "qwen2_moe": TextFamily("Qwen2MoeForCausalLM", QWEN, _qwen2_moe, tied=False),
    "glm4_moe": TextFamily("Glm4MoeForCausalLM", QWEN, _glm4_moe, tied=False),
    "ernie4_5_moe": TextFamily("Ernie4_5_MoeForCausalLM", QWEN, _ernie4_5_moe),
    "minimax_m2": TextFamily("MiniMaxM2ForCausalLM", QWEN, _minimax_m2, tied=False),
    "qwen3_next": TextFamily("Qwen3NextForCausalLM", QWEN, _qwen3_next, tied=False),
}
