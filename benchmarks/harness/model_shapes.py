"""Shapes of published models of several families, as keywords of their transformers config."""

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Shape:
    """`family`: the tiny model whose other settings and tokenizer it has. `settings`: of its config. `loop`: whether a
    loop by hand is measured beside it. `experts`: whether tokens go to some of many. `memory_gib`: also measure one
    adapter with no more memory than this; the goal is `limited_tokens` a second."""

    family: Literal["qwen3", "qwen3_5_text", "qwen3_moe", "llama", "mistral", "gemma3_text", "gpt_oss"]
    settings: dict[str, Any]
    loop: bool = True
    experts: bool = False
    memory_gib: int | None = None
    limited_tokens: float | None = None


def _sizes(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, vocab: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": 32768,
    }


SHAPES = {
    "qwen3.5-9b": Shape(
        "qwen3_5_text",
        _sizes(4096, 12288, 32, 16, 4, 248320)
        | {
            "head_dim": 256,
            "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 8,
            "linear_num_key_heads": 16,
            "linear_key_head_dim": 128,
            "linear_num_value_heads": 32,
            "linear_value_head_dim": 128,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e7,
                "partial_rotary_factor": 0.25,
                "mrope_section": [11, 11, 10],
                "mrope_interleaved": True,
            },
        },
    ),
    "qwen3-30b-a3b": Shape(
        "qwen3_moe",
        _sizes(2048, 6144, 48, 32, 4, 151936)
        | {"head_dim": 128, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8},
        loop=False,
        experts=True,
        memory_gib=80,
        limited_tokens=9000,
    ),
    "qwen3-8b": Shape("qwen3", _sizes(4096, 12288, 36, 32, 8, 151936) | {"head_dim": 128}, loop=False),
    "llama-3.1-8b": Shape("llama", _sizes(4096, 14336, 32, 32, 8, 128256) | {"head_dim": 128}),
    "mistral-7b": Shape("mistral", _sizes(4096, 14336, 32, 32, 8, 32768) | {"head_dim": 128, "sliding_window": None}),
    "gemma-3-12b": Shape(
        "gemma3_text",
        _sizes(3840, 15360, 48, 16, 8, 262208)
        | {
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "sliding_window": 1024,
            "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 8,
        },
        loop=False,
    ),
    "gpt-oss-20b": Shape(
        "gpt_oss",
        _sizes(2880, 2880, 24, 64, 8, 201088)
        | {
            "head_dim": 64,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "sliding_window": 128,
            "layer_types": ["sliding_attention", "full_attention"] * 12,
        },
        loop=False,
        experts=True,
    ),
}
"""Names of the command line, the most important first."""
