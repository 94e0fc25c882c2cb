"""What a model sees of a picture. The client, the server and programs call this one function, so they see the same."""

import io
import re
import zlib
from typing import TYPE_CHECKING

import numpy as np
from tinker_local.types.datum import PNG_MAGIC

if TYPE_CHECKING:
    from PIL.Image import Image

BITS_PER_SAMPLE = 258
"""The tag of TIFF that tells 12 bits of grey from 16, which Pillow does not."""

SCALED = ("PNG", "PPM")
"""Formats whose integers of mode I Pillow has scaled to 16 bits."""

WHITE = (255, 255, 255)

MAX_PIXELS = 64 * 2**20
"""Default limit of width × height of an image in a server."""

MAX_SCANS = 64
"""Of a progressive JPEG, each of which is a pass over all pixels, whatever its bytes; encoders write about ten."""

_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")
"""A marker of a JPEG; in the data of a scan, other bytes behind 0xff belong to them."""
_ALONE, _END, _SCAN = {0x01, 0xD8}, 0xD9, 0xDA
"""Second bytes of markers: of those without a segment, of the end, and of the beginning of a scan."""

UNSEEN = (b"tEXt", b"zTXt", b"iTXt", b"iCCP")
"""Chunks of a PNG that Pillow reads and `as_rgb` makes nothing of, but for texts with a rotation."""

ROTATIONS = (b"Raw profile type exif", b"XML:com.adobe.xmp")
"""Keywords of texts in which Pillow looks for a rotation."""

READ_TEXT = 2**25
"""Bytes of such a text in a PNG: Pillow takes 64 MiB of texts, and two are read."""

INFLATED_TEXT = 2**20
"""Bytes that a compressed one may have become, as in Pillow."""


class NoAgreedRangeError(ValueError):
    """It is not known which pixels of a picture are black and white."""


class TooManyScansError(ValueError):
    """A JPEG has more than `MAX_SCANS`."""


def open_picture(data: bytes, formats: tuple[str, ...] | None = None) -> "Image":
    """Pillow's `Image.open` of a file's bytes: its header is read, and no pixel. `formats`: Pillow's names; None: all.

    Texts and colour profiles of a PNG are left out: `as_rgb` sees nothing of them, and Pillow refuses files in which
    they are long, as those of programs that keep a whole workflow there. Raises what Pillow raises, and
    TooManyScansError.
    """
    from PIL import Image

    opened = Image.open(io.BytesIO(_without_texts(data)), formats=formats)
    if opened.format in ("JPEG", "MPO") and (scans := _scans(data)) > MAX_SCANS:
        raise TooManyScansError(f"a JPEG of {scans} scans, the limit is {MAX_SCANS}; save it again, or as PNG")
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


def _without_texts(data: bytes) -> bytes:
    """A PNG without `UNSEEN`, except for the first text with each of `ROTATIONS`; other files as they are."""
    kept, start, at = [], 0, len(PNG_MAGIC)
    rotations = {*ROTATIONS}
    while data.startswith(PNG_MAGIC) and at + 8 <= len(data):
        kind, text = data[at + 4 : at + 8], at + 8
        end = text + int.from_bytes(data[at : at + 4], "big") + 4
        if kind in UNSEEN and end <= len(data):
            keyword = data[text : min(text + 80, end)].partition(b"\0")[0]
            first = keyword in rotations
            rotations.discard(keyword)
            if not (first and _is_short(kind, data[text + len(keyword) + 1 : end - 4])):
                kept.append(data[start:at])
                start = end
        at = len(data) if kind == b"IEND" else end
    return b"".join((*kept, data[start:])) if kept else data


def _is_short(kind: bytes, text: bytes) -> bool:
    """Whether Pillow reads the `text` of a chunk, which follows its keyword."""
    if kind == b"zTXt":
        packed = text[1:]
    elif kind == b"iTXt" and text[:1] == b"\1":
        packed = text[2:].split(b"\0", 2)[-1]  # behind a language and a translated keyword
    else:
        return len(text) <= READ_TEXT
    inflating = zlib.decompressobj()
    try:
        inflating.decompress(packed, INFLATED_TEXT)
    except zlib.error:
        return True  # Pillow takes it as empty
    return not inflating.unconsumed_tail


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
