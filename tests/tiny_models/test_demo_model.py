"""The demo's model: random, small, and its vision tower tells images apart."""

from pathlib import Path

import numpy as np
import torch
from tinker_local.backend.tiny_models import make_demo_vl_model
from tinker_local.backend.tiny_models.demo_model import SIDE
from transformers import AutoImageProcessor, AutoModelForImageTextToText


def test_demo_model_reads_an_image_as_one_token_and_tells_strokes_apart(tmp_path: Path) -> None:
    folder = make_demo_vl_model(tmp_path / "demo")
    model = AutoModelForImageTextToText.from_pretrained(folder)
    processor = AutoImageProcessor.from_pretrained(folder)
    images = np.zeros((3, SIDE, SIDE, 3), np.uint8)
    images[1, 8:24, 12:16] = 255  # upright
    images[2, 12:16, 8:24] = 255  # lying
    batch = processor(images=list(images), return_tensors="pt")
    assert batch["image_grid_thw"].tolist() == [[1, 1, 1]] * 3
    with torch.no_grad():
        found = model.model.get_image_features(batch["pixel_values"], batch["image_grid_thw"], return_dict=True)
    parts = found.pooler_output
    features = parts if isinstance(parts, torch.Tensor) else torch.cat(tuple(parts))
    assert features.shape == (3, model.config.text_config.hidden_size)
    unit = torch.nn.functional.normalize(features, dim=-1)
    likeness = unit @ unit.T
    assert likeness[1, 2] < 0.7
    assert likeness[0, 1] < 0.9
