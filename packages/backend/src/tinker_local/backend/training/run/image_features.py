"""A cache of image features of the frozen vision tower, which never change. Adapters that train the tower have their
own features, which are computed each time."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from cachetools import LRUCache
from tinker_local.backend.families.family import ImageFeatures
from tinker_local.backend.rendering.rendered_input import RenderedImage


class ImageFeatureCache:
    """Caches the features of recently used images by content hash, up to `max_bytes` (0: none) on the model's device.

    `encode` computes the features of several images at once.
    """

    def __init__(self, encode: Callable[[Sequence[RenderedImage]], ImageFeatures], max_bytes: int) -> None:
        self._encode = encode
        self._kept: LRUCache[str, ImageFeatures] = LRUCache(max_bytes, getsizeof=_bytes)

    def features(self, images: Sequence[RenderedImage]) -> ImageFeatures:
        """Features of `images` (distinct) in order, all rows concatenated."""
        found = {image.content_hash: self._kept.get(image.content_hash) for image in images}
        new = [image for image in images if found[image.content_hash] is None]
        if new:
            found |= _by_image(self._encode(new), new)
        parts = [part for part in found.values() if part is not None]
        for content_hash, part in zip(found, parts, strict=True):
            if _bytes(part) <= self._kept.maxsize:
                self._kept[content_hash] = part
        return ImageFeatures.joined(parts)


def _by_image(features: ImageFeatures, images: Sequence[RenderedImage]) -> dict[str, ImageFeatures]:
    """Each image's features, copied so that dropping one frees its memory."""
    parts = features.split([image.num_features for image in images])
    return {
        image.content_hash: replace(
            part, embeds=part.embeds.clone(), deepstack=tuple(level.clone() for level in part.deepstack)
        )
        for image, part in zip(images, parts, strict=True)
    }


def _bytes(features: ImageFeatures) -> int:
    return sum(level.numel() * level.element_size() for level in (features.embeds, *features.deepstack))
