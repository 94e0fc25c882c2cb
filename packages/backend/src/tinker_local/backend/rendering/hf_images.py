"""Images as the HF processor of a model gives them, for the trainer."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tinker_local.backend.rendering.decoding import ImageError
from tinker_local.backend.rendering.rendered_input import TrainerImage

if TYPE_CHECKING:
    from PIL.Image import Image


class HFImages:
    """Implements `ImageProcessor[TrainerImage]` with the image processor of a model.

    `read(processor, batch)`: the image in what the processor returns for one; the model's family knows how.
    """

    def __init__(self, model: str, read: Callable[[Any, Any], TrainerImage]) -> None:
        """`model`: a folder or hub name."""
        from transformers import AutoImageProcessor

        self._processor: Any = AutoImageProcessor.from_pretrained(model)
        self._read = read

    def process(self, image: "Image") -> TrainerImage:
        """ImageError if the processor refuses the image (Qwen's: an aspect ratio of 200 or more)."""
        try:
            batch = self._processor(images=[image], return_tensors="pt")
        except ValueError as error:
            raise ImageError(f"image of {image.width}x{image.height} pixels: {error}") from error
        return self._read(self._processor, batch)
