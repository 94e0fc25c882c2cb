"""The fakes' model: logits of the next token from the current token and the last image, with LoRA.

Position i has the features x_i: one-hot of its token (nothing at an image's positions) plus one-hot of the code of the
last image that began at or before i. A code is the image's content hash modulo `IMAGE_CODES`. Then

    logits_i = x_i · base + sum over adapted modules of (alpha / r) · B · A · x_i

Without images this is a bigram model. Shapes: N positions, V vocabulary, F = V + IMAGE_CODES features, R rank.
Arithmetic is float64; weights are rounded to float32, so that a saved adapter equals the trained one to the last bit.
"""

import hashlib
import threading
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from cachetools import LRUCache
from tinker_local.backend.adapters.adapter import FACTORS, LORA_ALPHA, tensor_name
from tinker_local.backend.rendering.decoding import FORMATS
from tinker_local.backend.rendering.rendered_input import ImagePlacement, RenderedImage, RenderedInput
from tinker_local.types import (
    EncodedTextChunk,
    ImageAssetPointerChunk,
    ImageChunk,
    InvalidRequestError,
    LoraConfig,
    ModelInput,
    UnsupportedError,
    as_rgb,
    open_picture,
)
from tinker_local.types.pictures import NoAgreedRangeError

Float64Array = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

EOS_ID = 0
IMAGE_CODES = 512
NO_IMAGE = -1

MODULES = {
    "train_attn": "model.layers.0.self_attn.o_proj",
    "train_mlp": "model.layers.0.mlp.down_proj",
    "train_unembed": "lm_head",
}
"""The matrix that each flag of `LoraConfig` adapts; all of them map features to logits."""


def decode(tokens: Sequence[int] | npt.NDArray[np.integer]) -> str:
    """The text of `tokens`: token t is the character with code point t, so ids below 128 read as ASCII."""
    return "".join(chr(int(token)) for token in tokens)


def encode(text: str) -> list[int]:
    """The tokens of `text`, one per character; the inverse of `decode`."""
    return [ord(character) for character in text]


@dataclass(frozen=True, slots=True, eq=False)
class LoraMatrices:
    """One adapted module: `a` float64 [R, F], `b` float64 [V, R], values that float32 holds."""

    a: Float64Array
    b: Float64Array


@dataclass(frozen=True, slots=True, eq=False)
class Features:
    """Non-zero features of N positions: `tokens` int64 [N] and `codes` int64 [N] (index F-wise), -1 for none."""

    tokens: IntArray
    codes: IntArray

    def gather(self, table: Float64Array) -> Float64Array:
        """x · table for `table` [F, D]: float64 [N, D]."""
        return table[self.tokens] * (self.tokens >= 0)[:, None] + table[self.codes] * (self.codes >= 0)[:, None]

    def scatter(self, rows: Float64Array, num_features: int) -> Float64Array:
        """The transpose of `gather`: `rows` [N, D] added up per feature, float64 [F, D]."""
        table = np.zeros((num_features, rows.shape[1]))
        for index in (self.tokens, self.codes):
            present = index >= 0
            np.add.at(table, index[present], rows[present])
        return table


class FakeModel:
    """A frozen base model, given by its name, vocabulary size and seed; equal arguments give equal logits.

    `image_pad_id` is the id at image positions; as text it is an ordinary token. EOS is token 0, made likely enough
    that a sample ends after some tens of tokens.
    """

    def __init__(
        self, name: str = "fake/bigram", *, vocab_size: int = 512, seed: int = 0, max_context_length: int = 4096
    ) -> None:
        if not 8 <= vocab_size <= 0xD800:
            raise ValueError(f"vocab_size must be in [8, {0xD800}] (every token is one character), not {vocab_size}")
        self.name = name
        self.vocab_size = vocab_size
        self.max_context_length = max_context_length
        self.image_pad_id = vocab_size - 1
        self.num_features = vocab_size + IMAGE_CODES
        self.base = np.random.default_rng([seed, vocab_size]).normal(size=(self.num_features, vocab_size))
        self.base[:vocab_size, EOS_ID] += 3.0
        self.base.flags.writeable = False

    def modules(self, config: LoraConfig) -> list[str]:
        """Names of the modules that `config` adapts; InvalidRequestError if there is none."""
        if config.train_vision:
            raise InvalidRequestError("lora_config.train_vision: the model in numpy has no vision tower")
        names = [name for flag, name in MODULES.items() if getattr(config, flag)]
        if not names:
            raise InvalidRequestError(f"lora_config: at least one of {', '.join(MODULES)} must be true")
        return names

    def features(self, rendered: RenderedInput) -> Features:
        """The features of every position of `rendered`."""
        tokens = rendered.token_ids.astype(np.int64)
        codes = np.full(tokens.size, NO_IMAGE, np.int64)
        for placement in sorted(rendered.images, key=lambda placement: placement.offset):
            code = self.vocab_size + int(placement.image.content_hash, 16) % IMAGE_CODES
            codes[placement.offset :] = code
            tokens[placement.offset : placement.offset + placement.image.num_tokens] = -1
        return Features(tokens, codes)

    def logits(self, features: Features, adapter: Mapping[str, LoraMatrices], rank: int) -> Float64Array:
        """float64 [N, V]; `adapter` by module name, empty for the base model."""
        logits = features.gather(self.base)
        for matrices in adapter.values():
            logits += (LORA_ALPHA / rank) * (features.gather(matrices.a.T) @ matrices.b.T)
        return logits

    def read_adapter(self, tensors: Mapping[str, npt.NDArray[Any]], rank: int) -> dict[str, LoraMatrices]:
        """The adapter in `tensors` (PEFT names); InvalidRequestError if a name or a shape does not fit."""
        found: dict[str, dict[str, npt.NDArray[np.float32]]] = {}
        for name, tensor in tensors.items():
            module, factor = parse_tensor_name(name)
            shape = (rank, self.num_features) if factor == "A" else (self.vocab_size, rank)
            if tensor.shape != shape:
                raise InvalidRequestError(f"adapter tensor {name}: shape {list(tensor.shape)}, expected {list(shape)}")
            found.setdefault(module, {})[factor] = tensor
        incomplete = [module for module, factors in found.items() if factors.keys() != {"A", "B"}]
        if incomplete or not found:
            raise InvalidRequestError(f"adapter: needs lora_A and lora_B of each module, not so in {incomplete}")
        return {
            module: LoraMatrices(factors["A"].astype(np.float64), factors["B"].astype(np.float64))
            for module, factors in found.items()
        }


_PARSED = {tensor_name(module, factor): (module, factor) for module in MODULES.values() for factor in FACTORS}


def parse_tensor_name(name: str) -> tuple[str, str]:
    """The inverse of `tensor_name`; InvalidRequestError for a name that this model does not have."""
    if name in _PARSED:
        return _PARSED[name]
    raise InvalidRequestError(f"adapter tensor {name}: matches no module of the model; it has {list(MODULES.values())}")


def log_softmax(logits: Float64Array) -> Float64Array:
    """Over the last axis."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)), np.float64)


KEPT_IMAGES = 1024


class FakeTower:
    """Stands for a vision tower that caches the features of the latest images. Thread-safe.

    `images_encoded`: how many images it would have encoded.
    """

    def __init__(self) -> None:
        self.images_encoded = 0
        self._kept: LRUCache[str, None] = LRUCache(KEPT_IMAGES)
        self._lock = threading.Lock()

    def encode(self, rendered: RenderedInput) -> None:
        """Encode the images of `rendered` that are not cached."""
        with self._lock:
            for placement in rendered.images:
                content_hash = placement.image.content_hash
                self.images_encoded += content_hash not in self._kept
                self._kept[content_hash] = None


CELL = 32
MAX_PIXELS = 64_000_000
CACHED_IMAGES = 1024


class FakeRenderer:
    """Implements `rendering.rendered_input.Renderer` on a `FakeModel`; an image takes ceil(width / 32) · ceil(height /
    32) tokens."""

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
            opened = open_picture(data, FORMATS)
        width, height = opened.size
        if width * height > MAX_PIXELS:
            raise InvalidRequestError(f"{where}.data: {width} × {height} pixels, the limit is {MAX_PIXELS}")
        rgb = as_rgb(opened)
        columns, rows = -(-rgb.width // CELL), -(-rgb.height // CELL)
        cells = rgb.resize((columns, rows), Image.Resampling.BOX)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        own = isinstance(error, NoAgreedRangeError)
        why = f"{error}" if own else "it is cut off or damaged"
        raise InvalidRequestError(f"{where}.data: the image cannot be decoded: {why}") from error
    return RenderedImage(
        content_hash=content_hash,
        num_tokens=columns * rows,
        pixel_values=np.asarray(cells, np.float32).reshape(-1, 3) / np.float32(255),
        grid_thw=(1, rows, columns),
    )
