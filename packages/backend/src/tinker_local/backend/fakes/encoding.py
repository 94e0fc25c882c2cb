"""`FakeTower`: what a vision tower would have to do, counted."""

import threading

from cachetools import LRUCache
from tinker_local.backend.rendering.interface import RenderedInput

KEPT_IMAGES = 1024


class FakeTower:
    """Stands for a vision tower whose output is kept for the images used last. Safe for threads.

    `images_encoded`: how many images it would have encoded.
    """

    def __init__(self) -> None:
        self.images_encoded = 0
        self._kept: LRUCache[str, None] = LRUCache(KEPT_IMAGES)
        self._lock = threading.Lock()

    def encode(self, rendered: RenderedInput) -> None:
        """Encode the images of `rendered` that are not kept."""
        with self._lock:
            for placement in rendered.images:
                content_hash = placement.image.content_hash
                self.images_encoded += content_hash not in self._kept
                self._kept[content_hash] = None
