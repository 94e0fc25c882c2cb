"""Pictures of four shapes, and inputs with them in all places, for tests of any model that sees."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tinker_local.backend.families import family_of
from tinker_local.backend.rendering.rendered_input import TrainerImage
from tinker_local.types import EncodedTextChunk, ImageChunk, ModelInput
from transformers import AutoConfig

from tests.e2e.test_agreement import tokens

Read = tuple[ImageChunk, TrainerImage]
"""A picture, and as the model's own processor reads it."""

SIZES = ((224, 224), (260, 60), (50, 200), (30, 40))
"""Width and height of pictures in pixels."""


def png(width: int, height: int, seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def read_pictures(folder: Path) -> list[Read]:
    config = AutoConfig.from_pretrained(folder)
    vision = family_of(config.model_type, str(folder)).vision
    assert vision is not None
    processor = vision.processor(str(folder), config)
    found = []
    for seed, size in enumerate(SIZES):
        data = png(*size, seed)
        found.append((ImageChunk(data=data, format="png"), processor.process(Image.open(io.BytesIO(data)))))
    return found


def inputs_of(read: Sequence[Read]) -> list[tuple[ModelInput, np.ndarray]]:
    """A picture of each shape between texts, one at the start, two pictures, and text; with -1 at their positions."""
    found = []
    for seed, order in enumerate([*([-1, at, -1] for at, _ in enumerate(read)), [0, -1], [-1, 1, -1, 2, -1], [-1]]):
        chunks: list[Any] = []
        ids: list[int] = []
        for place, at in enumerate(order):
            if at < 0:
                chunks.append(EncodedTextChunk(tokens=tokens(10 * seed + place, 5 + seed)))
                ids += [*chunks[-1].tokens]
            else:
                chunks.append(read[at][0])
                ids += [-1] * read[at][1].num_tokens
        found.append((ModelInput(chunks=tuple(chunks)), np.array(ids)))
    return found
