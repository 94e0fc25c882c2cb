"""`SteadyClock`: whether the wall clock can be trusted with a deletion, because it has not jumped for a while."""

import logging
import time
from collections.abc import Callable
from datetime import datetime

log = logging.getLogger(__name__)

JUMP = 60.0
"""Seconds between two looks by which the wall clock may differ from the monotonic one."""


class SteadyClock:
    """The wall clock `wall`, watched by a monotonic one. What it read before this process is unknown, so the grace
    period of `grace` seconds begins with it, and again with each jump in either direction."""

    def __init__(
        self, wall: Callable[[], datetime], grace: float, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._wall = wall
        self._grace = grace
        self._monotonic = monotonic
        self._steady_since = monotonic()
        self._offset = wall().timestamp() - self._steady_since

    def now(self) -> datetime:
        """The time by the wall clock."""
        return self._wall()

    def is_steady(self) -> bool:
        """Whether the grace period is over. Call it often: a jump counts from the call that sees it."""
        now = self._monotonic()
        offset = self._wall().timestamp() - now
        jump, self._offset = offset - self._offset, offset
        if abs(jump) > JUMP:
            self._steady_since = now
            if self._grace:
                log.warning("the clock jumped by %.0f s; nothing expires from disk for %.0f s", jump, self._grace)
        return now - self._steady_since >= self._grace
