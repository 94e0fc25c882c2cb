"""A model in a real model's shape that sees where colours are, for `grid_walk.py` on a GPU. In a small shape here."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor, Qwen3VLForConditionalGeneration

CELL, SIDE = 4, 32
RED, BLUE = (230, 30, 30), (30, 30, 230)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from harness.scale import TextShape, VisionShape
    from random_model import write_random_model

    out = tmp_path_factory.mktemp("mosaic") / "model"
    text = TextShape(256, 512, 4, 4, 2, 64, 600, 4096)
    write_random_model(out, text, VisionShape(3, 128, 256, 2, (0, 1)), sees_colours=True)
    return out


Cell = tuple[int, int, tuple[int, int, int]]
"""Row, column and colour."""


def given(folder: Path, *pictures: tuple[Cell, ...]) -> Any:
    """The processor's output for grey pictures with coloured cells."""
    images = []
    for cells in pictures:
        pixels = np.full((SIDE, SIDE, 3), 128, np.uint8)
        for row, column, colour in cells:
            pixels[row * CELL : (row + 1) * CELL, column * CELL : (column + 1) * CELL] = colour
        images.append(Image.fromarray(pixels))
    return AutoImageProcessor.from_pretrained(folder)(images=images, return_tensors="pt")


def features(folder: Path, model: Any, *cells: Cell) -> torch.Tensor:
    """What the language model gets of a picture: [width], float32."""
    found = given(folder, cells)
    with torch.no_grad():
        (token,) = model.model.visual(found["pixel_values"], grid_thw=found["image_grid_thw"]).pooler_output
    return token


def test_an_image_is_the_sum_of_its_cells_and_each_cell_has_another_direction(folder: Path) -> None:
    model = Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    grey = features(folder, model)
    places = [(row, column) for row in (0, 3, 4, 7) for column in (0, 3, 4, 7)]
    parts = [features(folder, model, (row, column, colour)) - grey for row, column in places for colour in (RED, BLUE)]
    both = features(folder, model, (0, 3, RED), (7, 4, BLUE)) - grey
    torch.testing.assert_close(
        both, parts[2 * places.index((0, 3))] + parts[2 * places.index((7, 4)) + 1], atol=1e-4, rtol=0
    )
    directions = torch.nn.functional.normalize(torch.stack(parts), dim=-1)
    overlaps = directions @ directions.T - torch.eye(len(parts))
    assert overlaps.abs().max() < 0.8  # red and blue share what they lack of green
    assert torch.linalg.matrix_rank(directions) == len(parts)


def test_text_looks_at_images_most_at_the_newest(folder: Path) -> None:
    model = Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    pictures = given(folder, ((0, 3, RED), (7, 4, BLUE)), ((5, 5, RED), (1, 2, BLUE)))
    pad = model.config.image_token_id
    tokens = [10, 11, pad, 12, 13, 14, pad, 15, 16]
    images = [index for index, token in enumerate(tokens) if token == pad]
    kinds = torch.tensor([[int(token == pad) for token in tokens]])
    with torch.no_grad():
        found = model(input_ids=torch.tensor([tokens]), mm_token_type_ids=kinds, output_attentions=True, **pictures)
    older, newer = zip(*(layer[0, :, -1, images].mean(0).tolist() for layer in found.attentions), strict=True)
    assert min(np.add(older, newer)) > 0.9
    assert np.mean(newer) > 2 * np.mean(older)
