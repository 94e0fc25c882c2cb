"""Files become the RGB image that HF's `load_image` would give, or are refused with the reason and the numbers."""

import io
import struct
import threading
import tracemalloc
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tinker_local.backend.rendering.decoding import ImageError, PixelBudget, decode_image


def load_with_hf(data: bytes) -> Image.Image:
    from transformers.image_utils import load_image

    result: Image.Image = load_image(Image.open(io.BytesIO(data)))
    return result


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "P", "LA", "1"])
def test_png_modes_are_what_hf_makes_of_them(pictures: Any, mode: str) -> None:
    image = pictures.noise(40, 30, mode) if mode != "1" else pictures.noise(40, 30, "L").convert("1")
    data = pictures.file(image)
    assert Image.open(io.BytesIO(data)).mode == mode
    decoded = decode_image(data)
    assert decoded.mode == "RGB"
    assert np.array_equal(np.asarray(decoded), np.asarray(load_with_hf(data)))


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_jpeg_modes_are_what_hf_makes_of_them(pictures: Any, mode: str) -> None:
    data = pictures.file(pictures.noise(40, 30, "RGB").convert(mode), "JPEG")
    assert np.array_equal(np.asarray(decode_image(data)), np.asarray(load_with_hf(data)))


def test_a_palette_with_a_transparent_colour_keeps_its_colours(pictures: Any) -> None:
    data = pictures.file(pictures.noise(40, 30, "P"), transparency=3)
    assert np.array_equal(np.asarray(decode_image(data)), np.asarray(load_with_hf(data)))


@pytest.mark.mutation(
    "rotation-ignored", "decoding.py", 'ImageOps.exif_transpose(opened).convert("RGB")', 'opened.convert("RGB")'
)
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_rotation_is_applied_as_hf_does(pictures: Any, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    for file_format in ("JPEG", "PNG"):
        data = pictures.file(pictures.noise(40, 30), file_format, exif=exif)
        decoded = decode_image(data)
        assert decoded.size == ((30, 40) if orientation >= 5 else (40, 30))
        assert np.array_equal(np.asarray(decoded), np.asarray(load_with_hf(data)))


def test_the_first_frame_of_an_animation_counts(pictures: Any) -> None:
    first, second = pictures.noise(20, 20, seed=1), pictures.noise(20, 20, seed=2)
    data = pictures.file(first, save_all=True, append_images=[second])
    assert np.array_equal(np.asarray(decode_image(data)), np.asarray(first))


def png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_header(width: int, height: int) -> bytes:
    """A PNG file that promises that many pixels of RGB and holds next to none."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = png_chunk(b"IDAT", zlib.compress(bytes(100)))
    return b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", header) + data + png_chunk(b"IEND", b"")


@pytest.mark.mutation(
    "any-number-of-pixels", "decoding.py", "if opened.width * opened.height > max_pixels:", "if False:"
)
@pytest.mark.parametrize(
    ("width", "height", "limit", "message"),
    [
        (10_000, 10_000, 64_000_000, "10000x10000 pixels: 100000000 pixels exceed the limit of 64000000"),
        (100, 101, 10_000, "100x101 pixels: 10100 pixels exceed the limit of 10000"),
        (60_000, 60_000, 64_000_000, "3600000000 pixels"),
    ],
)
def test_an_image_of_too_many_pixels_is_refused_from_its_header(
    width: int, height: int, limit: int, message: str
) -> None:
    data = png_header(width, height)
    assert len(data) < 1000
    tracemalloc.start()
    try:
        with pytest.raises(ImageError, match=message):
            decode_image(data, limit)
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()


def test_an_image_of_as_many_pixels_as_the_limit_is_decoded(pictures: Any) -> None:
    assert decode_image(pictures.file(pictures.noise(100, 100)), 10_000).size == (100, 100)


@pytest.mark.parametrize("format", ["PNG", "JPEG"])
@pytest.mark.parametrize("share", [0.02, 0.5, 0.9])
def test_a_truncated_file_is_refused(pictures: Any, format: str, share: float) -> None:
    data = pictures.file(pictures.noise(100, 80), format)
    with pytest.raises(ImageError):
        decode_image(data[: int(len(data) * share)])


def test_what_is_no_image_is_refused(pictures: Any) -> None:
    for data in (b"", b"hello", b"\x89PNG\r\n\x1a\n" + bytes(100), b"\xff\xd8\xff" + bytes(100), b"GIF89a" + bytes(50)):
        with pytest.raises(ImageError, match="not a readable PNG or JPEG file"):
            decode_image(data)
    with pytest.raises(ImageError, match="not a readable PNG or JPEG file"):
        decode_image(pictures.file(pictures.noise(10, 10), "GIF"))


def test_damaged_pixels_are_refused(pictures: Any) -> None:
    data = bytearray(pictures.file(pictures.noise(100, 80)))
    data[len(data) // 2] ^= 0xFF
    with pytest.raises(ImageError, match="100x80 pixels cannot be decoded"):
        decode_image(bytes(data))


def test_16_bits_of_grey_are_refused_because_pil_would_clip_them_to_white() -> None:
    buffer = io.BytesIO()
    Image.fromarray(np.full((10, 10), 30_000, np.uint16)).save(buffer, "PNG")
    with pytest.raises(ImageError, match=r"10x10 pixels: mode I;16 .* send 8 bits per channel"):
        decode_image(buffer.getvalue())


@pytest.mark.mutation("scans-without-bound", "decoding.py", "MAX_SCANS = 64\n", "MAX_SCANS = 10**9\n")
def test_a_jpeg_of_many_scans_is_refused_before_its_pixels_are_decoded(pictures: Any) -> None:
    """Each scan is a pass over all pixels: 300 KB took a thread for 110 seconds."""
    data = pictures.file(pictures.noise(64, 48), "JPEG", progressive=True)
    assert decode_image(data).size == (64, 48)
    last = data[data.rfind(b"\xff\xda") : -2]
    with pytest.raises(ImageError, match=r"a JPEG of \d+ scans, the limit is 64"):
        decode_image(data[:-2] + last * 64 + data[-2:])


@pytest.mark.mutation(
    "pixels-in-flight",
    "decoding.py",
    "not self.in_flight or self.in_flight + pixels <= self._pixels",
    "True",
)
def test_images_wait_while_others_fill_the_budget_of_pixels_and_a_larger_one_goes_alone() -> None:
    budget, seen = PixelBudget(100), []

    def one(pixels: int) -> None:
        with budget.taken(pixels):
            seen.append(budget.in_flight)
            threading.Event().wait(0.01)

    threads = [threading.Thread(target=one, args=(pixels,)) for pixels in [60, 30, 250, 10, 80, 40] * 3]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert budget.in_flight == 0
    assert len(seen) == 18
    assert all(pixels <= 100 or pixels == 250 for pixels in seen)


def test_the_budget_is_free_again_after_an_image_that_cannot_be_decoded() -> None:
    budget = PixelBudget(100)
    with pytest.raises(ImageError), budget.taken(80):
        raise ImageError("broken")
    with budget.taken(100):
        assert budget.in_flight == 100
