"""Images as the HF processor of a model gives them; what the trainer reads."""

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from tinker_local.backend.rendering.decoding import ImageError

if TYPE_CHECKING:
    from PIL.Image import Image


class HFImages:
    """The image processor of a model (a folder or hub name). Safe to call from several threads at once."""

    def __init__(self, model: str) -> None:
        from transformers import AutoImageProcessor

        self._processor: Any = AutoImageProcessor.from_pretrained(model)
        self._merged_patches: int = self._processor.merge_size**2

    def process(self, image: "Image") -> tuple[npt.NDArray[np.float32], tuple[int, int, int]]:
        """`pixel_values` float32 [patches, patch_dim] and the grid of patches (time, height, width).

        Raises ImageError where the processor refuses the image (aspect ratio of 200 or more).
        """
        try:
            batch = self._processor(images=[image], return_tensors="pt")
        except ValueError as error:
            raise ImageError(f"image of {image.width}x{image.height} pixels: {error}") from error
        time, height, width = batch["image_grid_thw"][0].tolist()
        return batch["pixel_values"].numpy(), (time, height, width)

    def num_tokens(self, grid_thw: tuple[int, int, int]) -> int:
        """Positions that an image of that grid takes: patches are merged in squares."""
        time, height, width = grid_thw
        return time * height * width // self._merged_patches
