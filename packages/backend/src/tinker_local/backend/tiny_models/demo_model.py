"""The demo's model: tiny, of random weights, laid out so that its vision tower is a good random feature extractor.

A Qwen3-VL whose tower reads an image of 32x32 pixels as one patch. The patch embedding averages blocks of 4x4 pixels
into 64 brightnesses, and larger blocks into 32 numbers for red and blue. The MLP of its only layer is a convolution of
random 5x5 filters over the brightnesses, written as a dense matrix, and an average over nine overlapping parts of the
image. Random convolutions with pooling are known to keep what a linear classifier needs (Saxe et al., "On random
weights and unsupervised feature learning", ICML 2011). Of these averages the model keeps what tells random curves apart
however they are bent, tilted or moved (linear discriminants, each curve a class), beside the numbers of the patch
embedding. Nothing in it has seen a digit: what the model learns, it learns through the API, in the language model.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tinker_local.backend.tiny_models.make_models import VisionFamilyName, make_tiny_vl_model
from tinker_local.backend.tiny_models.shapes import TextShape, VisionShape

SIDE = 32
"""Pixels per side of an image."""

_CELLS = 8
_COLOUR_CELLS = 4
_SEEN = _CELLS**2 + 2 * _COLOUR_CELLS**2
_FILTERS = 256
_KERNEL = 5
_PARTS = 3
_WIDTH = 512
_CONSTANT = 3.0
_LINEAR = 8.0
_OUTPUT_RMS = 0.3
_CURVES = 1000
_COPIES = 4
_RIDGE = 0.1
_MLP_SCALE = 0.2

# Attention is as wide as the state, so that all of an image passes it.
TEXT = TextShape(
    hidden_size=_WIDTH, intermediate_size=256, num_layers=1, num_heads=16, num_kv_heads=16, weight_scale=0.7
)
VISION = VisionShape(
    hidden_size=_WIDTH,
    intermediate_size=_FILTERS * _CELLS**2,
    num_layers=1,
    num_heads=16,
    patch_size=SIDE,
    merge_size=1,
    position_grid=4,
    min_pixels=SIDE**2,
    max_pixels=(4 * SIDE) ** 2,
)

Array = npt.NDArray[np.float32]
Weights = dict[str, Array]


DEMO_FAMILIES = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
"""Those with the vision tower of Qwen3-VL."""


def make_demo_vl_model(out: Path, *, seed: int = 0, family: VisionFamilyName = "qwen3_vl") -> Path:
    """Write the demo's model into the folder `out` and return it; the same seed gives the same bytes.

    Raises FileExistsError if `out` exists and is not an empty folder, and ValueError for a family with another tower.
    """
    from safetensors.numpy import load_file, save_file

    if family not in DEMO_FAMILIES:
        raise ValueError(f"the demo's vision tower is Qwen3-VL's, and {family} has another one")
    # Qwen3.5 has softmax attention in every fourth layer.
    text = replace(TEXT, num_layers=4) if family in ("qwen3_5", "qwen3_5_moe") else TEXT
    make_tiny_vl_model(out, seed=seed, family=family, text=text, vision=VISION)
    path = out / "model.safetensors"
    weights = load_file(path)
    rng = np.random.default_rng(seed)
    weights |= _tower(weights, rng) | decoder(weights, TEXT, rng)
    save_file({name: np.ascontiguousarray(value) for name, value in weights.items()}, path, {"format": "pt"})
    return out


def decoder(weights: Weights, text: TextShape, rng: np.random.Generator) -> Weights:
    """The language model's weights that differ: random rotations carry all of an image through the attention, and the
    MLP is small, because a random one only adds noise to what the attention has read. So is linear attention."""
    decoder = {}
    for name, value in weights.items():
        if name.endswith(("v_proj.weight", "o_proj.weight")):
            decoder[name] = np.float32(text.weight_scale) * rotation(text.hidden_size, rng)
        elif (".mlp." in name and ".visual." not in name) or name.endswith("linear_attn.out_proj.weight"):
            decoder[name] = value * np.float32(_MLP_SCALE)
    return decoder


def rotation(width: int, rng: np.random.Generator) -> Array:
    """A random one, [width, width]."""
    return np.linalg.qr(rng.standard_normal((width, width)))[0].astype(np.float32)


def _tower(weights: Weights, rng: np.random.Generator) -> Weights:
    """The tower's weights; those that matter little stay random, but small."""
    visual = {name: value for name, value in weights.items() if ".visual." in name}
    prefix = next(iter(visual)).split(".visual.")[0] + ".visual."
    tower = {name: value * np.float32(0.01) for name, value in visual.items()}
    for name, value in visual.items():
        if "norm" in name:
            tower[name] = np.ones_like(value) if name.endswith("weight") else np.zeros_like(value)
    constant = np.zeros(_WIDTH, np.float32)
    constant[_SEEN:] = _CONSTANT * np.where(np.arange(_WIDTH - _SEEN) % 2, 1, -1)
    # The constant part of the state fixes the variance that LayerNorm divides by, so that pixels pass it unchanged.
    spread = np.float32(np.sqrt(np.mean(constant**2) + 1 / 16))
    tower[prefix + "patch_embed.proj.weight"] = _block_means(visual[prefix + "patch_embed.proj.weight"].shape)
    tower[prefix + "patch_embed.proj.bias"] = constant
    filters, offsets = _convolution(rng)
    first = np.zeros((filters.shape[0], _WIDTH), np.float32)
    first[:, : _CELLS**2] = filters * spread
    tower[prefix + "blocks.0.mlp.linear_fc1.weight"] = first
    tower[prefix + "blocks.0.mlp.linear_fc1.bias"] = offsets
    curves = _curves(rng)
    projection, centre = _discriminants(curves, filters, offsets, _WIDTH - _SEEN)
    second = np.zeros((_WIDTH, filters.shape[0]), np.float32)
    second[_SEEN:] = projection
    bias = -constant
    bias[: _CELLS**2] -= curves.mean((0, 1))  # brightness, which the residual stream carries along
    bias[_SEEN:] -= centre
    tower[prefix + "blocks.0.mlp.linear_fc2.weight"] = second
    tower[prefix + "blocks.0.mlp.linear_fc2.bias"] = bias
    # The merger's GELU is nearly linear far from zero.
    out = np.float32(_OUTPUT_RMS) * rotation(_WIDTH, rng)
    tower[prefix + "merger.linear_fc1.weight"] = np.eye(_WIDTH, dtype=np.float32)
    tower[prefix + "merger.linear_fc1.bias"] = np.full(_WIDTH, _LINEAR, np.float32)
    tower[prefix + "merger.linear_fc2.weight"] = out
    tower[prefix + "merger.linear_fc2.bias"] = -_LINEAR * out.sum(1)
    return tower


def _block_means(shape: tuple[int, ...]) -> Array:
    """Filters [width, colours, frames, side, side]: the brightness of 64 blocks, then of 16 blocks red minus green and
    blue minus green."""
    weight = np.zeros(shape, np.float32)
    for index, (rows, columns) in enumerate(_blocks(_CELLS)):
        weight[index, :, :, rows, columns] = _CELLS**2 / (shape[1] * shape[2] * SIDE**2)
    for index, (rows, columns) in enumerate(_blocks(_COLOUR_CELLS)):
        for number, colour in enumerate((0, 2)):
            row = weight[_CELLS**2 + number * _COLOUR_CELLS**2 + index]
            row[colour, :, rows, columns] = _COLOUR_CELLS**2 / (shape[2] * SIDE**2)
            row[1, :, rows, columns] = -(_COLOUR_CELLS**2) / (shape[2] * SIDE**2)
    return weight


def _blocks(cells: int) -> list[tuple[slice, slice]]:
    """Rows and columns of the blocks of an image that is divided into cells x cells."""
    parts = [slice(SIDE // cells * i, SIDE // cells * (i + 1)) for i in range(cells)]
    return [(rows, columns) for rows in parts for columns in parts]


def _convolution(rng: np.random.Generator) -> tuple[Array, Array]:
    """Random filters over the 8x8 cells as a matrix [filters * 64, 64], and biases; outside the image is black (-1)."""
    kernels = rng.standard_normal((_FILTERS, _KERNEL, _KERNEL)) * 3 / _KERNEL
    biases = rng.uniform(-2, 2, _FILTERS)
    matrix = np.zeros((_FILTERS, _CELLS, _CELLS, _CELLS, _CELLS))
    offsets = np.repeat(biases[:, None, None], _CELLS, 1).repeat(_CELLS, 2)
    for row in range(_CELLS):
        for column in range(_CELLS):
            for i in range(_KERNEL):
                for j in range(_KERNEL):
                    y, x = row + i - _KERNEL // 2, column + j - _KERNEL // 2
                    if 0 <= y < _CELLS and 0 <= x < _CELLS:
                        matrix[:, row, column, y, x] = kernels[:, i, j]
                    else:
                        offsets[:, row, column] -= kernels[:, i, j]
    return matrix.reshape(-1, _CELLS**2).astype(np.float32), offsets.reshape(-1).astype(np.float32)


def _curves(rng: np.random.Generator) -> Array:
    """Pictures [curves, copies, 64] of random curves, white (1) on black (-1); copies differ in bend and place."""
    fine = 2 * _CELLS
    cells = (np.arange(fine) + 0.5) / 2
    pictures = np.empty((_CURVES, _COPIES, fine, fine), np.float32)
    for copies in pictures:
        shape = rng.uniform(1, _CELLS - 1, (rng.integers(3, 6), 2)) - _CELLS / 2
        for picture in copies:
            points = shape @ (np.eye(2) + 0.15 * rng.standard_normal((2, 2))) + 0.5 * rng.standard_normal(shape.shape)
            points += _CELLS / 2 + rng.uniform(-0.6, 0.6, 2)
            curve = spline(points)
            squares = (cells[:, None, None] - curve[:, 0]) ** 2 + (cells[:, None] - curve[:, 1]) ** 2
            picture[:] = np.clip((rng.uniform(0.4, 0.9) - np.sqrt(squares.min(-1))) * 2 + 0.5, 0, 1)
    means = pictures.reshape(_CURVES, _COPIES, _CELLS, 2, _CELLS, 2).mean((3, 5))
    return np.asarray(means.reshape(_CURVES, _COPIES, -1) * 2 - 1, np.float32)


def spline(points: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Places [12 n, 2] along a quadratic spline of `points` [n, 2]: pieces between the middles, bent by the points."""
    along = np.linspace(0, 1, 12)[:, None]
    middles = np.concatenate([points[:1], (points[1:] + points[:-1]) / 2, points[-1:]])
    pieces = zip(middles[:-1], points, middles[1:], strict=True)
    return np.concatenate([a * (1 - along) ** 2 + 2 * b * along * (1 - along) + c * along**2 for a, b, c in pieces])


def _discriminants(curves: Array, filters: Array, offsets: Array, count: int) -> tuple[Array, Array]:
    """What makes `count` features, of RMS 1 on average, from a convolution's output [n, filters * 64].

    A matrix [count, filters * 64] and what to subtract then: directions in which the means of parts differ most between
    curves, in units of how much they differ between copies of a curve.
    """
    pooling = _pooling()
    maps = [gelu(copies @ filters.T + offsets).reshape(-1, _FILTERS, _CELLS**2) for copies in curves.swapaxes(0, 1)]
    pooled = np.stack([(copies @ pooling.T).reshape(_CURVES, -1) for copies in maps], 1)
    means = pooled.mean(1)
    centre = means.mean(0)
    within = (pooled - means[:, None]).reshape(-1, pooled.shape[-1])
    covariance = within.T @ within / (_CURVES * (_COPIES - 1))
    variances, axes = np.linalg.eigh(covariance)
    whiten = axes / np.sqrt(variances + _RIDGE * variances.mean())
    vectors = np.linalg.svd((means - centre) @ whiten, full_matrices=False)[2][:count] @ whiten.T
    vectors /= np.sqrt(np.mean(((pooled - centre) @ vectors.T) ** 2))
    return (vectors.reshape(-1, len(pooling)) @ pooling).reshape(count, -1), vectors @ centre


def _pooling() -> Array:
    """Means over 3x3 parts of the image, [9, 64]; weights fall towards the edges of a part."""
    centres = np.linspace(1, _CELLS - 2, _PARTS)[:, None]
    weights = np.clip(1 - np.abs(np.arange(_CELLS) - centres) / 3.5, 0, None)
    weights /= weights.sum(1, keepdims=True)
    return np.kron(weights, weights).astype(np.float32)


def gelu(x: Array) -> Array:
    """GELU in its tanh form, which the tower uses."""
    return np.asarray(0.5 * x * (1 + np.tanh(float(np.sqrt(2 / np.pi)) * (x + 0.044715 * x * x * x))), np.float32)
