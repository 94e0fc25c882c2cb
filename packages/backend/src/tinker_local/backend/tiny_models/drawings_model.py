"""A tiny model of random weights that sees what colours and outlines a drawing has, wherever they are.

A Qwen3-VL whose tower reads an image of 64x64 pixels as one patch, and so as one token. The patch embedding averages
red, green and blue of 16x16 blocks. The MLP of its only layer is a convolution of random 3x3 filters over the blocks,
written as a dense matrix, and a mean over the whole image: what there is counts, not where. White is nothing, and so is
what lies outside. The means are whitened, as measured on strokes of random curves and colours: directions in which such
scribbles differ little count as much as others. The merger's norm takes out how much of the image is drawn on. The
decoder is random and not laid out for anything. Nothing in the model has seen a circle or the name of a colour: what it
learns, it learns in training, in the language model.
"""

from pathlib import Path

import numpy as np
from tinker_local.backend.tiny_models.demo_model import Array, Weights, gelu, rotation, spline
from tinker_local.backend.tiny_models.make_models import make_tiny_vl_model
from tinker_local.backend.tiny_models.shapes import TextShape, VisionShape

SIDE = 64
"""Pixels per side of an image."""

_CELLS = 16
_SEEN = 3 * _CELLS**2
_FILTERS = 64
_KERNEL = 3
_WIDTH = _SEEN + _FILTERS + 32
_HIDDEN = 192
_CONSTANT = 3.0
_PIXELS = 0.05
_LINEAR = 8.0
_OUTPUT_RMS = 0.3
_SCRIBBLES = 2000
_RIDGE = 1e-3

TEXT = TextShape(
    hidden_size=_HIDDEN, intermediate_size=384, num_layers=2, num_heads=6, num_kv_heads=6, weight_scale=1.0
)
VISION = VisionShape(
    hidden_size=_WIDTH,
    intermediate_size=_FILTERS * _CELLS**2,
    num_layers=1,
    num_heads=_WIDTH // 32,
    patch_size=SIDE,
    merge_size=1,
    position_grid=4,
    min_pixels=SIDE**2,
    max_pixels=(4 * SIDE) ** 2,
)


def make_drawings_vl_model(out: Path, *, seed: int = 0) -> Path:
    """Write the model into the folder `out` and return it; the same seed gives the same weights.

    Raises FileExistsError if `out` exists and is not an empty folder.
    """
    from safetensors.numpy import load_file, save_file

    make_tiny_vl_model(out, seed=seed, text=TEXT, vision=VISION)
    path = out / "model.safetensors"
    weights = load_file(path)
    weights |= _tower(weights, np.random.default_rng(seed))
    save_file({name: np.ascontiguousarray(value) for name, value in weights.items()}, path, {"format": "pt"})
    return out


def _tower(weights: Weights, rng: np.random.Generator) -> Weights:
    """The tower's weights: zero but for the patch embedding, the norms, the MLP and the merger.

    The state of the patch: numbers of the image, then features, then constants.
    """
    tower = {name: np.zeros_like(value) for name, value in weights.items() if ".visual." in name}
    for name, value in tower.items():
        if "norm" in name and name.endswith("weight"):
            value[:] = 1
    prefix = next(iter(tower)).split(".visual.")[0] + ".visual."
    features = slice(_SEEN, _SEEN + _FILTERS)
    constant = np.zeros(_WIDTH, np.float32)
    constant[features.stop :] = _CONSTANT * np.where(np.arange(_WIDTH - features.stop) % 2, 1, -1)
    tower[prefix + "patch_embed.proj.weight"] = _block_means(tower[prefix + "patch_embed.proj.weight"].shape)
    tower[prefix + "patch_embed.proj.bias"] = constant
    tower[prefix + "patch_embed.proj.bias"][:_SEEN] = _PIXELS

    kernels = (1.5 / np.sqrt(3 * _KERNEL**2)) * rng.standard_normal((_FILTERS, 3, _KERNEL, _KERNEL))
    biases = rng.uniform(-1.5, 0, _FILTERS).astype(np.float32)
    filters, offsets = _convolution(kernels), biases.repeat(_CELLS**2)
    # The constants fix the variance that LayerNorm divides by, since the image's numbers are small beside them. The
    # mean that it subtracts can be read off the features, which are still zero.
    first = np.zeros((len(filters), _WIDTH), np.float32)
    first[:, :_SEEN] = filters * (np.sqrt(np.mean(constant**2)) / _PIXELS)
    first[:, _SEEN] = -first[:, :_SEEN].sum(1)
    tower[prefix + "blocks.0.mlp.linear_fc1.weight"] = first
    tower[prefix + "blocks.0.mlp.linear_fc1.bias"] = offsets
    means = gelu(_scribbles(rng) @ filters.T + offsets).reshape(_SCRIBBLES, _FILTERS, -1).mean(2)
    variances, axes = np.linalg.eigh(np.cov(means.T))
    whiten = (axes / np.sqrt(variances + _RIDGE * variances.mean())).T
    second = np.zeros((_WIDTH, len(filters)), np.float32)
    second[features] = whiten.repeat(_CELLS**2, 1) / _CELLS**2
    bias = -constant
    bias[features] = -whiten @ means.mean(0)
    tower[prefix + "blocks.0.mlp.linear_fc2.weight"] = second
    tower[prefix + "blocks.0.mlp.linear_fc2.bias"] = bias

    # The merger's GELU is nearly linear far from zero.
    out = np.zeros((_HIDDEN, _WIDTH), np.float32)
    out[:, features] = _OUTPUT_RMS * np.sqrt(_HIDDEN / _FILTERS) * rotation(_HIDDEN, rng)[:, :_FILTERS]
    tower[prefix + "merger.linear_fc1.weight"] = np.float32(np.sqrt(_FILTERS / _WIDTH)) * np.eye(
        _WIDTH, dtype=np.float32
    )
    tower[prefix + "merger.linear_fc1.bias"] = np.full(_WIDTH, _LINEAR, np.float32)
    tower[prefix + "merger.linear_fc2.weight"] = out
    tower[prefix + "merger.linear_fc2.bias"] = -_LINEAR * out.sum(1)
    return tower


def _block_means(shape: tuple[int, ...]) -> Array:
    """Filters [width, colours, frames, side, side]: what blocks lack to white, of each colour, times `_PIXELS`."""
    side = SIDE // _CELLS
    weight = np.zeros(shape, np.float32)
    blocks = weight[:_SEEN].reshape(3, _CELLS, _CELLS, *shape[1:])
    for colour in range(3):
        for row in range(_CELLS):
            for column in range(_CELLS):
                block = blocks[colour, row, column, colour]
                place = slice(row * side, (row + 1) * side), slice(column * side, (column + 1) * side)
                block[:, place[0], place[1]] = -_PIXELS / (shape[2] * side**2)
    return weight


def _convolution(kernels: Array) -> Array:
    """Filters [n, 3, kernel, kernel] as a matrix [n * cells, 3 * cells] over the blocks; what is outside is zero."""
    matrix = np.zeros((len(kernels), _CELLS, _CELLS, 3, _CELLS, _CELLS), np.float32)
    half = _KERNEL // 2
    for row in range(_CELLS):
        for column in range(_CELLS):
            top, left = max(row - half, 0), max(column - half, 0)
            bottom, right = min(row + half + 1, _CELLS), min(column + half + 1, _CELLS)
            inside = kernels[:, :, top - row + half : bottom - row + half, left - column + half : right - column + half]
            matrix[:, row, column, :, top:bottom, left:right] = inside
    return matrix.reshape(-1, _SEEN)


def _scribbles(rng: np.random.Generator) -> Array:
    """What blocks lack to white, 0 to 2, [scribbles, 3 * cells]: each a stroke of any colour on a light ground."""
    fine = 2 * _CELLS
    places = (np.arange(fine) + 0.5) / 2
    pictures = np.empty((_SCRIBBLES, 3, _CELLS, _CELLS), np.float32)
    for picture in pictures:
        size = rng.uniform(1, _CELLS / 3)
        points = rng.uniform(-size, size, (rng.integers(3, 6), 2)) + rng.uniform(size / 2, _CELLS - size / 2, 2)
        curve = spline(points)
        squares = (places[:, None, None] - curve[:, 0]) ** 2 + (places[:, None] - curve[:, 1]) ** 2
        ink = np.clip((rng.uniform(0.3, 2.5) - np.sqrt(squares.min(-1))) * 2 + 0.5, 0, 1)
        ink = ink.reshape(_CELLS, 2, _CELLS, 2).mean((1, 3))
        colour, ground = rng.uniform(0, 1, (3, 1, 1)), rng.uniform(0.85, 1, (3, 1, 1))
        picture[:] = 2 - 2 * (ground + (colour - ground) * ink)
    return pictures.reshape(_SCRIBBLES, _SEEN)
