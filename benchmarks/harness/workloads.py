"""The same random data for every measurement. Token ids stay below the vocabulary of the scale's model.

Legend: N positions of a sequence.
"""

import io
import math

import numpy as np
import numpy.typing as npt

from harness.scale import Scale

Int64Array = npt.NDArray[np.int64]


def ragged_lengths(scale: Scale, seed: int = 0) -> list[int]:
    """Lognormal lengths around the scale's median, clipped; 64 sequences of 41,989 tokens at full scale."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    drawn = torch.exp(0.7 * torch.randn(scale.sequences, generator=generator) + math.log(scale.median_length))
    return [int(length) for length in drawn.clamp(scale.shortest, scale.longest)]


def sequences(scale: Scale, lengths: list[int], seed: int = 1) -> list[Int64Array]:
    """Random tokens, int64 [N] each."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, scale.text.vocab, length) for length in lengths]


def ragged_sequences(scale: Scale) -> list[Int64Array]:
    """One step of text training."""
    return sequences(scale, ragged_lengths(scale))


def picture(width: int, seed: int, height: int | None = None) -> bytes:
    """A JPEG of `width` x `height` pixels (square without it): smooth colours with some noise, as many bytes as a
    photograph."""
    from PIL import Image

    size = (width, height or width)
    rng = np.random.default_rng(seed)
    smooth = Image.fromarray(rng.integers(0, 256, (8, 8, 3), np.uint8)).resize(size, Image.Resampling.BICUBIC)
    pixels = np.asarray(smooth, np.int16) + rng.integers(-12, 13, (size[1], size[0], 3), np.int16)
    file = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=90)
    return file.getvalue()
