"""What a renderer returns: token ids with explicit image positions, and each image as both engines read it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
from tinker_local.types import ModelInput

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True, slots=True)
class ImageTokens:
    """Ids that mark an image in a prompt: `start`, one `pad` for each position of the image, `end`.

    `start` and `end` None: processors make of one `pad` all positions of an image, and what else there is belongs to
    the text around it. `around`: None if chat templates write all three, with one pad. Otherwise they write `start`
    alone, of which processors make `start`, pads and `end` between two of this text.
    """

    start: int | None
    pad: int
    end: int | None
    around: str | None = None

    @property
    def alone(self) -> bool:
        """Whether templates write one `pad`, of which processors make the whole image."""
        return self.start is None or self.end is None


@dataclass(frozen=True, slots=True, eq=False)
class ImagePositions:
    """What stands at the positions of an image. `ids`: int32 [P]. `holds_features`: bool [P], where features of the
    tower replace the embeddings of the ids; the others are ordinary tokens, such as ends of rows."""

    ids: npt.NDArray[np.int32]
    holds_features: npt.NDArray[np.bool_]

    def __str__(self) -> str:
        return f"{len(self.ids)} positions, {int(self.holds_features.sum())} of them with features"

    def first_difference(self, other: "ImagePositions") -> int | None:
        """The first position that `other` has otherwise; None if both are equal."""
        if len(self.ids) == len(other.ids):
            apart = (self.ids != other.ids) | (self.holds_features != other.holds_features)
            return int(np.argmax(apart)) if apart.any() else None
        shorter = min(len(self.ids), len(other.ids))
        apart = self.ids[:shorter] != other.ids[:shorter]
        return int(np.argmax(apart)) if apart.any() else shorter


@dataclass(frozen=True, slots=True, eq=False)
class TrainerImage:
    """An image as the trainer reads it. `pixel_values` float32 [patches, patch_dim], or [1, 3, height, width] where
    the model cuts it itself; `grid_thw`: patches in time, height and width before merging, or positions of an image
    that the model cuts itself; `num_tokens`: positions in the prompt. `positions`: what they hold; None: the pad id and
    features everywhere. `further`: what else the model's class takes of this image, by the names of its processor."""

    pixel_values: npt.NDArray[np.float32]
    grid_thw: tuple[int, int, int]
    num_tokens: int
    positions: ImagePositions | None = None
    further: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class SamplerImage:
    """An image as the sampler reads it. `item`: of `num_bytes`; `num_tokens`: positions in the prompt; `positions`: as
    of `TrainerImage`."""

    item: Any
    num_bytes: int
    num_tokens: int
    positions: ImagePositions | None = None


Processed = TypeVar("Processed", TrainerImage, SamplerImage, covariant=True)


class ImageProcessor(Protocol[Processed]):
    """Prepares decoded RGB images for one engine. Thread-safe. Raises ImageError for images that it refuses."""

    def process(self, image: "Image") -> Processed: ...


@dataclass(frozen=True, slots=True, eq=False)
class RenderedImage:
    """One image, decoded and processed once.

    `content_hash`: hex SHA-256 of the file's bytes. `num_tokens`: its positions, the same for vLLM, the HF processor
    and (if given) the client. `pixel_values`, `grid_thw`, `positions`, `further`: as in `TrainerImage`. `vllm_item`:
    as in `SamplerImage`, of `item_bytes`; None where no vLLM runs.
    """

    content_hash: str
    num_tokens: int
    pixel_values: npt.NDArray[np.float32]
    grid_thw: tuple[int, int, int]
    vllm_item: Any = None
    item_bytes: int = 0
    positions: ImagePositions | None = None
    further: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)

    @property
    def tensor_bytes(self) -> int:
        """Bytes of memory, for the trainer alone."""
        return self.pixel_values.nbytes + sum(array.nbytes for array in self.further.values())

    @property
    def num_bytes(self) -> int:
        """Bytes of memory, for both engines."""
        return self.tensor_bytes + self.item_bytes

    @property
    def feature_places(self) -> npt.NDArray[np.int64]:
        """Which of its positions hold features, ascending."""
        return np.arange(self.num_tokens) if self.positions is None else np.flatnonzero(self.positions.holds_features)

    @property
    def num_features(self) -> int:
        """How many of its positions hold features."""
        return self.num_tokens if self.positions is None else int(self.positions.holds_features.sum())


@dataclass(frozen=True, slots=True)
class ImagePlacement:
    """`image` covers positions [offset, offset + image.num_tokens)."""

    offset: int
    image: RenderedImage


@dataclass(frozen=True, slots=True, eq=False)
class RenderedInput:
    """`token_ids`: int32 [N], the image pad id at image positions, or the image's own ids if it has any. `images` alone
    says which positions are images: a pad id elsewhere is text."""

    token_ids: npt.NDArray[np.int32]
    images: tuple[ImagePlacement, ...] = field(default=())

    @property
    def length(self) -> int:
        """Number of positions."""
        return int(self.token_ids.size)

    @property
    def holds_features(self) -> npt.NDArray[np.bool_]:
        """Which positions hold features of images, [N]."""
        found = np.zeros(self.length, np.bool_)
        for placed in self.images:
            found[placed.offset + placed.image.feature_places] = True
        return found

    @property
    def ends_with_image(self) -> bool:
        """Whether the last position holds a feature of an image."""
        last = self.images[-1:]
        return any(placed.offset + int(placed.image.feature_places[-1]) + 1 == self.length for placed in last)


@dataclass(frozen=True, slots=True, eq=False)
class ReadPrompt:
    """A prompt as the model read it. `token_ids`: int32 [P], the image pad id at positions of images. `images`: the
    hex SHA-256 of each one's file, its first position and how many it has."""

    token_ids: npt.NDArray[np.int32]
    images: tuple[tuple[str, int, int], ...]

    @classmethod
    def of(cls, prompt: RenderedInput) -> "ReadPrompt":
        """Without the pixels."""
        images = ((placed.image.content_hash, placed.offset, placed.image.num_tokens) for placed in prompt.images)
        return cls(prompt.token_ids, tuple(images))


def rendered_bytes(inputs: Iterable[RenderedInput]) -> int:
    """Bytes of the images of `inputs`, each image once."""
    images = {id(placed.image): placed.image for given in inputs for placed in given.images}
    return sum(image.num_bytes for image in images.values())


class Renderer(Protocol):
    """Renders `ModelInput`s for one base model, for training, sampling and logprob requests alike.

    Worker threads call `render`, several at once; it blocks (decoding, processing), so the event loop must not. Each
    image is processed once per content hash. `where` prefixes error messages (`data[3].model_input`). Raises
    InvalidRequestError for one input alone: a broken image, a token id outside the vocabulary, different counts of
    image tokens by vLLM, HF and `expected_tokens` (the message has all three), an image for a text model.
    """

    @property
    def takes_images(self) -> bool:
        """Whether the base model takes images."""

    @property
    def images_processed(self) -> int:
        """Number of images decoded and processed so far (cache misses)."""

    def render(self, model_input: ModelInput, where: str) -> RenderedInput: ...
