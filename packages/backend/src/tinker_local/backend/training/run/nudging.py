"""Moves the inputs of a model by less than its dtype can tell apart, to see how far rounding carries its logprobs.

Every product and sum that follows then rounds otherwise, so the logprobs move about as much as those of other kernels
that compute the same: Monte Carlo arithmetic (Parker, 1997), at the inputs alone.
"""

from dataclasses import replace

import numpy as np
import torch
from tinker_local.backend.rendering.rendered_input import RenderedImage, RenderedInput


def nudge_in_place(embeds: torch.Tensor, seed: int, start: int) -> None:
    """Move each number of `embeds` [T, H], the positions from `start` on, by at most a unit in its last place."""
    random = np.random.Generator(np.random.Philox([seed, start]))
    factors = _factors(random, tuple(embeds.shape), torch.finfo(embeds.dtype).eps)
    embeds.copy_(embeds.double() * torch.from_numpy(factors).to(embeds.device))


def images_nudged(given: RenderedInput, dtype: torch.dtype, seed: int) -> RenderedInput:
    """`given` with the same for the pixels of its images, as `dtype` rounds them. Caches take them for other images."""
    epsilon = torch.finfo(dtype).eps

    def nudged(image: RenderedImage) -> RenderedImage:
        random = np.random.Generator(np.random.Philox(seed))
        pixels = image.pixel_values * _factors(random, image.pixel_values.shape, epsilon)
        return replace(
            image, content_hash=f"{image.content_hash} nudged {seed}", pixel_values=pixels.astype(np.float32)
        )

    return replace(given, images=tuple(replace(placed, image=nudged(placed.image)) for placed in given.images))


def _factors(random: np.random.Generator, shape: tuple[int, ...], epsilon: float) -> np.ndarray:
    return 1 + epsilon * random.uniform(-0.5, 0.5, shape)
