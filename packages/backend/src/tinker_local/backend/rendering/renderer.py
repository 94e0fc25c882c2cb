"""`VLLMRenderer`: token ids with explicit image positions, images counted by vLLM and by HF's processor."""

import hashlib

import numpy as np
import numpy.typing as npt
from tinker_local.backend.options import DType
from tinker_local.backend.rendering.decoding import MAX_PIXELS, ImageError, decode_image, image_size
from tinker_local.backend.rendering.hf_images import HFImages
from tinker_local.backend.rendering.image_cache import ImageCache, SizedImage
from tinker_local.backend.rendering.interface import ImagePlacement, RenderedImage, RenderedInput
from tinker_local.backend.rendering.vision_tokens import VisionTokens, vision_tokens
from tinker_local.backend.vllm_engine.vllm_images import VLLMImages
from tinker_local.types import (
    EncodedTextChunk,
    ImageAssetPointerChunk,
    ImageChunk,
    InvalidRequestError,
    ModelInput,
    UnsupportedError,
)

CACHE_BYTES = 2**30


class VLLMRenderer:
    """Keeps `rendering.interface.Renderer` for one base model.

    An image is decoded once and processed twice, by vLLM's renderer for the sampler and by HF's processor for the
    trainer; both must agree on its number of positions, and with the client's. `tokens` None for a text model, on
    which images are refused.
    """

    def __init__(
        self,
        model: str,
        *,
        dtype: DType | None = None,
        max_pixels: int = MAX_PIXELS,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        """`model`: a folder or hub name; `dtype` as of the engine; `cache_bytes` of processed images are kept."""
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(model)
        self.vocab_size: int = config.get_text_config().vocab_size
        self.tokens: VisionTokens | None = vision_tokens(config)
        self._images = None if self.tokens is None else _ImageProcessing(model, dtype, self.tokens, max_pixels)
        self._cache = ImageCache(cache_bytes)

    @property
    def images_processed(self) -> int:
        """How many images were decoded and processed so far."""
        return self._cache.images_processed

    def render(self, model_input: ModelInput, where: str) -> RenderedInput:
        """Token ids int32 [N], the pad id at image positions, and where the images are."""
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
                parts.append(np.full(image.num_tokens, pad, np.int32))
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
        if self._images is None or self.tokens is None:
            raise InvalidRequestError(f"{where}: an image, but this base model reads text only")
        images = self._images
        content_hash = hashlib.sha256(chunk.data).hexdigest()
        try:
            image = self._cache.get(content_hash, lambda: images.process(chunk.data, content_hash))
            images.check_count(image, chunk)
        except ImageError as error:
            raise InvalidRequestError(f"{where}: {error}") from error
        return image, self.tokens.pad


class _ImageProcessing:
    """Decodes an image and processes it for both sides."""

    def __init__(self, model: str, dtype: DType | None, tokens: VisionTokens, max_pixels: int) -> None:
        self._vllm = VLLMImages(model, dtype, tokens)
        self._hf = HFImages(model)
        self._max_pixels = max_pixels

    def process(self, data: bytes, content_hash: str) -> SizedImage:
        image = decode_image(data, self._max_pixels)
        pixel_values, grid_thw = self._hf.process(image)
        item, num_tokens = self._vllm.render(image)
        rendered = RenderedImage(content_hash, num_tokens, pixel_values, grid_thw, item)
        vllm_bytes = sum(tensor.nbytes for tensor in item.get_data().values())
        return SizedImage(rendered, pixel_values.nbytes + vllm_bytes)

    def check_count(self, image: RenderedImage, chunk: ImageChunk) -> None:
        """ImageError with all numbers unless vLLM, the HF processor and the client count alike."""
        hf, vllm, client = self._hf.num_tokens(image.grid_thw), image.num_tokens, chunk.expected_tokens
        if hf == vllm and client in (None, vllm):
            return
        width, height = image_size(chunk.data)
        expected = "not given" if client is None else client
        raise ImageError(
            f"image of {width}x{height} pixels takes {vllm} tokens in vLLM and {hf} in the HF processor, "
            f"but expected_tokens is {expected}"
        )
