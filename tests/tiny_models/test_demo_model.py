"""The demo's model: random, small, and its vision tower tells images apart."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from sklearn.datasets import load_digits
from tinker_local.backend.tiny_models import make_demo_vl_model
from tinker_local.backend.tiny_models.demo_model import SIDE
from tinker_local.backend.tiny_models.make_models import VisionFamilyName
from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageTextToText

Array = npt.NDArray[np.float32]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_demo_vl_model(tmp_path_factory.mktemp("demo") / "model")


def tower_features(folder: Path, images: npt.NDArray[np.uint8]) -> Array:
    """What the language model gets of images [n, side, side, 3], each as one token: [n, hidden size]."""
    model = AutoModelForImageTextToText.from_pretrained(folder)
    batch = AutoImageProcessor.from_pretrained(folder)(images=list(images), return_tensors="pt")
    assert batch["image_grid_thw"].tolist() == [[1, 1, 1]] * len(images)
    with torch.no_grad():
        found = model.model.get_image_features(batch["pixel_values"], batch["image_grid_thw"], return_dict=True)
    parts = found.pooler_output
    features = parts if isinstance(parts, torch.Tensor) else torch.cat(tuple(parts))
    assert features.shape == (len(images), model.config.text_config.hidden_size)
    return np.asarray(features.numpy(), np.float32)


@pytest.mark.more
def test_demo_model_reads_an_image_as_one_token_and_tells_strokes_apart(folder: Path) -> None:
    images = np.zeros((3, SIDE, SIDE, 3), np.uint8)
    images[1, 8:24, 12:16] = 255  # upright
    images[2, 12:16, 8:24] = 255  # lying
    features = tower_features(folder, images)
    unit = features / np.linalg.norm(features, axis=1, keepdims=True)
    likeness = unit @ unit.T
    assert likeness[1, 2] < 0.7
    assert likeness[0, 1] < 0.9


@pytest.mark.more
def test_a_linear_classifier_of_the_towers_features_reads_digits_that_it_has_not_seen(folder: Path) -> None:
    """Folds of the demo's training digits: the digits that the demo holds out take no part."""
    data = load_digits()
    pixels = np.clip(data.images[:1500] * (255 / 16), 0, 255).astype(np.uint8)
    images = np.repeat(np.kron(pixels, np.ones((SIDE // 8, SIDE // 8), np.uint8))[..., None], 3, -1)
    features, targets = tower_features(folder, images), np.eye(10)[data.target[:1500]]
    right = []
    for held_out in np.split(np.arange(1500), 5):
        train = np.setdiff1d(np.arange(1500), held_out)
        centre = features[train].mean(0)
        seen = features[train] - centre
        ridge = np.square(seen).sum(1).mean() * np.eye(seen.shape[1])
        weights = np.linalg.solve(seen.T @ seen + ridge, seen.T @ (targets[train] - 0.1))
        scores = (features[held_out] - centre) @ weights
        right.append((scores.argmax(1) == data.target[held_out]).mean())
    assert np.mean(right) >= 0.975, right


@pytest.mark.more
@pytest.mark.parametrize("family", ["qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"])
def test_demo_model_of_another_family_sees_the_same(family: VisionFamilyName, folder: Path, tmp_path: Path) -> None:
    other = make_demo_vl_model(tmp_path / "model", family=family)
    assert AutoConfig.from_pretrained(other).model_type == family
    images = np.random.default_rng(0).integers(0, 256, (4, SIDE, SIDE, 3), np.uint8)
    np.testing.assert_allclose(tower_features(other, images), tower_features(folder, images), atol=1e-4)
