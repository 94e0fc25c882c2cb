"""What a renderer gives: token ids with explicit image positions, and each image as both engines read it."""

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from tinker_local.types import ModelInput


@dataclass(frozen=True, slots=True, eq=False)
class RenderedImage:
    """One image, decoded and processed once.

    `content_hash`: hex SHA-256 of the file's bytes. `num_tokens`: positions that it takes, the same for vLLM, the HF
    processor and (if given) the client. `pixel_values`: float32 [patches, patch_dim] as HF's processor gives them.
    `grid_thw`: patches in time, height and width before merging. `vllm_item`: what vLLM's renderer made of it (None
    where no vLLM runs).
    """

    content_hash: str
    num_tokens: int
    pixel_values: npt.NDArray[np.float32]
    grid_thw: tuple[int, int, int]
    vllm_item: Any = None


@dataclass(frozen=True, slots=True)
class ImagePlacement:
    """`image` covers positions [offset, offset + image.num_tokens)."""

    offset: int
    image: RenderedImage


@dataclass(frozen=True, slots=True, eq=False)
class RenderedInput:
    """`token_ids`: int32 [N], the image pad id at image positions; which positions are images is told by `images`
    alone (a pad id elsewhere is text)."""

    token_ids: npt.NDArray[np.int32]
    images: tuple[ImagePlacement, ...] = field(default=())

    @property
    def length(self) -> int:
        """Number of positions."""
        return int(self.token_ids.size)


class Renderer(Protocol):
    """Renders `ModelInput`s for one base model; used for training, sampling and logprob requests alike.

    `render` is called from worker threads, several at once. It blocks (decoding, processing) and never runs on the
    event loop. Each image is processed once per content hash. `where` prefixes error messages (`data[3].model_input`).
    Raises InvalidRequestError for one input alone: broken image, token id outside the vocabulary, a count of image
    tokens on which vLLM, HF and `expected_tokens` do not agree (the message holds all three), images on a text model.
    """

    @property
    def images_processed(self) -> int:
        """How many images were decoded and processed so far (cache misses)."""

    def render(self, model_input: ModelInput, where: str) -> RenderedInput: ...
