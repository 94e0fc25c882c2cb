"""Only offsets say where images are: they determine positions and features, and pad ids elsewhere are text."""

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tinker_local.backend.families import FAMILIES
from tinker_local.backend.rendering.rendered_input import RenderedInput
from tinker_local.backend.training.trainer import TrainDatum, TrainWork
from tinker_local.types import InvalidRequestError

from tests.float64 import InFloat64

VISION = ("qwen2_5_vl", "qwen3_vl")
IMAGE_PAD = 111


def hf_model(path: Any) -> Any:
    return transformers.AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float64).eval()


def image_arguments(rendered: RenderedInput) -> Any:
    is_image = np.zeros(rendered.length, np.int32)
    for placement in rendered.images:
        is_image[placement.offset : placement.offset + placement.image.num_tokens] = 1
    return {
        "image_grid_thw": torch.tensor([p.image.grid_thw for p in rendered.images]),
        "mm_token_type_ids": torch.from_numpy(is_image)[None],
    }


@pytest.mark.mutation(
    "positions-after-an-image",
    "mrope_position_ids",
    "next_position += max(rows, columns)",
    "next_position += rows * columns",
)
@pytest.mark.parametrize(
    "images",
    [[(0, (4, 6))], [(3, (2, 2))], [(5, (8, 2)), (20, (2, 10)), (30, (4, 4))], [(29, (4, 14))]],
)
@pytest.mark.parametrize("family", VISION)
def test_positions_equal_those_of_transformers(family: str, images: Any, make: Any, model_path: Any) -> None:
    model = hf_model(model_path(family))
    rendered = make.input(43, images)
    token_ids = torch.from_numpy(rendered.token_ids.astype(np.int64))[None]
    expected, _ = model.model.get_rope_index(token_ids, **image_arguments(rendered))
    ours = FAMILIES[family].position_ids(model.config, rendered)
    np.testing.assert_array_equal(ours, expected[:, 0])


@pytest.mark.mutation(
    "pad-ids-found-by-the-trainer",
    "packed_row",
    "to_device(part.image_rows, device)",
    "to_device(np.flatnonzero(part.packed.token_ids == loaded.model.config.image_token_id)"
    "[: len(part.image_rows)], device)",
)
@pytest.mark.parametrize("family", VISION)
def test_a_pad_id_that_came_as_text_is_text(family: str, make: Any, trainer: Any, model_path: Any) -> None:
    """Compare text with stray pads before, between and after images with embeddings assembled by hand."""
    ours = trainer(family, dtype="float64")
    rendered = make.input(40, [(6, (4, 6)), (22, (2, 4))])
    for position in (0, 3, 4, 14, 30, 39):
        rendered.token_ids[position] = IMAGE_PAD
    model = hf_model(model_path(family))
    with torch.no_grad(), InFloat64():
        embeds = model.get_input_embeddings()(torch.from_numpy(rendered.token_ids.astype(np.int64)))[None]
        is_image = image_arguments(rendered)["mm_token_type_ids"].bool()
        pixels = torch.from_numpy(np.concatenate([p.image.pixel_values for p in rendered.images]))
        features = model.model.visual(pixels, grid_thw=image_arguments(rendered)["image_grid_thw"])
        embeds[is_image] = features.pooler_output
        positions, _ = model.model.get_rope_index(is_image.long() * IMAGE_PAD, **image_arguments(rendered))
        arguments = {"inputs_embeds": embeds, "position_ids": positions}
        if family == "qwen3_vl":
            arguments["visual_pos_masks"] = is_image
            arguments["deepstack_visual_embeds"] = features.deepstack_features
        logits = model.lm_head(model.model.language_model(**arguments).last_hidden_state[0])
        expected = logits.log_softmax(-1)[torch.arange(39), torch.from_numpy(rendered.token_ids[1:].astype(np.int64))]
        found = ours.logprobs(None, rendered)
    np.testing.assert_allclose(found, expected, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("family", VISION)
def test_pad_ids_in_pure_text_are_text(family: str, make: Any, trainer: Any, model_path: Any) -> None:
    rendered = make.input(20)
    rendered.token_ids[[0, 5, 6, 19]] = IMAGE_PAD
    model = hf_model(model_path(family))
    token_ids = torch.from_numpy(rendered.token_ids.astype(np.int64))
    with torch.no_grad(), InFloat64():
        expected = model(input_ids=token_ids[None]).logits[0].log_softmax(-1)[torch.arange(19), token_ids[1:]]
        found = trainer(family, dtype="float64").logprobs(None, rendered)
    np.testing.assert_allclose(found, expected, rtol=1e-7, atol=1e-7)


@pytest.mark.mutation(
    "image-encoded-for-every-datum",
    "_placements",
    "((own, placed.image.content_hash)",
    "((own, f'{placed.image.content_hash}/{item.index}')",
)
@pytest.mark.parametrize("family", VISION)
def test_an_image_is_encoded_once_per_content(
    family: str, make: Any, trainer: Any, add_adapter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = trainer(family)
    add_adapter(ours, "a")
    encoded = []
    original = ours._loaded.model.model.get_image_features

    def counted(pixels: Any, grid: Any, **options: Any) -> Any:
        encoded.extend(grid.tolist())
        return original(pixels, grid, **options)

    monkeypatch.setattr(ours._loaded.model.model, "get_image_features", counted)
    image, other = make.image(4, 4), make.image(2, 4)
    group = [make.datum(20 + i, [(2, image)]) for i in range(16)]
    ours.forward_backward([TrainWork("a", [*group, make.datum(12, [(1, other), (4, image)])], "cross_entropy")])
    assert sorted(encoded) == [[1, 2, 4], [1, 4, 4]]
    ours.logprobs("a", group[0].input)
    assert len(encoded) == 2


def test_cached_features_change_nothing_and_are_bounded(
    make: Any, trainer: Any, add_adapter: Any, gradients: Any, assert_close: Any
) -> None:
    images = [make.image(4, 4) for _ in range(6)]
    data = [make.datum(12, [(2, image)]) for image in images] + [make.datum(20, [(1, images[4]), (9, images[0])])]
    seen = []
    for kept_bytes in (0, 2 * 3 * 4 * 32 * 8, 2**28):  # nothing, two images' embeds and two deepstack levels, all
        ours = trainer("qwen3_vl", image_cache_bytes=kept_bytes, dtype="float64")
        add_adapter(ours, "a")
        for _ in range(2):
            (result,) = ours.forward_backward([TrainWork("a", data, "cross_entropy")])
        seen.append((result.metrics["loss:sum"], gradients(ours, "a")))
        cache = ours._runner._images
        assert cache._kept.currsize <= kept_bytes
        assert len(cache._kept) == {0: 0, 2**28: 6}.get(kept_bytes, 2)
    for loss, gradient in seen[:-1]:
        assert loss == pytest.approx(seen[-1][0], rel=1e-9)
        assert_close(gradient, seen[-1][1], 1e-9)


def test_images_for_a_text_model_fail_their_own_request(make: Any, trainer: Any, add_adapter: Any) -> None:
    ours = trainer("qwen3")
    add_adapter(ours, "a")
    bad = TrainDatum(make.input(12, [(2, (4, 4))]), np.zeros(12, np.int64), {"weights": np.ones(12, np.float32)})
    good, refused = ours.forward_backward([make.work("a", [5]), TrainWork("a", [make.datum(3), bad], "cross_entropy")])
    assert "loss:sum" in good.metrics
    assert isinstance(refused, InvalidRequestError)
    assert "data[1].model_input" in str(refused)
