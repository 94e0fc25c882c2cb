"""Memory that owners share fairly, whatever each of them sends."""

from collections.abc import Collection

from tinker_local.backend.threads import Ledger


class SharedBytes:
    """Counts bytes that owners hold, `most` in all.

    An owner is over its share when it has something and holds more than is left. So one that is alone has half, n that
    take what they can have 1 / (n + 1) each, and as much is always left for another. (Dynamic thresholds: Choudhury and
    Hahne, 1998.)
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.total = 0
        self._held: Ledger[str] = Ledger()

    def take(self, owner: str, size: int) -> None:
        """Count `size` bytes more, or with a negative number less."""
        self._held[owner] += size
        self.total += size

    def give(self, owner: str, size: int) -> None:
        """Count `size` bytes less."""
        self.take(owner, -size)

    def of(self, owner: str) -> int:
        """Bytes that `owner` holds."""
        return self._held[owner]

    def owners(self) -> Collection[str]:
        """Owners that hold any."""
        return self._held.keys()

    def over(self, owner: str) -> bool:
        """Whether `owner` has something, and more than is left."""
        return self._held[owner] > max(0, self.most - self.total)
