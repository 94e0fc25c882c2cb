"""What the Qwen vision-language families share: multimodal rotary positions and the call of the vision tower."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from tinker_local.backend.families.interface import ImageFeatures, Positions
from tinker_local.backend.rendering.interface import RenderedImage, RenderedInput


def mrope_position_ids(config: Any, input: RenderedInput) -> Positions:
    """Rows for time, height and width, int64 [3, N] (arXiv 2409.12191, section 2.1).

    Text counts up alike in all rows. An image that begins at position p has time p for all its tokens, height
    p + row and width p + column; what follows goes on at p + max(rows, columns). Where images are is told by
    `input.images` alone.
    """
    merge = config.vision_config.spatial_merge_size
    positions = np.empty((3, input.length), np.int64)
    done, next_position = 0, 0
    for placement in sorted(input.images, key=lambda placement: placement.offset):
        text = placement.offset - done
        positions[:, done : placement.offset] = next_position + np.arange(text)
        next_position += text
        frames, rows, columns = _merged_grid(placement.image, merge)
        done = placement.offset + placement.image.num_tokens
        grid = np.indices((frames, rows, columns)).reshape(3, -1)
        positions[:, placement.offset : done] = next_position + grid
        next_position += max(rows, columns)
    positions[:, done:] = next_position + np.arange(input.length - done)
    return positions


def _merged_grid(image: RenderedImage, merge: int) -> tuple[int, int, int]:
    """Tokens of an image in time, height and width."""
    frames, patch_rows, patch_columns = image.grid_thw
    grid = frames, patch_rows // merge, patch_columns // merge
    if np.prod(grid) != image.num_tokens:
        raise ValueError(
            f"an image of grid {list(image.grid_thw)} takes {np.prod(grid)} tokens, not {image.num_tokens}"
        )
    return grid


def encode_images(model: Any, images: Sequence[RenderedImage]) -> ImageFeatures:
    """Run the vision tower once over `images`; features in their order."""
    import torch

    device = model.get_input_embeddings().weight.device
    pixels = torch.from_numpy(np.concatenate([image.pixel_values for image in images])).to(device)
    grid = torch.tensor([image.grid_thw for image in images], dtype=torch.int64, device=device)
    with torch.no_grad():
        output = model.model.get_image_features(pixels, grid, return_dict=True)
    deepstack = getattr(output, "deepstack_features", None) or ()
    return ImageFeatures(embeds=_joined(output.pooler_output), deepstack=tuple(map(_joined, deepstack)))


def _joined(features: Any) -> Any:
    """Features of all images in one tensor. transformers gives them image by image; 5.17 gives some in one already."""
    import torch

    return features if isinstance(features, torch.Tensor) else torch.cat(tuple(features))
