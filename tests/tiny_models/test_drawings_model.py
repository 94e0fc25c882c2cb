"""The model of drawings: random, small, its tower tells colours and outlines apart wherever they are."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image, ImageDraw
from tinker_local.backend.tiny_models import make_drawings_vl_model
from transformers import AutoImageProcessor, AutoModelForImageTextToText

COLOURS = ((250, 30, 20), (30, 160, 40), (30, 60, 240), (240, 230, 30), (20, 20, 20), (130, 130, 130))
OUTLINES = ("ellipse", "rectangle", "triangle")

Features = npt.NDArray[np.float32]


@pytest.fixture(scope="module")
def tower(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Images to what the language model gets of them, [n, width], each as one token."""
    folder = make_drawings_vl_model(tmp_path_factory.mktemp("models") / "drawings")
    model = AutoModelForImageTextToText.from_pretrained(folder)
    processor = AutoImageProcessor.from_pretrained(folder)

    def read(images: list[Image.Image]) -> Features:
        batch = processor(images=images, return_tensors="pt")
        assert batch["image_grid_thw"].tolist() == [[1, 1, 1]] * len(images)
        with torch.no_grad():
            found = model.model.get_image_features(batch["pixel_values"], batch["image_grid_thw"], return_dict=True)
        parts = found.pooler_output
        features = parts if isinstance(parts, torch.Tensor) else torch.cat(tuple(parts))
        assert features.shape == (len(images), model.config.text_config.hidden_size)
        return np.asarray(features.numpy(), np.float32)

    return read


def drawing(outline: str, colour: tuple[int, int, int], size: float, left: float, top: float) -> Image.Image:
    """A filled figure on a light ground."""
    image = Image.new("RGB", (64, 64), (245, 250, 240))
    pen, right, bottom = ImageDraw.Draw(image), left + size, top + size
    if outline == "triangle":
        pen.polygon([(left, bottom), (right, bottom), ((left + right) / 2, top)], colour)
    else:
        getattr(pen, outline)((left, top, right, bottom), colour)
    return image


@pytest.mark.more
def test_it_matters_what_is_drawn_and_not_where(tower: Any) -> None:
    places = [drawing("ellipse", COLOURS[0], 16, left, top) for left, top in ((8, 8), (36, 12), (20, 36))]
    others = [drawing("ellipse", COLOURS[1], 16, 8, 8), drawing("triangle", COLOURS[0], 16, 8, 8)]
    features = tower([*places, *others])
    distances = np.linalg.norm(features - features[0], axis=1)
    assert distances[1:3].max() < 1e-3 * np.linalg.norm(features[0])
    assert distances[3:].min() > 0.3 * np.linalg.norm(features[0])


@pytest.mark.more
def test_colours_and_outlines_can_be_read_off_by_a_linear_map(tower: Any) -> None:
    rng = np.random.default_rng(0)
    colours, outlines = rng.integers(0, len(COLOURS), 900), rng.integers(0, len(OUTLINES), 900)
    sizes = rng.uniform(12, 28, 900)
    images = [
        drawing(OUTLINES[outline], COLOURS[colour], size, *rng.uniform(2, 62 - size, 2))
        for colour, outline, size in zip(colours, outlines, sizes, strict=True)
    ]
    features = tower(images)
    variances = np.linalg.eigvalsh(np.cov(features.T))
    assert variances.sum() ** 2 / (variances**2).sum() > 5  # directions that share the variance: for gradients to find
    inputs = np.c_[features, np.ones(len(images))]

    def share_read(classes: npt.NDArray[np.int64]) -> float:
        """Of the last third, by the closest of as many outputs as there are classes, fitted to the rest."""
        fit = np.linalg.lstsq(inputs[:600], np.eye(classes.max() + 1)[classes[:600]], rcond=None)[0]
        return float(np.mean((inputs[600:] @ fit).argmax(1) == classes[600:]))

    assert share_read(colours) > 0.97
    assert share_read(outlines) > 0.85
