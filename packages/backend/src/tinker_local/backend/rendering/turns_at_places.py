"""Turns at places that may be slow, so that waiting for one does not delay callers that need another."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator


class TurnsAtPlaces:
    """At most `limit` hold a turn at each place. A caller gets all of its turns at once, or waits with none.
    Belongs to one event loop."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held: Counter[str] = Counter()
        self._waiting: dict[asyncio.Future[None], frozenset[str]] = {}  # the oldest first

    @contextlib.asynccontextmanager
    async def at(self, places: frozenset[str]) -> AsyncIterator[None]:
        """A turn at each of `places`."""
        if self._free(places):
            self._held.update(places)
        else:
            await self._wait(places)
        try:
            yield
        finally:
            self._leave(places)

    async def _wait(self, places: frozenset[str]) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[turn] = places
        try:
            await turn
        except asyncio.CancelledError:
            if self._waiting.pop(turn, None) is None:  # it was given in the meantime
                self._leave(places)
            raise

    def _leave(self, places: frozenset[str]) -> None:
        self._held.subtract(places)
        for turn, wanted in list(self._waiting.items()):
            if not turn.cancelled() and self._free(wanted):
                del self._waiting[turn]
                self._held.update(wanted)
                turn.set_result(None)

    def _free(self, places: frozenset[str]) -> bool:
        return all(self._held[place] < self._limit for place in places)
