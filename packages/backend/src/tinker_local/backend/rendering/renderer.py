"""`ModelRenderer`: token ids with explicit image positions, images counted by vLLM and by HF's processor."""

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from tinker_local.backend.rendering.decoding import IN_FLIGHT, ImageError, decode_image, image_size
from tinker_local.backend.rendering.image_cache import ImageCache
from tinker_local.backend.rendering.rendered_input import (
    ImagePlacement,
    ImagePositions,
    ImageProcessor,
    ImageTokens,
    RenderedImage,
    RenderedInput,
    SamplerImage,
    TrainerImage,
)
from tinker_local.types import (
    EncodedTextChunk,
    ImageAssetPointerChunk,
    ImageChunk,
    InvalidRequestError,
    ModelInput,
    UnsupportedError,
)
from tinker_local.types.pictures import MAX_PIXELS

CACHE_BYTES = 2**30


@dataclass(frozen=True, slots=True)
class ImageReading:
    """How both engines read the images of a vision-language model."""

    tokens: ImageTokens
    trainer: ImageProcessor[TrainerImage]
    sampler: ImageProcessor[SamplerImage]


class ModelRenderer:
    """Implements `rendering.rendered_input.Renderer` for one base model.

    An image is decoded once and processed twice, for the sampler and for the trainer. Both must count the same number
    of positions, and so must the client.
    """

    def __init__(
        self,
        vocab_size: int,
        images: ImageReading | None = None,
        *,
        max_pixels: int = MAX_PIXELS,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        """`images` None: a text model, which refuses images. `cache_bytes`: of processed images that are kept."""
        self.vocab_size = vocab_size
        self.tokens = None if images is None else images.tokens
        self._images = images
        self._max_pixels = max_pixels
        self._cache = ImageCache(cache_bytes)

    @property
    def takes_images(self) -> bool:
        """Whether the base model takes images."""
        return self._images is not None

    @property
    def images_processed(self) -> int:
        """Number of images decoded and processed so far."""
        return self._cache.images_processed

    def render(self, model_input: ModelInput, where: str) -> RenderedInput:
        """See `Renderer.render`."""
        parts: list[npt.NDArray[np.int32]] = []
        placements: list[ImagePlacement] = []
        offset = 0
        for index, chunk in enumerate(model_input.chunks):
            place = f"{where}.chunks[{index}]"
            if isinstance(chunk, EncodedTextChunk):
                self._check_vocabulary(chunk, place)
                parts.append(chunk.tokens)
            else:
                image, pad = self._image(chunk, place)
                placements.append(ImagePlacement(offset, image))
                own = image.positions
                parts.append(np.full(image.num_tokens, pad, np.int32) if own is None else own.ids)
            offset += parts[-1].size
        if not parts:
            raise InvalidRequestError(f"{where}.chunks: there are none; at least one token is needed")
        return RenderedInput(np.concatenate(parts), tuple(placements))

    def _check_vocabulary(self, chunk: EncodedTextChunk, where: str) -> None:
        highest = int(chunk.tokens.argmax())
        if chunk.tokens[highest] >= self.vocab_size:
            raise InvalidRequestError(
                f"{where}.tokens[{highest}]: token id {chunk.tokens[highest]} is outside the vocabulary of "
                f"{self.vocab_size} tokens"
            )

    def _image(self, chunk: ImageChunk | ImageAssetPointerChunk, where: str) -> tuple[RenderedImage, int]:
        """The image and the id that stands for its positions."""
        if isinstance(chunk, ImageAssetPointerChunk):
            raise UnsupportedError(
                f"{where}: image_asset_pointer is for prompts of samples alone; send the image's bytes"
            )
        reading = self._images
        if reading is None:
            raise InvalidRequestError(f"{where}: an image, but this base model reads text only")
        content_hash = hashlib.sha256(chunk.data).hexdigest()
        try:
            image = self._cache.get(content_hash, lambda: self._process(reading, chunk, content_hash))
            if chunk.expected_tokens not in (None, image.num_tokens):
                raise _disagreement(chunk, image.num_tokens, image.num_tokens)
        except ImageError as error:
            raise InvalidRequestError(f"{where}: {error}") from error
        return image, reading.tokens.pad

    def _process(self, reading: ImageReading, chunk: ImageChunk, content_hash: str) -> RenderedImage:
        width, height = image_size(chunk.data)
        with IN_FLIGHT.taken(min(width * height, self._max_pixels)):
            decoded = decode_image(chunk.data, self._max_pixels)
            trainer, sampler = reading.trainer.process(decoded), reading.sampler.process(decoded)
            del decoded  # or its memory would not be given back
        if trainer.num_tokens != sampler.num_tokens:
            raise _disagreement(chunk, sampler.num_tokens, trainer.num_tokens)
        _check_positions(trainer.positions, sampler.positions, f"image of {width}x{height} pixels")
        return RenderedImage(
            content_hash,
            sampler.num_tokens,
            trainer.pixel_values,
            trainer.grid_thw,
            sampler.item,
            sampler.num_bytes,
            trainer.positions,
            trainer.further,
        )


def _check_positions(hf: ImagePositions | None, vllm: ImagePositions | None, what: str) -> None:
    """ImageError unless both engines have the same ids and features at the positions of an image."""
    if hf is None or vllm is None or (at := hf.first_difference(vllm)) is None:
        return

    def told(found: ImagePositions) -> str:
        return f"token {found.ids[at]} {'with' if found.holds_features[at] else 'without'} features"

    raise ImageError(f"{what}: position {at} of its {hf} is {told(vllm)} in vLLM and {told(hf)} in the HF processor")


def _disagreement(chunk: ImageChunk, vllm: int, hf: int) -> ImageError:
    width, height = image_size(chunk.data)
    expected = "not given" if chunk.expected_tokens is None else chunk.expected_tokens
    return ImageError(
        f"image of {width}x{height} pixels takes {vllm} tokens in vLLM and {hf} in the HF processor, "
        f"but expected_tokens is {expected}"
    )
