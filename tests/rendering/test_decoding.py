"""Files become the RGB image that users see in a viewer, or are refused with the reason and the numbers."""

import io
import struct
import threading
import tracemalloc
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image
from PIL.Image import Transpose
from tinker_local.backend.rendering.decoding import ImageError, PixelBudget, decode_image
from tinker_local.types import as_rgb

from tests.traced import start_tracing


def load_with_hf(data: bytes) -> Image.Image:
    from transformers.image_utils import load_image

    result: Image.Image = load_image(Image.open(io.BytesIO(data)))
    return result


def load_with_vllm(data: bytes) -> Image.Image:
    """What `vllm serve` shows its models."""
    from vllm.multimodal.media.image import ImageMediaIO

    result: Image.Image = ImageMediaIO().load_bytes(data).media
    return result


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "1"])
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


def transparent_files(pictures: Any) -> dict[str, bytes]:
    """By kind, PNG files with transparent pixels."""
    grey, colours = pictures.noise(40, 30, "L"), pictures.noise(40, 30, "RGB")
    colours.putpixel((0, 0), (1, 2, 3))
    return {
        "RGBA": pictures.file(pictures.noise(40, 30, "RGBA")),
        "LA": pictures.file(pictures.noise(40, 30, "LA")),
        "P with one transparent colour": pictures.file(pictures.noise(40, 30, "P"), transparency=3),
        "P with an alpha for each colour": pictures.file(pictures.noise(40, 30, "P"), transparency=bytes(range(256))),
        "L with a transparent value": pictures.file(grey, transparency=grey.getpixel((0, 0))),
        "RGB with a transparent colour": pictures.file(colours, transparency=(1, 2, 3)),
        "1 with a transparent value": pictures.file(grey.convert("1"), transparency=0),
    }


def on_white(data: bytes) -> npt.NDArray[np.uint8]:
    rgba = np.asarray(Image.open(io.BytesIO(data)).convert("RGBA"), np.float64)
    alpha = rgba[..., 3:] / 255
    return np.rint(rgba[..., :3] * alpha + 255 * (1 - alpha)).astype(np.uint8)


def test_transparent_pixels_show_white_and_not_the_colours_hidden_below_them(pictures: Any) -> None:
    for kind, data in transparent_files(pictures).items():
        decoded, expected = np.asarray(decode_image(data)), on_white(data)
        assert np.array_equal(decoded, expected), kind
        assert not np.array_equal(decoded, np.asarray(load_with_hf(data))), kind


def test_pixels_are_those_that_vllm_serve_shows(pictures: Any) -> None:
    files = transparent_files(pictures)
    del files["RGB with a transparent colour"]  # vLLM 0.32 leaves RGB as it is, without a look at its transparency
    for mode in ("RGB", "L", "P"):
        files[mode] = pictures.file(pictures.noise(40, 30, mode))
    for kind, data in files.items():
        assert np.array_equal(np.asarray(decode_image(data)), np.asarray(load_with_vllm(data))), kind


def test_two_drawings_on_a_transparent_ground_are_two_pictures() -> None:
    y, x = np.mgrid[:64, :96]
    shapes = [(x - 48) ** 2 + (y - 32) ** 2 < 400, abs(x - 48) < 20]
    pixels = [np.stack([0 * x, 0 * x, 0 * x, 255 * shape], -1).astype(np.uint8) for shape in shapes]
    for drawing, shape in zip(pixels, shapes, strict=True):
        buffer = io.BytesIO()
        Image.fromarray(drawing).save(buffer, "PNG")
        assert np.array_equal(np.asarray(decode_image(buffer.getvalue()))[..., 0] == 0, shape)


@pytest.mark.mutation("rotation-ignored", "as_rgb", "upright = _upright(image)", "upright = image")
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_rotation_is_applied_as_hf_does(pictures: Any, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    for file_format in ("JPEG", "PNG"):
        data = pictures.file(pictures.noise(40, 30), file_format, exif=exif)
        decoded = decode_image(data)
        assert decoded.size == ((30, 40) if orientation >= 5 else (40, 30))
        assert np.array_equal(np.asarray(decoded), np.asarray(load_with_hf(data)))


@pytest.mark.parametrize("mode", ["RGBA", "I;16"])
def test_what_is_converted_is_rotated_too(pictures: Any, mode: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    deep = Image.fromarray(np.arange(1200, dtype=np.uint16).reshape(30, 40) * 50)
    image = deep if mode == "I;16" else pictures.noise(40, 30, mode)
    turned, plain = (np.asarray(decode_image(pictures.file(image, **options))) for options in ({"exif": exif}, {}))
    assert np.array_equal(turned, np.rot90(plain, -1))


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


@pytest.mark.parametrize(
    ("width", "height", "limit", "message"),
    [
        (10_000, 10_000, 64_000_000, "10000x10000 pixels: 100000000 pixels exceed the limit of 64000000"),
        (100, 101, 10_000, "100x101 pixels: 10100 pixels exceed the limit of 10000"),
        (60_000, 60_000, 64_000_000, "3600000000 pixels: no option allows more than 178956970"),
    ],
)
def test_an_image_of_too_many_pixels_is_refused_from_its_header(
    width: int, height: int, limit: int, message: str
) -> None:
    data = png_header(width, height)
    assert len(data) < 1000
    start_tracing()
    with pytest.raises(ImageError, match=message):
        decode_image(data, limit)
    assert tracemalloc.get_traced_memory()[1] < 10_000_000


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
        with pytest.raises(ImageError, match="not a readable PNG, JPEG, WebP or GIF file"):
            decode_image(data)
    with pytest.raises(ImageError, match="not a readable PNG, JPEG, WebP or GIF file"):
        decode_image(pictures.file(pictures.noise(10, 10), "BMP"))


def test_damaged_pixels_are_refused(pictures: Any) -> None:
    data = bytearray(pictures.file(pictures.noise(100, 80)))
    data[len(data) // 2] ^= 0xFF
    with pytest.raises(ImageError, match="100x80 pixels cannot be decoded"):
        decode_image(bytes(data))


def test_16_bits_of_grey_are_scaled_as_16_bits_of_colour_are(pictures: Any) -> None:
    values = np.arange(1200, dtype=np.uint16).reshape(30, 40) * 54
    decoded = np.asarray(decode_image(pictures.file(Image.fromarray(values))))
    assert np.array_equal(decoded, np.repeat((values >> 8)[..., None], 3, -1))
    data = b"".join(b"\0" + np.repeat(row, 3).astype(">u2").tobytes() for row in values)
    header = struct.pack(">IIBBBBB", 40, 30, 16, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(data)), (b"IEND", b""))
    colour = b"\x89PNG\r\n\x1a\n" + b"".join(png_chunk(*one) for one in chunks)
    assert np.array_equal(np.asarray(decode_image(colour)), decoded)


def test_a_transparent_value_of_16_bits_shows_white(pictures: Any) -> None:
    values = np.arange(1200, dtype=np.uint16).reshape(30, 40) * 54
    decoded = np.asarray(decode_image(pictures.file(Image.fromarray(values), transparency=540)))
    assert np.array_equal(decoded[..., 0], np.where(values == 540, 255, values >> 8))


def test_a_jpeg_of_many_scans_is_refused_before_its_pixels_are_decoded(pictures: Any) -> None:
    """Each scan is a pass over all pixels: 300 KB took a thread for 110 seconds."""
    data = pictures.file(pictures.noise(64, 48), "JPEG", progressive=True)
    assert decode_image(data).size == (64, 48)
    last = data[data.rfind(b"\xff\xda") : -2]
    with pytest.raises(ImageError, match=r"a JPEG of \d+ scans, the limit is 64"):
        decode_image(data[:-2] + last * 64 + data[-2:])


def test_what_is_behind_a_jpeg_or_in_its_metadata_is_no_scan(pictures: Any) -> None:
    """The video of a motion photo, and a thumbnail."""
    photo = pictures.file(pictures.noise(96, 64), "JPEG")
    video = b"\0\0\0\x18ftypmp42" + b"\xff\xda" * 1000
    thumbnail = b"\xff\xe1" + (2 + 2000).to_bytes(2, "big") + b"\xff\xda" * 1000
    for file in (photo + video, photo[:2] + thumbnail + photo[2:]):
        assert decode_image(file).tobytes() == decode_image(photo).tobytes()
    many = pictures.file(pictures.noise(96, 64), "JPEG", progressive=True)
    end = many.rindex(b"\xff\xd9")
    scan = many[many.rindex(b"\xff\xda") : end]
    with pytest.raises(ImageError, match=r"a JPEG of \d+ scans, the limit is 64"):
        decode_image(many[:end] + scan * 70 + many[end:] + video)


@pytest.mark.parametrize(
    "broken",
    [
        b"II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0",  # cut off
        b"II*\0\x08\0\0\0\x02\0\x12\x01\x03\0\x01\0\0\0\x06\0\0\0\x10\x01\x05\0\xff\xff\xff\xff\0\0\0\x7f\0\0\0\0",
        b"no TIFF",
    ],
    ids=["cut off", "a tag of 4 billion values", "no header"],
)
def test_a_picture_with_broken_exif_is_read(pictures: Any, broken: bytes) -> None:
    image = pictures.noise(96, 64)
    plain, given = (decode_image(pictures.file(image, "JPEG", exif=b"Exif\0\0" + tags)) for tags in (b"", broken))
    assert sorted(given.size) == sorted(plain.size)
    assert given.size == plain.size or given.tobytes() == plain.transpose(Transpose.ROTATE_270).tobytes()
    assert as_rgb(Image.open(io.BytesIO(pictures.file(image, "PNG", exif=broken)))).size in (
        image.size,
        image.size[::-1],
    )


LONG = b"a workflow of many nodes " * 120_000
"""3 MB, of which Pillow refuses the compressed forms."""


@pytest.mark.parametrize("behind", [False, True], ids=["before the pixels", "behind the pixels"])
@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (b"tEXt", b"workflow\0" + LONG * 30),
        (b"zTXt", b"workflow\0\0" + zlib.compress(LONG)),
        (b"iTXt", b"workflow\0\1\0\0\0" + zlib.compress(LONG)),
        (b"iTXt", b"XML:com.adobe.xmp\0\1\0\0\0" + zlib.compress(LONG)),
        (b"zTXt", b"Raw profile type exif\0\0" + zlib.compress(LONG)),
        (b"iCCP", b"a scanner\0\0" + zlib.compress(LONG)),
    ],
    ids=["tEXt", "zTXt", "iTXt", "XMP", "EXIF as text", "iCCP"],
)
def test_a_png_with_a_long_text_is_the_picture_without_it(
    pictures: Any, kind: bytes, text: bytes, behind: bool
) -> None:
    """As ComfyUI and programs of microscopes write them."""
    plain = pictures.file(pictures.noise(40, 30))
    at = len(plain) - 12 if behind else 33  # before the end, or behind the header
    given = plain[:at] + png_chunk(kind, text) + plain[at:]
    assert decode_image(given).tobytes() == decode_image(plain).tobytes()


def test_a_png_of_many_texts_is_read_without_inflating_them(pictures: Any) -> None:
    plain = pictures.file(pictures.noise(40, 30))
    keywords = (b"workflow\0\0", b"Raw profile type exif\0\0")
    texts = b"".join(png_chunk(b"zTXt", keyword + zlib.compress(bytes(2**22))) for keyword in keywords) * 20
    given = plain[:33] + texts + plain[33:]
    start_tracing()
    assert decode_image(given).tobytes() == decode_image(plain).tobytes()
    assert tracemalloc.get_traced_memory()[1] < 20 * 2**20


@pytest.mark.parametrize("rest", [0, 5_000_000])
@pytest.mark.parametrize("compressed", [False, True])
def test_a_rotation_in_the_texts_of_a_png_is_applied(pictures: Any, rest: int, compressed: bool) -> None:
    plain = pictures.file(pictures.noise(40, 30))
    text = b'<x tiff:Orientation="6"/>' + b" " * (0 if compressed else rest)
    head = b"XML:com.adobe.xmp\0\1\0\0\0" if compressed else b"XML:com.adobe.xmp\0\0\0\0\0"
    xmp = png_chunk(b"iTXt", head + (zlib.compress(text) if compressed else text))
    other = png_chunk(b"zTXt", b"workflow\0\0" + zlib.compress(LONG))
    given = plain[:33] + other + xmp + other + plain[33:]
    assert decode_image(given).tobytes() == decode_image(plain).transpose(Transpose.ROTATE_270).tobytes()


def other_files(pictures: Any) -> dict[str, bytes]:
    """By kind, files as cameras, phones and editors write them."""
    image, second, alpha = pictures.noise(40, 30), pictures.noise(40, 30, seed=5), pictures.noise(40, 30, "RGBA")
    turned = Image.Exif()
    turned[0x0112] = 6
    animated = {"save_all": True, "append_images": [second]}
    jpeg, png = pictures.file(image, "JPEG"), pictures.file(image)
    webp = pictures.file(image, "WEBP", lossless=True)
    return {
        "WebP": webp,
        "WebP, lossy": pictures.file(image, "WEBP"),
        "WebP, transparent": pictures.file(alpha, "WEBP", lossless=True),
        "WebP, animated": pictures.file(image, "WEBP", lossless=True, duration=100, **animated),
        "WebP, turned": pictures.file(image, "WEBP", lossless=True, exif=turned),
        "WebP and more": webp + b"more",
        "GIF": pictures.file(image, "GIF"),
        "GIF, grey": pictures.file(image.convert("L"), "GIF"),
        "GIF, transparent": pictures.file(image.quantize(16), "GIF", transparency=3),
        "GIF, animated": pictures.file(image, "GIF", **animated),
        "APNG": pictures.file(image, **animated),
        "APNG with another first picture": pictures.file(image, default_image=True, **animated),
        "PNG and more": png + b"more",
        "PNG without an end": png[:-12],
        "MPO": pictures.file(image, "MPO", **animated),
        "JPEG, progressive": pictures.file(image, "JPEG", progressive=True),
        "JPEG, CMYK": pictures.file(image.convert("CMYK"), "JPEG"),
        "JPEG with a large profile": pictures.file(image, "JPEG", icc_profile=bytes(range(256)) * 2000),
        "JPEG and more": jpeg + b"more" * 1000,
    }


def test_files_of_other_kinds_show_what_vllm_serve_shows(pictures: Any) -> None:
    for kind, data in other_files(pictures).items():
        assert np.array_equal(np.asarray(decode_image(data)), np.asarray(load_with_vllm(data))), kind


@pytest.mark.parametrize("format", ["WEBP", "GIF"])
def test_a_cut_off_webp_or_gif_is_refused(pictures: Any, format: str) -> None:
    data = pictures.file(pictures.noise(100, 80), format)
    for share in (0.02, 0.5, 0.9):
        with pytest.raises(ImageError):
            decode_image(data[: int(len(data) * share)])


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
