"""What a model sees of a picture. The client, the server and programs call this one function, so they see the same."""

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from PIL.Image import Image

BITS_PER_SAMPLE = 258
"""The tag of TIFF that tells 12 bits of grey from 16, which Pillow does not."""

SCALED = ("PNG", "PPM")
"""Formats whose integers of mode I Pillow has scaled to 16 bits."""

WHITE = (255, 255, 255)


class NoAgreedRangeError(ValueError):
    """It is not known which pixels of a picture are black and white."""


def as_rgb(image: "Image") -> "Image":
    """`image` upright, opaque and with 8 bits per channel, in mode RGB.

    EXIF rotation is applied, if EXIF can be read. What is transparent is composited on white, as vLLM does. 16 bits of
    grey (modes I;16 and I) become their upper 8, as 16 bits of colour do in Pillow. Everything else is Pillow's
    `convert("RGB")`: palettes are resolved, grey is repeated, CMYK and other colours are converted.

    Raises NoAgreedRangeError for floats (mode F), and for integers of 32 bits (mode I) that are negative or exceed 16
    bits, or that 8 bits would hold, where nothing says which of both they are.
    """
    from PIL import Image

    upright = _upright(image)
    if image.mode == "F":
        raise NoAgreedRangeError("a picture of floats (mode F) has no agreed range; convert it to 8 bits")
    if image.mode.startswith("I"):
        return _from_deep_grey(upright, _bits_of(image)).convert("RGB")
    if not image.has_transparency_data:
        return upright.convert("RGB")
    rgba = upright.convert("RGBA")
    opaque = Image.new("RGB", rgba.size, WHITE)
    opaque.paste(rgba, mask=rgba.getchannel("A"))
    return opaque


def _upright(image: "Image") -> "Image":
    """Turned as EXIF says. Not by `ImageOps.exif_transpose`, which writes EXIF again and fails at tags that are
    broken."""
    from PIL import ExifTags
    from PIL.Image import Transpose

    image.load()  # an error of the pixels is none of EXIF, for which Pillow may read them
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # what Pillow's readers of broken tags raise
        return image
    turns = {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }
    return image.transpose(turns[orientation]) if orientation in turns else image


def _bits_of(image: "Image") -> int:
    """Of mode I or I;16: 12 in some TIFF files, else 16. Raises NoAgreedRangeError for mode I in another range."""
    if image.mode == "I" and image.format not in SCALED:
        values = np.asarray(image)
        low, high = int(values.min()), int(values.max())
        if low < 0 or high > 65535 or 0 < high < 256:
            raise NoAgreedRangeError(
                f"integers from {low} to {high} (mode I) have no agreed range; convert them to 8 bits (mode L), or to "
                "16 (mode I;16)"
            )
    (bits,) = getattr(image, "tag_v2", {}).get(BITS_PER_SAMPLE, (16,))
    return min(int(bits), 16)


def _from_deep_grey(image: "Image", bits: int) -> "Image":
    """The upper 8 of `bits` bits, as mode L; a transparent value becomes white."""
    from PIL import Image

    values = np.asarray(image)
    grey = (values >> (bits - 8)).astype(np.uint8)
    if (transparent := image.info.get("transparency")) is not None:
        grey[values == transparent] = 255
    return Image.fromarray(grey)
