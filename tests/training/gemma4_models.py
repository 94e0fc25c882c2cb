"""Tiny models of Gemma 4, each with what sets one published size apart."""

from pathlib import Path
from typing import Any

import transformers
from tinker_local.backend.tiny_models.make_models import make_tiny_text_model
from tinker_local.backend.tiny_models.marks import GEMMA
from tinker_local.backend.tiny_models.shapes import TextShape
from tinker_local.backend.tiny_models.text_families import TEXT_FAMILIES, text_settings
from tinker_local.backend.tiny_models.tokenizer import write_tokenizer
from tinker_local.backend.tiny_models.weights import write_weights

TYPES = ["sliding_attention", "full_attention", "sliding_attention", "full_attention", "sliding_attention"]
KINDS: dict[str, dict[str, Any]] = {
    "large": {},
    "small": {
        "attention_k_eq_v": False,
        "hidden_size_per_layer_input": 16,
        "num_kv_shared_layers": 4,
        "use_double_wide_mlp": True,
        "layer_types": [*TYPES, "sliding_attention", "full_attention"],
    },
    "experts": {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 64},
    "shared keys alone": {
        "attention_k_eq_v": False,
        "num_kv_shared_layers": 3,
        "layer_types": [*TYPES, "full_attention"],
    },
    "shared keys that are values": {"num_kv_shared_layers": 3, "layer_types": [*TYPES, "full_attention"]},
}
"""Fields that differ from those of the tiny model of the family, which is laid out as 31B. `small`: as E2B and E4B."""


def make_gemma4(out: Path, kind: str, shape: TextShape | None = None) -> Path:
    """Write a language model of `kind` with random weights into the folder `out`."""
    if not KINDS[kind]:
        return make_tiny_text_model(out, family="gemma4_text", shape=shape)
    shape = shape or TextShape()
    own, settings = KINDS[kind], TEXT_FAMILIES["gemma4_text"].settings(shape)
    config = transformers.Gemma4TextConfig(
        **{
            **text_settings(shape, GEMMA),
            **settings,
            **own,
            **({"num_hidden_layers": len(own["layer_types"])} if "layer_types" in own else {}),
        },
        tie_word_embeddings=True,
    )
    model = transformers.Gemma4ForCausalLM(config)
    out.mkdir(parents=True)
    write_tokenizer(out, GEMMA, shape.max_position_embeddings)
    write_weights(model, out, 0, GEMMA, text_scale=shape.weight_scale)
    return out
