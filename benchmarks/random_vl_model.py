"""Write a Qwen3-VL of random bfloat16 weights in a real model's shape, for runs without a hub.

    python benchmarks/random_vl_model.py OUT [--shape 4b]

Needs a GPU to be quick. The tokenizer is the tiny models': its ids are the first few hundred of the vocabulary.
"""

import argparse
import json
from pathlib import Path

SHAPES = {
    "2b": {"hidden": 2048, "intermediate": 6144, "layers": 28, "heads": 16, "kv": 8, "vision": (24, 1024, 4096)},
    "4b": {"hidden": 2560, "intermediate": 9728, "layers": 36, "heads": 32, "kv": 8, "vision": (24, 1024, 4096)},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="4b")
    options = parser.parse_args()
    import torch
    from tinker_local.backend.tiny_models import make_tiny_vl_model
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    shape = SHAPES[options.shape]
    make_tiny_vl_model(options.out)
    config = json.loads((options.out / "config.json").read_text())
    text, vision = config["text_config"], config["vision_config"]
    text |= {
        "hidden_size": shape["hidden"],
        "intermediate_size": shape["intermediate"],
        "num_hidden_layers": shape["layers"],
        "num_attention_heads": shape["heads"],
        "num_key_value_heads": shape["kv"],
        "head_dim": 128,
        "vocab_size": 151936,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5e6,
            "mrope_section": [24, 20, 20],
            "mrope_interleaved": True,
        },
    }
    text.pop("layer_types", None)
    depth, width, inner = shape["vision"]
    vision |= {
        "depth": depth,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_heads": 16,
        "out_hidden_size": shape["hidden"],
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [5, 11, 17],
    }
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = Qwen3VLForConditionalGeneration(Qwen3VLConfig(**config))
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(0, 0.02 if "pos_embed" in name or "embed" in name else parameter[0].numel() ** -0.5)
    for old in options.out.glob("*.safetensors"):
        old.unlink()
    model.save_pretrained(options.out)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e9:.2f} billion parameters in {options.out}")


if __name__ == "__main__":
    main()
