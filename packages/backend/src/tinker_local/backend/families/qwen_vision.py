"""What the Qwen vision-language families share: image tokens, image processor, rotary positions, vision tower."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from tinker_local.backend.families.family import ImageFeatures, Positions, Vision
from tinker_local.backend.rendering.rendered_input import ImageTokens, RenderedImage, RenderedInput, TrainerImage


def mrope_position_ids(config: Any, input: RenderedInput) -> Positions:
    """Rows for time, height and width, int64 [3, N] (arXiv 2409.12191, section 2.1).

    Text advances all rows by 1. An image that begins at position p has time p for all its tokens, height p + row and
    width p + column; the text after it continues at p + max(rows, columns). Only `input.images` says where images are.
    """
    positions = np.empty((3, input.length), np.int64)
    done, next_position = 0, 0
    for placement in sorted(input.images, key=lambda placement: placement.offset):
        text = placement.offset - done
        positions[:, done : placement.offset] = next_position + np.arange(text)
        next_position += text
        frames, rows, columns = _merged_grid(placement.image, config.vision_config.spatial_merge_size)
        done = placement.offset + placement.image.num_tokens
        grid = np.indices((frames, rows, columns)).reshape(3, -1)
        positions[:, placement.offset : done] = next_position + grid
        next_position += max(rows, columns)
    positions[:, done:] = next_position + np.arange(input.length - done)
    return positions


def without_sections(config: Any) -> str:
    """Why vLLM turns heads otherwise than transformers: it asks the config alone whether positions have rows and
    columns, and transformers' classes have a default. Empty if the config says it."""
    if "mrope_section" in (config.get_text_config().rope_parameters or {}):
        return ""
    return (
        "rope_parameters has no mrope_section, by which heads are divided between time, rows and columns: transformers "
        "has a default, and vLLM turns heads by the place in the prompt alone"
    )


def _merged_grid(image: RenderedImage, merge: int) -> tuple[int, int, int]:
    """Tokens of an image in time, height and width."""
    frames, patch_rows, patch_columns = image.grid_thw
    grid = frames, patch_rows // merge, patch_columns // merge
    if np.prod(grid) != image.num_tokens:
        raise ValueError(
            f"an image of grid {list(image.grid_thw)} takes {np.prod(grid)} tokens, not {image.num_tokens}"
        )
    return grid


def _image_tokens(config: Any) -> ImageTokens:
    return ImageTokens(config.vision_start_token_id, config.image_token_id, config.vision_end_token_id)


def _read_image(processor: Any, batch: Any) -> TrainerImage:
    """The only image of `batch`. Squares of `merge_size` patches per side become one position."""
    time, height, width = batch["image_grid_thw"][0].tolist()
    num_tokens = time * height * width // processor.merge_size**2
    return TrainerImage(batch["pixel_values"].numpy(), (time, height, width), num_tokens)


def _encode_images(model: Any, images: Sequence[RenderedImage]) -> ImageFeatures:
    """Run the vision tower once over `images`; returns features in their order."""
    import torch

    device = model.get_input_embeddings().weight.device
    pixels = torch.from_numpy(np.concatenate([image.pixel_values for image in images])).to(device)
    grid = torch.tensor([image.grid_thw for image in images], dtype=torch.int64, device=device)
    output = model.model.get_image_features(pixels, grid, return_dict=True)
    deepstack = getattr(output, "deepstack_features", None) or ()
    levels = tuple(map(_joined, deepstack))
    return ImageFeatures(_joined(output.pooler_output), levels, tuple(range(len(levels))))


def _arguments(images: Sequence[RenderedImage], is_image: Any) -> dict[str, Any]:
    import torch

    pixels = torch.from_numpy(np.concatenate([image.pixel_values for image in images]))
    return {
        "pixel_values": pixels.to(is_image.device),
        "image_grid_thw": torch.tensor([image.grid_thw for image in images], device=is_image.device),
        "mm_token_type_ids": is_image,
    }


def _joined(features: Any) -> Any:
    """Features of all images in one tensor. transformers returns one per image; 5.17 returns some already joined."""
    import torch

    return features if isinstance(features, torch.Tensor) else torch.cat(tuple(features))


VISION = Vision(
    tower="model.visual",
    vllm_tower="visual",
    tokens=_image_tokens,
    read_image=_read_image,
    encode_images=_encode_images,
    arguments=_arguments,
)
