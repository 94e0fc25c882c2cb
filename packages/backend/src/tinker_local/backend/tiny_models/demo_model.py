"""The demo's model: tiny, of random weights, laid out so that its vision tower is a good random feature extractor.

A Qwen3-VL whose tower reads an image of 32x32 pixels as one patch. The patch embedding averages blocks of 4x4 pixels
into 64 numbers; the MLP of its only layer is a convolution of random 5x5 filters over them, written as a dense matrix,
and an average over the four quarters of the image. Random convolutions with pooling are known to keep what a linear
classifier needs (Saxe et al., "On random weights and unsupervised feature learning", ICML 2011). The features are
centred and scaled on random strokes; nothing in it has seen a digit: what the model learns, it learns through the API,
in the language model.
"""

import itertools
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tinker_local.backend.tiny_models.make_models import make_tiny_vl_model
from tinker_local.backend.tiny_models.shapes import TextShape, VisionShape

SIDE = 32
"""Pixels per side of an image."""

_CELLS = 8
_FILTERS = 128
_KERNEL = 5
_QUARTERS = 4
_WIDTH = _FILTERS * _QUARTERS
_CONSTANT = 3.0
_LINEAR = 4.0
_OUTPUT_RMS = 0.3

TEXT = TextShape(hidden_size=512, intermediate_size=512, num_layers=1, num_heads=8, num_kv_heads=4, weight_scale=0.7)
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

Weights = dict[str, npt.NDArray[np.float32]]


def make_demo_vl_model(out: Path, *, seed: int = 0) -> Path:
    """Write the demo's model into the folder `out` and return it; the same seed gives the same bytes.

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
    """The tower's weights; those that matter little stay random, but small."""
    visual = {name: value for name, value in weights.items() if ".visual." in name}
    prefix = next(iter(visual)).split(".visual.")[0] + ".visual."
    tower = {name: value * np.float32(0.01) for name, value in visual.items()}
    for name, value in visual.items():
        if "norm" in name:
            tower[name] = np.ones_like(value) if name.endswith("weight") else np.zeros_like(value)
    constant = np.zeros(_WIDTH, np.float32)
    constant[_CELLS**2 :] = _CONSTANT * np.where(np.arange(_WIDTH - _CELLS**2) % 2, 1, -1)
    # The constant half of the state fixes the variance that LayerNorm divides by, so that pixels pass it unchanged.
    spread = np.float32(np.sqrt(np.mean(constant**2) + 1 / 16))
    filters, offsets = _convolution(rng)
    tower[prefix + "patch_embed.proj.weight"] = _block_means(visual[prefix + "patch_embed.proj.weight"].shape)
    tower[prefix + "patch_embed.proj.bias"] = constant
    first = np.zeros((filters.shape[0], _WIDTH), np.float32)
    first[:, : _CELLS**2] = filters * spread
    tower[prefix + "blocks.0.mlp.linear_fc1.weight"] = first
    tower[prefix + "blocks.0.mlp.linear_fc1.bias"] = offsets
    pooling = _pooling()
    features = _gelu(_strokes(rng) @ filters.T + offsets) @ pooling.T
    pooling /= features.std(0)[:, None] + 0.05
    centre = _gelu(_strokes(rng) @ filters.T + offsets).mean(0) @ pooling.T
    centre[: _CELLS**2] -= 0.7  # the mean pixel of a stroke image, which the residual stream carries along
    tower[prefix + "blocks.0.mlp.linear_fc2.weight"] = pooling
    tower[prefix + "blocks.0.mlp.linear_fc2.bias"] = -constant - centre
    # The merger's GELU is nearly linear far from zero.
    rotation = np.linalg.qr(rng.standard_normal((TEXT.hidden_size, _WIDTH)))[0]
    projection = (_OUTPUT_RMS * rotation).astype(np.float32)
    tower[prefix + "merger.linear_fc1.weight"] = np.eye(_WIDTH, dtype=np.float32)
    tower[prefix + "merger.linear_fc1.bias"] = np.full(_WIDTH, _LINEAR, np.float32)
    tower[prefix + "merger.linear_fc2.weight"] = projection
    tower[prefix + "merger.linear_fc2.bias"] = -_LINEAR * projection.sum(1)
    return tower


def _block_means(shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """Filters [width, colours, frames, side, side] of which the first 64 average one block of pixels each."""
    weight = np.zeros(shape, np.float32)
    block = SIDE // _CELLS
    for cell in range(_CELLS**2):
        row, column = divmod(cell, _CELLS)
        rows, columns = slice(row * block, (row + 1) * block), slice(column * block, (column + 1) * block)
        weight[cell, :, :, rows, columns] = 1 / (shape[1] * shape[2] * block**2)
    return weight


def _convolution(rng: np.random.Generator) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
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


def _strokes(rng: np.random.Generator) -> npt.NDArray[np.float32]:
    """Images [512, 64] of a few random strokes, white (1) on black (-1): what features are centred and scaled on."""
    images = np.full((512, _CELLS, _CELLS), -1.0, np.float32)
    along = np.linspace(0, 1, 16)
    for image in images:
        points = rng.uniform(0.5, _CELLS - 0.5, (4, 2))
        for start, end in itertools.pairwise(points):
            y, x = (start[:, None] * (1 - along) + end[:, None] * along).astype(int)
            image[y, x] = rng.uniform(0, 1)
    return images.reshape(len(images), -1)


def _pooling() -> npt.NDArray[np.float32]:
    """Mean of each filter over each quarter of the image, [filters * 4, filters * 64]."""
    half = _CELLS // 2
    quarter = np.arange(_CELLS) // half
    which = (quarter[:, None] * 2 + quarter[None]).reshape(-1)
    mean = (which == np.arange(_QUARTERS)[:, None]) / half**2
    return np.kron(np.eye(_FILTERS), mean).astype(np.float32)


def _gelu(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """GELU in its tanh form, which the tower uses."""
    return np.asarray(0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))), np.float32)
