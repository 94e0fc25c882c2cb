"""What a renderer returns: token ids with explicit image positions, and each image as both engines read it."""

from collections.abc import Iterable
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

    `around`: None if chat templates write all three, with one pad. Otherwise they write `start` alone, of which
    processors make `start`, pads and `end` between two of this text.
    """

    start: int
    pad: int
    end: int
    around: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class TrainerImage:
    """An image as the trainer reads it. `pixel_values` float32 [patches, patch_dim], or [1, 3, height, width] where
    the model cuts it itself; `grid_thw`: patches in time, height and width before merging, or positions of an image
    that the model cuts itself; `num_tokens`: positions in the prompt."""

    pixel_values: npt.NDArray[np.float32]
    grid_thw: tuple[int, int, int]
    num_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class SamplerImage:
    """An image as the sampler reads it. `item`: of `num_bytes`; `num_tokens`: positions in the prompt."""

    item: Any
    num_bytes: int
    num_tokens: int


Processed = TypeVar("Processed", TrainerImage, SamplerImage, covariant=True)


class ImageProcessor(Protocol[Processed]):
    """Prepares decoded RGB images for one engine. Thread-safe. Raises ImageError for images that it refuses."""

    def process(self, image: "Image") -> Processed: ...


@dataclass(frozen=True, slots=True, eq=False)
class RenderedImage:
    """One image, decoded and processed once.

    `content_hash`: hex SHA-256 of the file's bytes. `num_tokens`: its positions, the same for vLLM, the HF processor
    and (if given) the client. `pixel_values`, `grid_thw`: as in `TrainerImage`. `vllm_item`: as in `SamplerImage`, of
    `item_bytes`; None where no vLLM runs.
    """

    content_hash: str
    num_tokens: int
    pixel_values: npt.NDArray[np.float32]
    grid_thw: tuple[int, int, int]
    vllm_item: Any = None
    item_bytes: int = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of memory, for both engines."""
        return self.pixel_values.nbytes + self.item_bytes


@dataclass(frozen=True, slots=True)
class ImagePlacement:
    """`image` covers positions [offset, offset + image.num_tokens)."""

    offset: int
    image: RenderedImage


@dataclass(frozen=True, slots=True, eq=False)
class RenderedInput:
    """`token_ids`: int32 [N], the image pad id at image positions. `images` alone says which positions are images: a
    pad id elsewhere is text."""

    token_ids: npt.NDArray[np.int32]
    images: tuple[ImagePlacement, ...] = field(default=())

    @property
    def length(self) -> int:
        """Number of positions."""
        return int(self.token_ids.size)

    @property
    def ends_with_image(self) -> bool:
        """Whether the last position is one of an image."""
        last = self.images[-1:]
        return any(placed.offset + placed.image.num_tokens == self.length for placed in last)


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
