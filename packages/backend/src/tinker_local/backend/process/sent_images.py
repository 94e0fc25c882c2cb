"""Which images a child process has. Only the server decides, so that the two cannot disagree."""

import math
from collections.abc import Mapping

from cachetools import LRUCache
from tinker_local.backend.rendering.rendered_input import RenderedImage


class SentImages:
    """Recently used images stay in the child process, up to `max_bytes` of pixel values between two calls."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._sizes: LRUCache[str, int] = LRUCache(math.inf, getsizeof=lambda size: size)

    def missing(self, images: Mapping[str, RenderedImage]) -> list[RenderedImage]:
        """The images of a call that have to be sent before it; the others count as used now."""
        return [image for content_hash, image in images.items() if self._sizes.get(content_hash) is None]

    def sent(self, image: RenderedImage) -> None:
        """Record that `image` was sent."""
        self._sizes[image.content_hash] = image.tensor_bytes

    def too_many(self) -> list[str]:
        """The images that the process must forget after the call, least recently used first."""
        forgotten = []
        while self._sizes.currsize > self._max_bytes:
            content_hash, _ = self._sizes.popitem()
            forgotten.append(content_hash)
        return forgotten
