"""From the bytes of a PNG or JPEG file to the RGB image that both vLLM and the HF processor get."""

import io
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tinker_local.backend.heap import give_memory_back
from tinker_local.types import as_rgb
from tinker_local.types.pictures import NoAgreedRangeError

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_PIXELS = 64 * 2**20
"""Default limit of width × height of an image."""

MAX_SCANS = 64
"""Of a progressive JPEG, each of which is a pass over all pixels, whatever its bytes; encoders write about ten."""

_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")
"""A marker of a JPEG; in the data of a scan, other bytes behind 0xff belong to them."""
_ALONE, _END, _SCAN = {0x01, 0xD8}, 0xD9, 0xDA
"""Second bytes of markers: of those without a segment, of the end, and of the beginning of a scan."""


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

    Raises ImageError for anything but a whole PNG or JPEG, and for more than `max_pixels` (read from the header, before
    any pixel is decoded).
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
        opened = Image.open(io.BytesIO(data), formats=("PNG", "JPEG"))
    except Image.DecompressionBombError as error:
        pixels = re.findall(r"\d+", str(error))[0]  # which nothing else tells of an image that Pillow does not open
        limit = 2 * (Image.MAX_IMAGE_PIXELS or 0)
        raise ImageError(f"image of {pixels} pixels: no option allows more than {limit}") from error
    except Exception as error:  # PIL documents no closed set of what broken files raise
        raise ImageError(f"{len(data)} bytes that are not a readable PNG or JPEG file") from error
    if opened.format != "PNG" and (scans := _scans(data)) > MAX_SCANS:
        raise ImageError(f"a JPEG of {scans} scans, the limit is {MAX_SCANS}; save it again, or as PNG")
    return opened


def _scans(data: bytes) -> int:
    """How many scans a JPEG has. What is in its metadata does not count, as a thumbnail's, nor what comes behind its
    end, as the video of a motion photo."""
    at, scans = 0, 0
    while found := _MARKER.search(data, at):
        at, kind = found.end(), data[found.end() - 1]
        if kind == _END:
            break
        if kind not in _ALONE:
            at += int.from_bytes(data[at : at + 2], "big")
        scans += kind == _SCAN
    return scans
