"""From the bytes of an image file to the RGB image that both vLLM and the HF processor get."""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tinker_local.backend.heap import give_memory_back
from tinker_local.types import as_rgb, open_picture
from tinker_local.types.pictures import MAX_PIXELS, NoAgreedRangeError, TooManyScansError

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
"""Pillow's names of those that are read."""


class ImageError(ValueError):
    """Why an image cannot be used. The client sees the message after the name of the field."""


class PixelBudget:
    """Bounds the pixels of the images that threads decode and process at one time. A larger image goes alone."""

    def __init__(self, pixels: int) -> None:
        self._pixels = pixels
        self._changed = threading.Condition()
        self.in_flight = 0

    @contextmanager
    def taken(self, pixels: int) -> Iterator[None]:
        """Wait until there is room for an image of `pixels`, and keep it within this context."""
        with self._changed:
            self._changed.wait_for(lambda: not self.in_flight or self.in_flight + pixels <= self._pixels)
            self.in_flight += pixels
        try:
            yield
        finally:
            with self._changed:
                self.in_flight -= pixels
                self._changed.notify_all()
            if pixels >= LARGE_IMAGE:
                give_memory_back()


IN_FLIGHT = PixelBudget(MAX_PIXELS)
"""Of this process, whatever the models: an image takes about 20 bytes for each pixel."""

LARGE_IMAGE = 4 * 2**20
"""Pixels of an image whose memory goes back to the operating system at once."""


def image_size(data: bytes) -> tuple[int, int]:
    """Width and height in pixels from the header, before any rotation. Raises ImageError."""
    opened = _open(data)
    return opened.width, opened.height


def decode_image(data: bytes, max_pixels: int = MAX_PIXELS) -> "Image":
    """The pixels of `tinker_local.types.as_rgb`: upright, transparency on white, 16 bits of grey scaled to 8. The first
    frame of an animation.

    Raises ImageError for anything but a whole PNG, JPEG, WebP or GIF, and for more than `max_pixels` (read from the
    header, before any pixel is decoded).
    """
    opened = _open(data)
    size = f"image of {opened.width}x{opened.height} pixels"
    if opened.width * opened.height > max_pixels:
        raise ImageError(f"{size}: {opened.width * opened.height} pixels exceed the limit of {max_pixels}")
    try:
        return as_rgb(opened)
    except NoAgreedRangeError as error:
        raise ImageError(f"{size}: {error}") from error
    except Exception as error:
        raise ImageError(f"{size} cannot be decoded: its data are cut off or damaged") from error


def _open(data: bytes) -> "Image":
    """The image with its header read and no pixel decoded."""
    from PIL import Image

    try:
        return open_picture(data, FORMATS)
    except TooManyScansError as error:
        raise ImageError(str(error)) from None
    except Image.DecompressionBombError as error:
        pixels = re.findall(r"\d+", str(error))[0]  # which nothing else tells of an image that Pillow does not open
        limit = 2 * (Image.MAX_IMAGE_PIXELS or 0)
        raise ImageError(f"image of {pixels} pixels: no option allows more than {limit}") from error
    except Exception as error:  # PIL documents no closed set of what broken files raise
        raise ImageError(f"{len(data)} bytes that are not a readable PNG, JPEG, WebP or GIF file") from error
