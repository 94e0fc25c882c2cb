"""How long a checkpoint lives: until it expires or is deleted, and its folder until the last reader is done."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta

from tinker_local.backend.storage.records import CheckpointRecord
from tinker_local.backend.threads import Ledger
from tinker_local.types import InvalidRequestError

MIN_TTL, MAX_TTL = 3600, 10 * 365 * 86400
"""Seconds; the hosted service's bounds."""


def check_ttl(seconds: int | None) -> None:
    """InvalidRequestError for a lifetime outside one hour to ten years."""
    if seconds is not None and not MIN_TTL <= seconds <= MAX_TTL:
        raise InvalidRequestError(f"ttl_seconds: {seconds} is outside {MIN_TTL} (an hour) to {MAX_TTL} (ten years)")


def expiry(begin: datetime, seconds: int | None) -> datetime | None:
    """The time `seconds` after `begin`; None: never."""
    return None if seconds is None else begin + timedelta(seconds=seconds)


Version = tuple[str, datetime]


def version_of(record: CheckpointRecord) -> Version:
    """Changing the expiry or publication of a checkpoint keeps its version; saving it again makes another."""
    return record.tinker_path, record.created_at


class CheckpointUses:
    """Counts, on the event loop, the loads, samples and downloads in progress of each checkpoint."""

    def __init__(self) -> None:
        self._counts: Ledger[Version] = Ledger()
        self._unused: dict[Version, asyncio.Event] = {}

    def take(self, record: CheckpointRecord) -> None:
        """Begin to use the checkpoint."""
        self._counts[version_of(record)] += 1

    def leave(self, record: CheckpointRecord) -> None:
        """End one use."""
        version = version_of(record)
        self._counts[version] -= 1
        if version not in self._counts and (event := self._unused.pop(version, None)) is not None:
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
        """Wait until the checkpoint is no longer in use."""
        while self.in_use(record):
            await self._unused.setdefault(version_of(record), asyncio.Event()).wait()
