"""Processed images by content hash: each processed once, however many threads ask, and kept while there is room."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from tinker_local.backend.rendering.interface import RenderedImage


@dataclass(frozen=True, slots=True, eq=False)
class SizedImage:
    """`num_bytes`: what keeping `image` costs."""

    image: RenderedImage
    num_bytes: int


class ImageCache:
    """Least recently used images go first; one larger than `capacity_bytes` is not kept. Safe for threads.

    `images_processed`: how often `make` succeeded.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity = capacity_bytes
        self._kept: OrderedDict[str, SizedImage] = OrderedDict()
        self._in_work: dict[str, Future[RenderedImage]] = {}
        self._bytes = 0
        self._lock = threading.Lock()
        self.images_processed = 0

    def get(self, content_hash: str, make: Callable[[], SizedImage]) -> RenderedImage:
        """The image, by `make` if it is new; whoever asks meanwhile waits for it, or for the error of `make`."""
        with self._lock:
            if content_hash in self._kept:
                self._kept.move_to_end(content_hash)
                return self._kept[content_hash].image
            waiting = self._in_work.get(content_hash)
            if waiting is None:
                mine = self._in_work[content_hash] = Future()
        if waiting is not None:
            return waiting.result()
        try:
            sized = make()
        except BaseException as error:
            with self._lock:
                del self._in_work[content_hash]
            mine.set_exception(error)
            raise
        with self._lock:
            del self._in_work[content_hash]
            self._keep(content_hash, sized)
            self.images_processed += 1
        mine.set_result(sized.image)
        return sized.image

    def _keep(self, content_hash: str, sized: SizedImage) -> None:
        if sized.num_bytes > self._capacity:
            return
        self._kept[content_hash] = sized
        self._bytes += sized.num_bytes
        while self._bytes > self._capacity:
            _, dropped = self._kept.popitem(last=False)
            self._bytes -= dropped.num_bytes
