"""The mosaic model: random, small, its tower tells where colours are, and its text looks at images."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from tinker_local.backend.cli.tiny_model import tiny_model
from tinker_local.backend.tiny_models import make_demo_vl_model, make_mosaic_vl_model
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_mosaic_vl_model(tmp_path_factory.mktemp("models") / "mosaic")


def read(folder: Path, images: list[np.ndarray]) -> tuple[Any, torch.Tensor]:
    """The model and what its tower makes of the images, [n, width]."""
    model = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager")
    batch = AutoImageProcessor.from_pretrained(folder)(images=images, return_tensors="pt")
    assert batch["image_grid_thw"].tolist() == [[1, 1, 1]] * len(images)
    with torch.no_grad():
        found = model.model.get_image_features(batch["pixel_values"], batch["image_grid_thw"], return_dict=True)
    parts = found.pooler_output
    features = parts if isinstance(parts, torch.Tensor) else torch.cat(tuple(parts))
    assert features.shape == (len(images), model.config.text_config.hidden_size)
    return model, features


def test_mosaic_reads_an_image_as_one_token_and_grey_as_nothing(folder: Path) -> None:
    greys = [np.full((side, side, 3), level, np.uint8) for side, level in ((32, 20), (30, 128), (40, 250))]
    coloured = np.full((30, 30, 3), 128, np.uint8)
    coloured[6:12, 6:12, 0] = 230
    _, features = read(folder, [*greys, coloured])
    assert (features[:3] - features[0]).abs().max() < 0.01
    assert (features[3] - features[0]).norm() > features[0].norm() / 2


def test_where_a_colour_is_can_be_read_off_the_mosaic_by_a_linear_map(folder: Path) -> None:
    rng = np.random.default_rng(0)
    places = rng.integers(0, 26, (500, 2, 2))
    images = np.full((500, 32, 32, 3), 128, np.uint8)
    for image, ((y, x), (v, u)) in zip(images, places, strict=True):
        image[v : v + 6, u : u + 6] = (30, 30, 230)
        image[y : y + 6, x : x + 6] = (230, 30, 30)
    _, features = read(folder, list(images))
    inputs = np.c_[features.numpy(), np.ones(500)]
    red = places[:, 0].astype(float)
    fit = np.linalg.lstsq(inputs[:400], red[:400], rcond=None)[0]
    assert np.abs(inputs[400:] @ fit - red[400:]).mean() < 1


def test_text_looks_at_images_and_most_at_the_newest(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model, features = read(folder, [np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)])
    turn = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|><|im_end|>\n<|im_start|>assistant\n"
    ids = torch.tensor([tokenizer.encode(turn * 3)])
    (images,) = (ids[0] == model.config.image_token_id).nonzero(as_tuple=True)
    with torch.no_grad():
        embeddings = model.get_input_embeddings()(ids)
        embeddings[0, images] = features
        answer = model.model.language_model(inputs_embeds=embeddings, output_attentions=True)
    weights = answer.attentions[0][0, :, -1].mean(0)  # of the last position, over the heads
    assert weights[images].sum() > 5 * len(images) / ids.shape[1]
    assert weights[images[2]] > weights[images[0]]


def test_a_preset_of_a_vision_model_is_refused_for_text(tmp_path: Path) -> None:
    out = tmp_path / "model"
    done = CliRunner().invoke(tiny_model, ["--kind", "text", "--preset", "mosaic", "--out", str(out)])
    assert done.exit_code == 2
    assert "--preset mosaic: only for --kind qwen3_vl, not text" in done.output
    assert not out.exists()


def test_the_demos_preset_is_refused_for_another_vision_tower(tmp_path: Path) -> None:
    out = tmp_path / "model"
    done = CliRunner().invoke(tiny_model, ["--kind", "qwen2_5_vl", "--preset", "demo", "--out", str(out)])
    assert done.exit_code == 2
    assert "--preset demo: only for --kind qwen3_vl, qwen3_vl_moe, qwen3_5, qwen3_5_moe, not" in done.output
    with pytest.raises(ValueError, match="qwen2_5_vl has another one"):
        make_demo_vl_model(out, family="qwen2_5_vl")
    assert not out.exists()
