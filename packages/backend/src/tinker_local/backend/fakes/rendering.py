"""`FakeRenderer`: counts an image's tokens from its size, one per cell of 32 × 32 pixels."""

import hashlib
import io
import threading
import warnings

import numpy as np
import numpy.typing as npt
from cachetools import LRUCache
from tinker_local.backend.fakes.model import FakeModel
from tinker_local.backend.rendering.interface import ImagePlacement, RenderedImage, RenderedInput
from tinker_local.types import (
    EncodedTextChunk,
    ImageAssetPointerChunk,
    ImageChunk,
    InvalidRequestError,
    ModelInput,
    UnsupportedError,
)

CELL = 32
MAX_PIXELS = 64_000_000
CACHED_IMAGES = 1024


class FakeRenderer:
    """Keeps `rendering.interface.Renderer` on a `FakeModel`: ceil(width / 32) · ceil(height / 32) tokens per image."""

    takes_images = True

    def __init__(self, model: FakeModel) -> None:
        self._model = model
        self._images: LRUCache[str, RenderedImage] = LRUCache(CACHED_IMAGES)
        self._lock = threading.Lock()
        self.images_processed = 0

    def render(self, model_input: ModelInput, where: str) -> RenderedInput:
        """Token ids with the pad id at image positions."""
        parts = [np.empty(0, np.int32)]
        placements = []
        offset = 0
        for index, chunk in enumerate(model_input.chunks):
            place = f"{where}.chunks[{index}]"
            if isinstance(chunk, ImageAssetPointerChunk):
                raise UnsupportedError(f"{place}: image_asset_pointer is not served here; send the image's bytes")
            if isinstance(chunk, ImageChunk):
                image = self._image(chunk, place)
                placements.append(ImagePlacement(offset, image))
                parts.append(np.full(image.num_tokens, self._model.image_pad_id, np.int32))
            else:
                parts.append(self._text(chunk, place))
            offset += parts[-1].size
        return RenderedInput(np.concatenate(parts), tuple(placements))

    def _text(self, chunk: EncodedTextChunk, where: str) -> npt.NDArray[np.int32]:
        largest = int(chunk.tokens.argmax())
        if chunk.tokens[largest] >= self._model.vocab_size:
            raise InvalidRequestError(
                f"{where}.tokens[{largest}]: id {chunk.tokens[largest]} is outside the vocabulary of "
                f"{self._model.vocab_size}"
            )
        return chunk.tokens

    def _image(self, chunk: ImageChunk, where: str) -> RenderedImage:
        content_hash = hashlib.sha256(chunk.data).hexdigest()
        # One image at a time: two requests with the same new image must not both process it.
        with self._lock:
            image = self._images.get(content_hash)
            if image is None:
                image = self._images[content_hash] = _process(chunk.data, content_hash, where)
                self.images_processed += 1
        if chunk.expected_tokens not in (None, image.num_tokens):
            raise InvalidRequestError(
                f"{where}.expected_tokens: the client counts {chunk.expected_tokens} tokens for this image, "
                f"the server {image.num_tokens}"
            )
        return image


def _process(data: bytes, content_hash: str, where: str) -> RenderedImage:
    """Decode the whole file (a truncated one must fail); `pixel_values` is the mean colour of each cell."""
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            opened = Image.open(io.BytesIO(data), formats=("PNG", "JPEG"))
        width, height = opened.size
        if width * height > MAX_PIXELS:
            raise InvalidRequestError(f"{where}.data: {width} × {height} pixels, the limit is {MAX_PIXELS}")
        columns, rows = -(-width // CELL), -(-height // CELL)
        cells = opened.convert("RGB").resize((columns, rows), Image.Resampling.BOX)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise InvalidRequestError(f"{where}.data: the image cannot be decoded: {error}") from error
    return RenderedImage(
        content_hash=content_hash,
        num_tokens=columns * rows,
        pixel_values=np.asarray(cells, np.float32).reshape(-1, 3) / np.float32(255),
        grid_thw=(1, rows, columns),
    )
