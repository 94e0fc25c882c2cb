"""Write a Qwen3 or Qwen3-VL of random bfloat16 weights in a real model's shape, for runs without a hub.

    python benchmarks/random_model.py OUT [--shape 4b-vl] [--mosaic]

Slow without a GPU. The tokenizer is that of the tiny models: its ids are the first few hundred of the vocabulary.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from harness import mosaic
from harness.scale import FULL, TEXT_32B, TextShape, VisionShape

_VISION_24 = VisionShape(24, 1024, 4096, 16, (5, 11, 17))
SHAPES: dict[str, tuple[TextShape, VisionShape | None]] = {
    "2b-vl": (TextShape(2048, 6144, 28, 16, 8, 128, 151936, 8192), _VISION_24),
    "4b-vl": (TextShape(2560, 9728, 36, 32, 8, 128, 151936, 8192), _VISION_24),
    "8b": (FULL.text, None),
    "8b-vl": (FULL.text, FULL.vision),
    "32b": (TEXT_32B, None),
}
LARGEST = 1024**2
"""Pixels of a picture that the processor leaves as it is: 1,024 positions."""


def text_config(shape: TextShape) -> dict[str, Any]:
    """Keywords of transformers' Qwen3Config."""
    return {
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.positions,
        "dtype": "bfloat16",
    }


def _change_vision(config: dict[str, Any], text: TextShape, vision: VisionShape, rope_theta: float) -> None:
    """Write the shape of the tower into Qwen3-VL's configuration, and the rotary sections of the decoder."""
    config["vision_config"] |= {
        "depth": vision.depth,
        "hidden_size": vision.hidden,
        "intermediate_size": vision.intermediate,
        "num_heads": vision.heads,
        "out_hidden_size": text.hidden,
        "num_position_embeddings": vision.position_grid**2,
        "deepstack_visual_indexes": list(vision.deepstack),
    }
    third = text.head_dim // 6 // 4 * 4
    config["text_config"]["rope_parameters"] = {
        "rope_type": "default",
        "rope_theta": rope_theta,
        "mrope_section": [text.head_dim // 2 - 2 * third, third, third],
        "mrope_interleaved": True,
    }


def write_random_model(out: Path, text: TextShape, vision: VisionShape | None, *, sees_colours: bool = False) -> int:
    """Write the model into the new folder `out`, in files that load in parallel; return its number of parameters.

    `sees_colours`: its tower and attention are laid out by `harness.mosaic`, which needs `vision`.
    """
    import transformers
    from tinker_local.backend.tiny_models import VisionShape as TinyVision
    from tinker_local.backend.tiny_models import make_tiny_text_model, make_tiny_vl_model

    if vision is None:
        make_tiny_text_model(out, tie_word_embeddings=False)
        config = json.loads((out / "config.json").read_text()) | text_config(text)
        config.pop("layer_types", None)
        model_class, config_class = transformers.Qwen3ForCausalLM, transformers.Qwen3Config
    else:
        make_tiny_vl_model(out, tie_word_embeddings=False, vision=TinyVision(max_pixels=LARGEST))
        config = json.loads((out / "config.json").read_text()) | {"dtype": "bfloat16"}
        config["text_config"] |= text_config(text)
        config["text_config"].pop("layer_types", None)
        _change_vision(config, text, vision, mosaic.ROPE_THETA if sees_colours else 5e6)
        model_class, config_class = transformers.Qwen3VLForConditionalGeneration, transformers.Qwen3VLConfig
    for old in out.glob("*.safetensors"):
        old.unlink()
    model = random_model(model_class, config_class(**config))
    if sees_colours:
        mosaic.lay_out(model)
    model.save_pretrained(out, max_shard_size="4GB")
    return sum(parameter.numel() for parameter in model.parameters())


def random_model(model_class: Any, config: Any) -> Any:
    """A model of `config` in bfloat16 on the GPU (or the CPU): matrices N(0, 1 / fan in), so that no activation
    grows. Where attention takes products of normed queries and keys as they are, norms of keys divide by the root of
    the head size, as they have learnt to in published models; else each position would see one other alone, and
    rounding would decide which."""
    import torch

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"), torch.random.fork_rng():
            torch.manual_seed(0)
            model = model_class(config)
            for name, parameter in model.named_parameters():
                if parameter.ndim > 1:
                    scale = 0.02 if "embed" in name else parameter[0].numel() ** -0.5
                    parameter.data.normal_(0, scale)
            for module in model.modules():
                if getattr(module, "scaling", None) == 1.0 and hasattr(module, "k_norm"):
                    module.k_norm.weight.data.mul_(module.head_dim**-0.5)
    finally:
        torch.set_default_dtype(before)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="4b-vl")
    parser.add_argument("--mosaic", action="store_true", help="sees where colours are, as examples/grid_walk.py needs")
    options = parser.parse_args()
    text, vision = SHAPES[options.shape]
    if options.mosaic and vision is None:
        parser.error(f"--mosaic: {options.shape} has no vision tower")
    parameters = write_random_model(options.out, text, vision, sees_colours=options.mosaic)
    print(f"{parameters / 1e9:.2f} billion parameters in {options.out}")


if __name__ == "__main__":
    main()
