"""Shapes of published models that read images and have no family here, had none, or get their features from
transformers' class: settings of their configs and processors, and what they are shown."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class SeeingShape:
    """`architecture`: the tiny model of `tiny_models/seeing_models.py` whose tokenizer and other settings it has.
    `text`, `vision`, `whole`: of its config's two parts, and beside them. `files`: of its processor's files, by name.
    `pictures`: widths and heights in pixels that take turns. `layers`: of the language model that are measured, where
    all of them take too long to write and read; 0: all. `target`: at least so many times the loop's tokens/s."""

    architecture: str
    text: dict[str, Any]
    vision: dict[str, Any]
    files: dict[str, dict[str, Any]]
    pictures: tuple[tuple[int, int], ...]
    whole: dict[str, Any]
    layers: int = 0
    target: float = 1.0


SEEING_SHAPES = {
    "internvl3.5-8b": SeeingShape(
        "internvl3_5",
        {
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
            "max_position_embeddings": 40960,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
        {
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "image_size": [448, 448],
        },
        {
            "preprocessor_config.json": {"size": {"height": 448, "width": 448}},
            "processor_config.json": {"image_seq_length": 256},
        },
        ((448, 448), (896, 448), (448, 896), (896, 896)),  # 1, 3, 3 and 5 tiles with the thumbnail
        {"image_seq_length": 256},
        layers=24,
    ),
    "mistral-small-3.2-24b": SeeingShape(
        "mistral3",
        {
            "hidden_size": 5120,
            "intermediate_size": 32768,
            "num_hidden_layers": 40,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 131072,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e9},
        },
        {
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "head_dim": 64,
            "hidden_act": "silu",
            "image_size": 1540,
        },
        {"preprocessor_config.json": {"size": {"longest_edge": 1540}}},
        ((512, 512), (768, 512), (768, 768), (1024, 1024)),  # 380 to 1,406 positions
        {},
        layers=12,
    ),
    "gemma-4-e4b": SeeingShape(
        "gemma4",
        {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_hidden_layers": 42,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "global_head_dim": 512,
            "num_kv_shared_layers": 18,
            "use_double_wide_mlp": False,
            "hidden_size_per_layer_input": 256,
            "vocab_size": 262144,
            "vocab_size_per_layer_input": 262144,
            "max_position_embeddings": 131072,
            "sliding_window": 512,
            "final_logit_softcapping": 30.0,
        },
        {
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_hidden_layers": 16,
            "num_attention_heads": 12,
            "num_key_value_heads": 12,
            "head_dim": 64,
            "position_embedding_size": 10240,
            "default_output_length": 280,
        },
        {
            "processor_config.json": {
                "image_seq_length": 280,
                "image_processor": {"max_soft_tokens": 280},
                "video_processor": {"max_soft_tokens": 70},
            }
        },
        ((512, 512), (768, 512), (512, 768), (1280, 720)),  # 256 to 264 positions
        {},
        target=1.5,
    ),
}
"""Names of the command line. All pictures of a step fit in the trainer's cache of features, 256 MiB."""
