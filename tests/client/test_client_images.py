"""`image_chunk`: the file that is sent shows every reader what users see in a viewer, and the count is HF's."""

import functools
import struct
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt
import PIL.Image
import PIL.ImageOps
import pytest
from tinker_local.backend.rendering.decoding import decode_image
from tinker_local.client import as_rgb, image_chunk
from tinker_local.types import InvalidRequestError
from transformers import Qwen2VLImageProcessor
from transformers.image_utils import load_image

ORIENTATION = 0x0112


@pytest.fixture(scope="module")
def processor() -> Qwen2VLImageProcessor:
    return Qwen2VLImageProcessor(size={"shortest_edge": 1024, "longest_edge": 65536}, patch_size=16, merge_size=2)


def rgb(width: int = 50, height: int = 37, seed: int = 0) -> PIL.Image.Image:
    """A smooth gradient with some noise, so that transposing and channel swaps show."""
    y, x = np.mgrid[:height, :width]
    pixels = np.stack([x * 255 // max(width - 1, 1), y * 255 // max(height - 1, 1), (x + y) % 256], -1)
    noise = np.random.default_rng(seed).integers(0, 20, (height, width, 3))
    return PIL.Image.fromarray(np.clip(pixels + noise, 0, 255).astype(np.uint8))


def file_of(image: PIL.Image.Image, format: str, **options: object) -> bytes:
    file = BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def rotated_by_exif(format: str, orientation: int = 6) -> bytes:
    exif = PIL.Image.Exif()
    exif[ORIENTATION] = orientation
    return file_of(rgb(), format, exif=exif.tobytes())


def with_alpha(mode: str) -> PIL.Image.Image:
    image = rgb().convert(mode)
    image.putalpha(PIL.Image.linear_gradient("L").resize(image.size))
    return image


def palette_with_transparency() -> bytes:
    return file_of(rgb().quantize(16), "png", transparency=3)


def rgb_with_transparent_colour() -> bytes:
    return file_of(rgb(), "png", transparency=(0, 0, 0))


def gray16(kind: str = "<u2") -> PIL.Image.Image:
    return PIL.Image.fromarray((np.arange(30 * 40).reshape(30, 40) * 54).astype(kind))


def pgm(most: int) -> bytes:
    """Grey of 0 to `most` in two bytes."""
    values = (np.arange(30 * 40) * most // 1199).astype(">u2")
    return b"P5\n40 30\n%d\n" % most + values.tobytes()


def adobe_cmyk() -> bytes:
    return file_of(rgb().convert("CMYK"), "jpeg")


IMAGES: dict[str, Callable[[], PIL.Image.Image | bytes]] = {
    "RGB": rgb,
    "L": lambda: rgb().convert("L"),
    "1": lambda: rgb().convert("1"),
    "P": lambda: rgb().quantize(32),
    "RGBA": lambda: with_alpha("RGB"),
    "LA": lambda: with_alpha("L"),
    "PA": lambda: rgb().quantize(32).convert("PA"),
    "CMYK": lambda: rgb().convert("CMYK"),
    "YCbCr": lambda: rgb().convert("YCbCr"),
    "HSV": lambda: rgb().convert("HSV"),
    "I;16": gray16,
    "I;16B": lambda: gray16(">u2"),
    "I": lambda: gray16("<i4"),
    "PNG RGB": lambda: file_of(rgb(), "png"),
    "PNG L": lambda: file_of(rgb().convert("L"), "png"),
    "PNG RGBA": lambda: file_of(with_alpha("RGB"), "png"),
    "PNG LA": lambda: file_of(with_alpha("L"), "png"),
    "PNG P with transparency": palette_with_transparency,
    "PNG RGB with a transparent colour": rgb_with_transparent_colour,
    "PNG 16 bit": lambda: file_of(gray16(), "png"),
    "PNG rotated": lambda: rotated_by_exif("png"),
    "JPEG RGB": lambda: file_of(rgb(), "jpeg"),
    "JPEG L": lambda: file_of(rgb().convert("L"), "jpeg"),
    "JPEG CMYK": adobe_cmyk,
    **{f"JPEG orientation {n}": functools.partial(rotated_by_exif, "jpeg", n) for n in range(1, 9)},
    "WEBP": lambda: file_of(rgb(), "webp", lossless=True),
    "GIF": lambda: file_of(rgb(), "gif"),
    "BMP": lambda: file_of(rgb(), "bmp"),
    "TIFF 16 bit": lambda: file_of(gray16(), "tiff"),
    "TIFF 16 bit big-endian": lambda: file_of(gray16(">u2"), "tiff"),
    "TIFF 32 bit": lambda: file_of(gray16("<i4"), "tiff"),
    "PGM 16 bit": lambda: pgm(65535),
    "PGM 12 bit": lambda: pgm(4095),
    "PNG 16 bit with a transparent value": lambda: file_of(gray16(), "png", transparency=540),
    "PNG L with a transparent value": lambda: file_of(rgb().convert("L"), "png", transparency=9),
    "PNG 1 with a transparent value": lambda: file_of(rgb().convert("1"), "png", transparency=0),
    "PNG P with alphas": lambda: file_of(rgb().quantize(16), "png", transparency=bytes(range(0, 256, 16))),
    "palette of RGBA": lambda: with_alpha("RGB").quantize(16),
    "GIF with a transparent colour": lambda: file_of(rgb().quantize(16), "gif", transparency=3),
    "WEBP RGBA": lambda: file_of(with_alpha("RGB"), "webp", lossless=True),
    "TIFF RGBA": lambda: file_of(with_alpha("RGB"), "tiff"),
    "BMP RGBA": lambda: file_of(with_alpha("RGB"), "bmp"),
}


def opened(image: PIL.Image.Image | bytes) -> PIL.Image.Image:
    return PIL.Image.open(BytesIO(image)) if isinstance(image, bytes) else image


def seen(image: PIL.Image.Image) -> npt.NDArray[np.uint8]:
    """What a viewer shows on white, by numpy: uint8 [H, W, 3]."""
    upright = PIL.ImageOps.exif_transpose(image)
    if upright.mode.startswith("I"):
        values = np.asarray(upright).astype(np.int64)
        grey = np.where(values == upright.info.get("transparency"), 255, values // 256)
        return np.repeat(grey[..., None], 3, -1).astype(np.uint8)
    if not image.has_transparency_data:
        return np.asarray(upright.convert("RGB"))
    rgba = np.asarray(upright.convert("RGBA"), np.float64)
    alpha = rgba[..., 3:] / 255
    return np.rint(rgba[..., :3] * alpha + 255 * (1 - alpha)).astype(np.uint8)


@pytest.mark.parametrize("name", IMAGES)
def test_every_reader_sees_in_the_chunk_what_a_viewer_shows(name: str, processor: Qwen2VLImageProcessor) -> None:
    image = IMAGES[name]()
    pixels = seen(opened(image))
    expected = PIL.Image.fromarray(pixels)
    chunk = image_chunk(image, processor)
    assert np.array_equal(np.asarray(as_rgb(opened(image))), pixels)
    assert np.array_equal(np.asarray(decode_image(chunk.data)), pixels)  # the server
    assert np.array_equal(np.asarray(load_image(opened(chunk.data))), pixels)
    here = processor(images=[opened(chunk.data)], return_tensors="np")
    there = processor(images=[expected], return_tensors="np")
    assert np.array_equal(here["pixel_values"], there["pixel_values"])
    assert chunk.expected_tokens == there["image_grid_thw"].prod() // 4


@pytest.mark.parametrize("mode", ["L", "P", "CMYK", "1"])
def test_hf_sees_the_same_without_load_image(mode: str, processor: Qwen2VLImageProcessor) -> None:
    image = IMAGES[mode]()
    sent = opened(image_chunk(image).data)
    assert np.array_equal(
        processor(images=[sent], return_tensors="np")["pixel_values"],
        processor(images=[image], return_tensors="np")["pixel_values"],
    )


SIZES = [
    (8, 8), (1, 1), (16, 16), (31, 33), (32, 32), (33, 65), (48, 80), (64, 64), (100, 100), (1, 150), (150, 1),
    (224, 224), (255, 257), (256, 256), (300, 200), (480, 320), (640, 480), (1000, 30), (30, 1000), (1280, 720),
    (1999, 10), (777, 1111),
]  # fmt: skip


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
def test_expected_tokens_is_what_hf_gives(size: tuple[int, int], processor: Qwen2VLImageProcessor) -> None:
    image = PIL.Image.new("RGB", size, (10, 200, 30))
    grid = processor(images=[image], return_tensors="np")["image_grid_thw"][0]
    assert image_chunk(image, processor).expected_tokens == grid.prod() // processor.merge_size**2


def test_a_rotated_image_is_counted_as_it_is_seen(processor: Qwen2VLImageProcessor) -> None:
    exif = PIL.Image.Exif()
    exif[ORIENTATION] = 6
    small = Qwen2VLImageProcessor(size={"shortest_edge": 1, "longest_edge": 65536}, patch_size=16, merge_size=1)
    chunk = image_chunk(file_of(rgb(96, 24), "jpeg", exif=exif.tobytes()), small)
    assert opened(chunk.data).size == (24, 96)
    assert chunk.expected_tokens == small.get_number_of_image_patches(96, 24, {})


def test_a_counter_is_asked_for_height_then_width() -> None:
    class AspectRatio:  # HF's own count is the same either way
        merge_size = 1

        def get_number_of_image_patches(self, height: int, width: int, images_kwargs: dict[str, object]) -> int:
            return height // width

    assert image_chunk(PIL.Image.new("RGB", (2, 10)), AspectRatio()).expected_tokens == 5


def test_a_processor_without_a_patch_counter_is_run(processor: Qwen2VLImageProcessor) -> None:
    class Runs:
        merge_size = 2

        def __call__(self, **kwargs: object) -> object:
            return processor(**kwargs)

    assert image_chunk(rgb(480, 320), Runs()).expected_tokens == image_chunk(rgb(480, 320), processor).expected_tokens


def test_a_processor_that_cannot_count_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequestError, match="image_processor: SimpleNamespace has no merge_size"):
        image_chunk(rgb(), SimpleNamespace())
    with pytest.raises(InvalidRequestError, match=r"pass its \.image_processor"):
        image_chunk(rgb(), SimpleNamespace(image_processor=None))
    with pytest.raises(InvalidRequestError, match="nor can be called"):
        image_chunk(rgb(), SimpleNamespace(merge_size=2))

    class OnlyPixels:
        merge_size = 2

        def __call__(self, **kwargs: object) -> dict[str, object]:
            return {"pixel_values": np.zeros(3)}

    with pytest.raises(InvalidRequestError, match=r"image_grid_thw \(only pixel_values\)"):
        image_chunk(rgb(), OnlyPixels())


def test_without_a_processor_the_count_is_left_to_the_server() -> None:
    assert image_chunk(rgb()).expected_tokens is None


def test_an_image_that_the_processor_refuses_is_named_with_its_size(processor: Qwen2VLImageProcessor) -> None:
    with pytest.raises(InvalidRequestError, match=r"image: .*601 x 2 pixels.*aspect ratio"):
        image_chunk(PIL.Image.new("RGB", (601, 2)), processor)


@pytest.mark.parametrize("format", ["png", "jpeg"])
@pytest.mark.parametrize("wrap", [bytes, bytearray, memoryview, Path])
def test_a_plain_rgb_file_is_sent_byte_for_byte(format: str, wrap: type, tmp_path: Path) -> None:
    data = file_of(rgb(), format, comment="kept") if format == "jpeg" else file_of(rgb(), format)
    source = tmp_path / "picture.bin"
    source.write_bytes(data)
    chunk = image_chunk(source if wrap is Path else wrap(data), image_format="png")
    assert chunk.data == data
    assert chunk.format == format


@pytest.mark.parametrize(
    "name", ["PNG L", "PNG RGBA", "PNG rotated", "JPEG L", "JPEG orientation 3", "JPEG CMYK", "WEBP"]
)
@pytest.mark.parametrize("format", ["png", "jpeg"])
def test_any_other_file_is_encoded_as_asked(name: str, format: str) -> None:
    chunk = image_chunk(IMAGES[name](), image_format=format)
    sent = opened(chunk.data)
    assert (sent.format, sent.mode, chunk.format) == (format.upper(), "RGB", format)
    assert sent.getexif().get(ORIENTATION, 1) == 1


def pack_12_bits(values: npt.NDArray[np.uint16]) -> bytes:
    first, second = values[::2], values[1::2]
    return np.stack([first >> 4, (first & 15) << 4 | second >> 8, second & 255], -1).astype(np.uint8).tobytes()


@pytest.mark.parametrize("bits", [12, 16])
def test_a_tiff_of_12_bits_is_not_dark(bits: int) -> None:
    """Pillow gives both as 16 bits; microscopes and cameras write 12."""
    values = np.arange(0, 1 << bits, 1 << (bits - 8), dtype=np.uint16)
    packed = values.tobytes() if bits == 16 else pack_12_bits(values)
    tags = {256: (3, 256), 257: (3, 1), 258: (3, bits), 259: (3, 1), 262: (3, 1), 273: (4, 8), 277: (3, 1)}
    tags |= {278: (3, 1), 279: (4, len(packed))}
    data = b"II*\0" + struct.pack("<I", 8 + len(packed)) + packed + struct.pack("<H", len(tags))
    data += b"".join(struct.pack("<HHII", tag, kind, 1, value) for tag, (kind, value) in tags.items()) + bytes(4)
    assert opened(data).mode == "I;16"
    assert np.array_equal(np.asarray(as_rgb(opened(data)))[0, :, 0], np.arange(256))


def test_jpeg_stays_close_to_the_pixels() -> None:
    sent = np.asarray(opened(image_chunk(rgb(), image_format="jpeg").data), np.int64)
    assert np.abs(sent - np.asarray(rgb(), np.int64)).mean() < 4


def test_equal_pixels_give_equal_files() -> None:
    plain = rgb()
    annotated = opened(file_of(plain, "png", dpi=(72, 72), icc_profile=b"\0" * 128))
    assert "icc_profile" in annotated.info
    assert image_chunk(annotated).data == image_chunk(plain).data == image_chunk(np.asarray(plain)).data


@pytest.mark.parametrize("shape", [(5, 7), (5, 7, 3), (5, 7, 4)])
def test_uint8_arrays_are_pixels(shape: tuple[int, ...]) -> None:
    array = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    sent = np.asarray(opened(image_chunk(array).data))
    expected = seen(PIL.Image.fromarray(array))
    assert np.array_equal(sent, expected)
    flipped = np.asarray(opened(image_chunk(array[::-1, ::-1]).data))  # not contiguous
    assert np.array_equal(flipped, expected[::-1, ::-1])


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (np.zeros((4, 4, 3), np.float32), r"\(4 x 4 x 3\) must be uint8 from 0 to 255, not float32"),
        (np.zeros((4, 4), np.float64), "not float64"),
        (np.zeros((4, 4), bool), "not bool"),
        (np.zeros((4, 4), np.int64), "not int64"),
        (np.zeros((3, 4, 5), np.uint8), "H x W x 3 or H x W x 4, not 3 x 4 x 5"),
        (np.zeros((1, 4, 4, 3), np.uint8), "not 1 x 4 x 4 x 3"),
        (np.zeros((0, 4, 3), np.uint8), "empty"),
        (PIL.Image.new("RGB", (0, 3)), r"empty \(0 x 3 pixels\)"),
        (PIL.Image.new("F", (3, 3)), "mode F"),
        (PIL.Image.new("I", (3, 3), 70_000), "integers from 70000 to 70000 .* no agreed range"),
        (PIL.Image.new("I", (3, 3), -1), "no agreed range"),
        (PIL.Image.new("I", (3, 3), 200), r"integers from 200 to 200 .*mode L\), or to 16 \(mode I;16\)"),
        (file_of(PIL.Image.new("I", (3, 3), 70_000), "tiff"), "no agreed range"),
        (b"", "0 bytes"),
        (b"GIF87 no, this is text", "22 bytes, beginning with 47 49 46"),
        (file_of(rgb(), "png")[:-60], "no image that can be read"),
        (file_of(rgb(), "jpeg")[:400], "no image that can be read"),
        ("picture.png", r"pathlib\.Path.*not str"),
        (None, "not NoneType"),
        ([1, 2, 3], "not list"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_is_no_image_is_refused_by_name(image: object, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"^image.*{message}"):
        image_chunk(image)  # type: ignore[arg-type]


def test_an_image_that_would_fill_the_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PIL.Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(InvalidRequestError, match="decompression bomb"):
        image_chunk(file_of(rgb(), "png"))


def test_a_file_that_is_not_there_says_which(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"missing\.png"):
        image_chunk(tmp_path / "missing.png")


def test_a_file_that_is_no_image_says_which(tmp_path: Path) -> None:
    path = tmp_path / "notes.png"
    path.write_text("not a picture")
    with pytest.raises(InvalidRequestError, match=r"notes\.png"):
        image_chunk(path)


def test_a_format_that_is_not_sent_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="image_format: must be 'png' or 'jpeg', not 'webp'"):
        image_chunk(rgb(), image_format="webp")  # type: ignore[arg-type]
