"""Which requests of one client have ended, in the order in which they did: what `retrieve_futures` reads."""

import asyncio
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from tinker_local.backend.scheduling.operations import Operation


@dataclass(frozen=True, slots=True)
class Completion:
    """One request that has ended, at `time` (monotonic seconds); `cursor` is its place in the order, from 1."""

    cursor: int
    request_id: str
    failed: bool
    time: float


class CompletionLog:
    """What has ended and has not been seen. Nobody has to ask: what is older than `retention` seconds is dropped, as
    the results themselves are."""

    def __init__(self, retention: float) -> None:
        self._retention = retention
        self._unseen: deque[Completion] = deque()
        self._last = 0
        self._news = asyncio.Event()
        self._stopped = False

    @property
    def last(self) -> int:
        """The cursor of what ended last."""
        return self._last

    def __len__(self) -> int:
        """How many are kept."""
        return len(self._unseen)

    def watch(self, operation: Operation[Any]) -> None:
        """Note `operation` as soon as it has ended."""
        operation.when_done(self._ended)

    def _ended(self, operation: Operation[Any]) -> None:
        now = time.monotonic()
        while self._unseen and self._unseen[0].time < now - self._retention:
            self._unseen.popleft()
        self._last += 1
        self._unseen.append(Completion(self._last, operation.request_id, operation.failed, now))
        self._news.set()

    async def after(self, cursor: int, timeout: float) -> list[Completion]:
        """All that ended after `cursor`, waiting `timeout` seconds at most for the first of them; what ended before
        is forgotten. `cursor` must not be beyond `last`."""
        while self._unseen and self._unseen[0].cursor <= cursor:
            self._unseen.popleft()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while self._last <= cursor and not self._stopped:
                    self._news.clear()
                    await self._news.wait()
        return [completion for completion in self._unseen if completion.cursor > cursor]

    def stop_waiting(self) -> None:
        """Let whoever waits go, now and from now on."""
        self._stopped = True
        self._news.set()
