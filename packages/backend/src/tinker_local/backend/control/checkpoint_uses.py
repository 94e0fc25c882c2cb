"""Who reads a checkpoint's folder: it is deleted when the last of them is done."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime

from tinker_local.backend.storage.records import CheckpointRecord

Version = tuple[str, datetime]


def version_of(record: CheckpointRecord) -> Version:
    """A checkpoint whose expiry or publication was changed is the same; one that was saved again is another."""
    return record.tinker_path, record.created_at


class CheckpointUses:
    """Counts, on the event loop, the loads and samples that have begun with each checkpoint."""

    def __init__(self) -> None:
        self._counts: Counter[Version] = Counter()
        self._unused: dict[Version, asyncio.Event] = {}

    def take(self, record: CheckpointRecord) -> None:
        """Somebody begins to use the checkpoint."""
        self._counts[version_of(record)] += 1

    def leave(self, record: CheckpointRecord) -> None:
        """One who took it is done."""
        version = version_of(record)
        self._counts[version] -= 1
        if not self._counts[version]:
            del self._counts[version]
            if (event := self._unused.pop(version, None)) is not None:
                event.set()

    @contextmanager
    def using(self, record: CheckpointRecord) -> Iterator[None]:
        """`take` and `leave`."""
        self.take(record)
        try:
            yield
        finally:
            self.leave(record)

    def in_use(self, record: CheckpointRecord) -> bool:
        return version_of(record) in self._counts

    async def unused(self, record: CheckpointRecord) -> None:
        """Wait until nobody uses the checkpoint."""
        while self.in_use(record):
            await self._unused.setdefault(version_of(record), asyncio.Event()).wait()
