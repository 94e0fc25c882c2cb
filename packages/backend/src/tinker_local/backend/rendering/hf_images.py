"""Images as the HF processor of a model gives them, for the trainer."""

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from tinker_local.backend.rendering.decoding import ImageError
from tinker_local.backend.rendering.rendered_input import ImagePositions, TrainerImage
from tinker_local.types import UnsupportedError

if TYPE_CHECKING:
    from PIL.Image import Image

OF_TEXT = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
"""What a processor gives of a text; all else is of its images."""


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


class HFProcessorImages:
    """Implements `ImageProcessor[TrainerImage]` with the whole processor of a model, which makes of one token all
    positions of an image. It is not known to be thread-safe, so it reads one image at a time."""

    def __init__(self, model: str, pad: int) -> None:
        """`model`: a folder or hub name. `pad`: the id at positions that hold features. UnsupportedError if the
        processor has no token for an image, or another one than the model."""
        self._processor = processor_of(model)
        self._pad = pad
        self._lock = threading.Lock()
        self.token = image_token(self._processor, pad, model)

    def process(self, image: "Image") -> TrainerImage:
        """ImageError if the processor refuses the image."""
        with self._lock:
            try:
                batch = self._processor(text=self.token, images=[image], return_tensors="pt", add_special_tokens=False)
            except (ValueError, IndexError, ZeroDivisionError) as error:  # of some that cut an image into tiles
                raise ImageError(f"image of {image.width}x{image.height} pixels: {error}") from error
        ids = batch["input_ids"][0].numpy().astype(np.int32)
        tensors = tensors_in(batch)
        if "pixel_values" not in tensors:
            raise ImageError(f"the model's processor makes no pixel_values, only {', '.join(tensors)}")
        pixels = tensors.pop("pixel_values")
        positions = ImagePositions(ids, ids == self._pad)
        grid = tuple(map(int, tensors["image_grid_thw"][0])) if "image_grid_thw" in tensors else (1, 1, len(ids))
        return TrainerImage(pixels, (grid[0], grid[1], grid[2]), len(ids), positions, tensors)

    def whole(self, text: str, images: "Sequence[Image]") -> Any:
        """What the processor makes of a text, in which `token` stands for each of `images`."""
        with self._lock:
            return self._processor(text=text, images=list(images) or None, return_tensors="pt")


def tensors_in(batch: Any) -> dict[str, npt.NDArray[Any]]:
    """What a processor's `batch` has of images, by name."""
    import torch

    return {
        name: value.float().numpy() if value.is_floating_point() else value.numpy()
        for name, value in batch.items()
        if name not in OF_TEXT and isinstance(value, torch.Tensor)
    }


def processor_of(model: str) -> Any:
    """transformers' processor of the model at a folder or hub name; UnsupportedError in a sentence without one."""
    from transformers import AutoProcessor

    try:
        found = AutoProcessor.from_pretrained(model)
    except Exception as error:  # of any type, by its class
        first = str(error).strip().partition("\n")[0]
        raise UnsupportedError(f"{model}: transformers makes no processor of its files ({first})") from error
    if not hasattr(found, "image_processor"):
        raise UnsupportedError(f"{model}: its files give a {type(found).__name__}, and no processor of images")
    return found


def image_token(processor: Any, pad: int, model: str) -> str:
    """What templates write for an image; UnsupportedError if it is not the token `pad`."""
    token = getattr(processor, "image_token", None)
    token = getattr(token, "content", token)
    if not isinstance(token, str):
        raise UnsupportedError(f"{model}: its {type(processor).__name__} has no image_token, which stands for an image")
    found = processor.tokenizer.convert_tokens_to_ids(token)
    if found != pad:
        raise UnsupportedError(
            f"{model}: its processor writes images as {token!r}, token {found}, and its config has {pad} for them"
        )
    return token
