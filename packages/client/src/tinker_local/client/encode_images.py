"""Images of any kind → `ImageChunk`: the file that is sent, and its number of positions.

Whatever reads the file must see the pixels of `tinker_local.types.as_rgb`: upright, transparency on white, 16 bits of
grey scaled to 8. Files whose pixels are already so are sent unchanged; everything else is converted here.
"""

from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from threading import Lock
from typing import Any, Literal, TypeAlias, get_args
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import PIL.Image
import tinker
from tinker_local.types import InvalidRequestError, as_rgb, image_format, open_picture

Image: TypeAlias = PIL.Image.Image | Path | bytes | bytearray | memoryview | npt.NDArray[np.uint8]
"""A PIL image; a path or the bytes of an image file that PIL reads; or pixels: uint8 [H, W], [H, W, 3] or [H, W, 4]."""

ImageFormat = Literal["png", "jpeg"]
"""Of the files that the SDK sends."""

EXIF_ORIENTATION = 0x0112
JPEG_QUALITY = 95
PNG_COMPRESS_LEVEL = 1  # takes a third of the time of PIL's default 6, for files that are 8 % larger


def image_chunk(
    image: Image, image_processor: Any = None, *, image_format: ImageFormat = "png"
) -> tinker.types.ImageChunk:
    """`image` as a chunk of the SDK. It covers the image's positions only, not the marks around them.

    A PNG or JPEG file that is RGB, opaque and not rotated by EXIF is sent unchanged, byte for byte. Everything else is
    converted by `as_rgb` and encoded as `image_format`: PNG (lossless) or JPEG (quality 95, full chroma).

    `image_processor` counts `expected_tokens` as the server does: the base model's HF processor, e.g. from
    AutoImageProcessor, which needs `merge_size`, and `get_number_of_image_patches` or `image_grid_thw` in its output;
    or its whole processor, from AutoProcessor, which writes all positions of an image. Models whose images also have
    marks of rows or tiles need the whole one. Without it, `expected_tokens` is omitted: the server counts by itself,
    but the chunk lacks the `length` that training data needs.

    Raises InvalidRequestError if `image` cannot be read, is of a kind not listed under `Image`, or is refused by the
    processor (HF: aspect ratio above 200).
    """
    return chunk_of(image, image_processor, image_format, "image")


def chunk_of(
    image: Image | npt.NDArray[Any], image_processor: Any, format: ImageFormat, where: str
) -> tinker.types.ImageChunk:
    """`image_chunk`, with `where` as the prefix of error messages."""
    if format not in get_args(ImageFormat):
        raise InvalidRequestError(f"image_format: must be 'png' or 'jpeg', not {format!r}")
    picture = _read(image, format, where)
    expected_tokens = None if image_processor is None else _count_tokens(image_processor, picture.rgb, where)
    return tinker.types.ImageChunk(data=picture.file, format=picture.format, expected_tokens=expected_tokens)


@dataclass(frozen=True, slots=True, eq=False)
class _Picture:
    """`rgb`: the pixels that the model sees. `file`: a PNG or JPEG file of them."""

    rgb: PIL.Image.Image
    file: bytes
    format: ImageFormat


def _read(image: Image | npt.NDArray[Any], format: ImageFormat, where: str) -> _Picture:
    match image:
        case PIL.Image.Image():
            return _encode(_as_rgb(image, where), format)
        case np.ndarray():
            return _encode(_as_rgb(_from_array(image, where), where), format)
        case Path():
            return _read_file(image.read_bytes(), format, f"{where} ({image})")
        case bytes() | bytearray() | memoryview():
            return _read_file(bytes(image), format, where)
    raise InvalidRequestError(
        f"{where}: an image is a PIL image, a pathlib.Path, the bytes of a file or a uint8 array, not {_name(image)}"
    )


def _read_file(data: bytes, format: ImageFormat, where: str) -> _Picture:
    try:
        opened = open_picture(data)
        opened.load()
        rgb = _as_rgb(opened, where)
    except (OSError, SyntaxError, ValueError, PIL.Image.DecompressionBombError) as error:  # what PIL's decoders raise
        start = f"{len(data)} bytes, beginning with {data[:8].hex(' ')}" if data else "0 bytes"
        raise InvalidRequestError(f"{where}: no image that can be read ({start}): {error}") from error
    found, upright = image_format(data), opened.getexif().get(EXIF_ORIENTATION, 1) == 1
    if (found == "png" or found == "jpeg") and upright and opened.mode == "RGB" and not opened.has_transparency_data:
        return _Picture(rgb, data, found)
    return _encode(rgb, format)


def _as_rgb(image: PIL.Image.Image, where: str) -> PIL.Image.Image:
    if 0 in image.size:
        raise InvalidRequestError(f"{where}: the image is empty ({image.width} x {image.height} pixels)")
    try:
        return as_rgb(image)
    except ValueError as error:
        raise InvalidRequestError(f"{where}: {error}") from error


def _from_array(array: npt.NDArray[Any], where: str) -> PIL.Image.Image:
    shape = " x ".join(map(str, array.shape))
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (3, 4)):
        raise InvalidRequestError(f"{where}: an image array must be H x W, H x W x 3 or H x W x 4, not {shape}")
    if array.dtype != np.uint8:
        raise InvalidRequestError(f"{where}: an image array ({shape}) must be uint8 from 0 to 255, not {array.dtype}")
    return PIL.Image.fromarray(np.ascontiguousarray(array))


def _encode(rgb: PIL.Image.Image, format: ImageFormat) -> _Picture:
    # Equal pixels must give equal files, because the server caches by content: drop the metadata.
    clean = PIL.Image.frombytes("RGB", rgb.size, rgb.tobytes())
    file = BytesIO()
    if format == "png":
        clean.save(file, "png", compress_level=PNG_COMPRESS_LEVEL)
    else:
        clean.save(file, "jpeg", quality=JPEG_QUALITY, subsampling=0)
    return _Picture(rgb, file.getvalue(), format)


def _count_tokens(image_processor: Any, rgb: PIL.Image.Image, where: str) -> int:
    if image_token_of(image_processor) is not None and callable(image_processor):
        return positions_of(image_processor, rgb, where)
    merge_size = getattr(image_processor, "merge_size", None)
    if merge_size is None:
        hint = "; pass its .image_processor" if hasattr(image_processor, "image_processor") else WHOLE
        raise InvalidRequestError(
            f"image_processor: {_name(image_processor)} has no merge_size, so the tokens of an image cannot be "
            f"counted{hint}"
        )
    try:
        if hasattr(image_processor, "get_number_of_image_patches"):
            patches = image_processor.get_number_of_image_patches(rgb.height, rgb.width, {})
        else:
            patches = _patches_by_running(image_processor, rgb)
    except ValueError as error:
        raise InvalidRequestError(
            f"{where}: the image processor refuses an image of {rgb.width} x {rgb.height} pixels: {error}"
        ) from error
    return int(patches) // int(merge_size) ** 2


WHOLE = "; pass the model's whole processor, from AutoProcessor"

_counts: WeakKeyDictionary[Any, dict[tuple[int, int], int]] = WeakKeyDictionary()
"""By whole processor and size of an image, on which alone the number depends."""

_one_at_a_time = Lock()
"""Processors are not known to be thread-safe."""


def image_token_of(processor: Any) -> str | None:
    """What a whole processor takes for an image in a text; None for one of images alone."""
    token = getattr(processor, "image_token", None) if hasattr(processor, "image_processor") else None
    token = getattr(token, "content", token)
    return token if isinstance(token, str) else None


def positions_of(processor: Any, rgb: PIL.Image.Image, where: str) -> int:
    """All that a whole processor writes for its token of an image, as the server counts."""
    with _one_at_a_time:
        counts = _counts.setdefault(processor, {})
        if (known := counts.get(rgb.size)) is not None:
            return known
        given = {"text": image_token_of(processor), "images": [rgb], "return_tensors": "pt"}
        try:
            ids = processor(**given, add_special_tokens=False)["input_ids"][0]
        except (ValueError, IndexError, ZeroDivisionError) as error:  # of some that cut an image into tiles
            raise InvalidRequestError(
                f"{where}: the processor refuses an image of {rgb.width} x {rgb.height} pixels: {error}"
            ) from error
        counts[rgb.size] = len(ids)
        return counts[rgb.size]


def _patches_by_running(image_processor: Any, rgb: PIL.Image.Image) -> int:
    if not callable(image_processor):
        raise InvalidRequestError(
            f"image_processor: {_name(image_processor)} neither has get_number_of_image_patches nor can be called"
        )
    processed = image_processor(images=[rgb], return_tensors="np")
    if "image_grid_thw" not in processed:
        raise InvalidRequestError(
            f"image_processor: {_name(image_processor)} has no get_number_of_image_patches and returns no "
            f"image_grid_thw (only {', '.join(sorted(processed))}), so the tokens of an image cannot be counted"
        )
    return int(np.prod(np.asarray(processed["image_grid_thw"])[0]))


def _name(value: object) -> str:
    return type(value).__name__
