"""A tiny model of random weights that sees where colours are.

A Qwen3-VL whose tower reads an image of 32x32 pixels as one patch, and passes it on as a mosaic: red, green and blue of
8x8 blocks, less their mean, at unit variance, rotated at random. A grey image of any brightness says nothing, and two
coloured cells say as much as a photo. The embeddings of images share a random vector, and so do those of text; the key
of the first is the query of the second, and a small RoPE base favours what is near. So text looks at images, most at
the newest, as in trained models. The rest of the decoder is as random as the demo's. Training teaches what a mosaic
means.
"""

import json
from pathlib import Path

import numpy as np
from tinker_local.backend.tiny_models.demo_model import SIDE, Array, Weights, decoder, rotation
from tinker_local.backend.tiny_models.make_models import make_tiny_vl_model
from tinker_local.backend.tiny_models.shapes import TextShape, VisionShape
from tinker_local.backend.tiny_models.tokenizer import write_json

_BLOCKS = 8
_WIDTH = 3 * _BLOCKS**2
_HEADS = _WIDTH // 32
_LINEAR = 16.0
_OUTPUT_RMS = 0.2
_SHARPNESS = 2.0
_OTHERS = 0.3
_ROPE_THETA = 1e3

TEXT = TextShape(
    hidden_size=_WIDTH,
    intermediate_size=256,
    num_layers=1,
    num_heads=_HEADS,
    num_kv_heads=_HEADS,
    weight_scale=0.7,
)
VISION = VisionShape(
    hidden_size=_WIDTH,
    intermediate_size=_WIDTH,
    num_layers=1,
    num_heads=_HEADS,
    patch_size=SIDE,
    merge_size=1,
    position_grid=4,
    min_pixels=SIDE**2,
    max_pixels=(4 * SIDE) ** 2,
)


def make_mosaic_vl_model(out: Path, *, seed: int = 0) -> Path:
    """Write the model into the folder `out` and return it; the same seed gives the same weights.

    Raises FileExistsError if `out` exists and is not an empty folder.
    """
    from safetensors.numpy import load_file, save_file

    make_tiny_vl_model(out, seed=seed, tie_word_embeddings=False, text=TEXT, vision=VISION)
    path = out / "model.safetensors"
    weights = load_file(path)
    rng = np.random.default_rng(seed)
    image, text = (rng.standard_normal(_WIDTH).astype(np.float32) for _ in range(2))
    weights |= _tower(weights, image, rng) | decoder(weights, TEXT, rng)
    weights |= _attention(weights, image, text)
    save_file({name: np.ascontiguousarray(value) for name, value in weights.items()}, path, {"format": "pt"})
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    config["text_config"]["rope_parameters"]["rope_theta"] = _ROPE_THETA
    write_json(out / "config.json", config)
    return out


def _tower(weights: Weights, image: Array, rng: np.random.Generator) -> Weights:
    """The tower's weights: zero but for the patch embedding, the norms and the merger, which adds `image`."""
    tower = {name: np.zeros_like(value) for name, value in weights.items() if ".visual." in name}
    for name, value in tower.items():
        if "norm" in name and name.endswith("weight"):
            value[:] = 1
        elif name.endswith("patch_embed.proj.weight"):
            value[:] = _block_means(value.shape)
        elif name.endswith(".merger.linear_fc1.weight"):
            value[:] = np.eye(_WIDTH)
        elif name.endswith(".merger.linear_fc1.bias"):
            value[:] = _LINEAR  # the merger's GELU is nearly linear far from zero
    out = np.float32(_OUTPUT_RMS) * rotation(_WIDTH, rng)
    (merger,) = (name.removesuffix(".weight") for name in tower if name.endswith(".merger.linear_fc2.weight"))
    tower[merger + ".weight"] = out
    tower[merger + ".bias"] = np.float32(_OUTPUT_RMS) * image - np.float32(_LINEAR) * out.sum(1)
    return tower


def _block_means(shape: tuple[int, ...]) -> Array:
    """Filters [width, colours, frames, side, side]: the mean of each colour in each block."""
    side = SIDE // _BLOCKS
    weight = np.zeros((_BLOCKS, _BLOCKS, *shape[1:2], *shape[1:]), np.float32)
    for row in range(_BLOCKS):
        for column in range(_BLOCKS):
            for colour in range(shape[1]):
                block = weight[row, column, colour, colour]
                block[:, row * side : (row + 1) * side, column * side : (column + 1) * side] = 1 / (shape[2] * side**2)
    return weight.reshape(shape)


def _attention(weights: Weights, image: Array, text: Array) -> Weights:
    """Token embeddings share `text`, whose query is the key of `image`; what else asks and answers is small."""
    changed = {}
    for name, value in weights.items():
        if name.endswith("embed_tokens.weight"):
            changed[name] = value + value.std() * text
        elif name.endswith("k_proj.weight"):
            asks = name.replace("k_proj", "q_proj")
            query = weights[asks] @ text / np.linalg.norm(text)
            changed[asks] = _with(weights[asks], text, query)
            changed[name] = _with(value, image, query)
        elif name.endswith("q_norm.weight"):
            changed[name] = value * np.float32(_SHARPNESS)
    return changed


def _with(matrix: Array, vector: Array, result: Array) -> Array:
    """The matrix made small, but for `vector`, of which it now makes `result`; lengths of `vector` do not matter."""
    direction = vector / np.linalg.norm(vector)
    small = np.float32(_OTHERS) * matrix
    return np.asarray(small + np.outer(result - small @ direction, direction), np.float32)
