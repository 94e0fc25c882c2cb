"""Processed images by content hash: each processed once, however many threads ask, and kept while there is room."""

import threading
from collections.abc import Callable
from concurrent.futures import Future

from cachetools import LRUCache
from tinker_local.backend.rendering.rendered_input import RenderedImage


class ImageCache:
    """Least recently used images go first; one larger than `capacity_bytes` is not kept. Safe for threads.

    `images_processed`: how often `make` succeeded.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._kept: LRUCache[str, RenderedImage] = LRUCache(capacity_bytes, getsizeof=lambda image: image.num_bytes)
        self._in_work: dict[str, Future[RenderedImage]] = {}
        self._lock = threading.Lock()
        self.images_processed = 0

    def get(self, content_hash: str, make: Callable[[], RenderedImage]) -> RenderedImage:
        """The image, made by `make` if it is new. Concurrent callers wait for it, or get the same error of `make`."""
        with self._lock:
            if content_hash in self._kept:
                return self._kept[content_hash]
            waiting = self._in_work.get(content_hash)
            if waiting is None:
                mine = self._in_work[content_hash] = Future()
        if waiting is not None:
            return waiting.result()
        try:
            image = make()
        except BaseException as error:
            with self._lock:
                del self._in_work[content_hash]
            mine.set_exception(error)
            raise
        with self._lock:
            del self._in_work[content_hash]
            if image.num_bytes <= self._kept.maxsize:
                self._kept[content_hash] = image
            self.images_processed += 1
        mine.set_result(image)
        return image
