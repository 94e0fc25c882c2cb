"""Which images the trainer's process has: this side decides, the other obeys, so the two cannot disagree."""

from collections import OrderedDict
from collections.abc import Iterable, Mapping

from tinker_local.backend.rendering.interface import RenderedImage


class SentImages:
    """Images used last stay in the trainer's process, up to `max_bytes` of pixel values between two calls."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._sizes: OrderedDict[str, int] = OrderedDict()
        self._bytes = 0

    def missing(self, images: Mapping[str, RenderedImage]) -> list[RenderedImage]:
        """Those of a call that have to be sent before it; the others count as used now."""
        self._touch(content_hash for content_hash in images if content_hash in self._sizes)
        return [image for content_hash, image in images.items() if content_hash not in self._sizes]

    def sent(self, image: RenderedImage) -> None:
        """`image` was sent."""
        self._sizes[image.content_hash] = image.pixel_values.nbytes
        self._bytes += image.pixel_values.nbytes

    def too_many(self) -> list[str]:
        """What the other side must forget after the call, those used longest ago first."""
        forgotten = []
        while self._bytes > self._max_bytes:
            content_hash, size = self._sizes.popitem(last=False)
            self._bytes -= size
            forgotten.append(content_hash)
        return forgotten

    def _touch(self, content_hashes: Iterable[str]) -> None:
        for content_hash in content_hashes:
            self._sizes.move_to_end(content_hash)
