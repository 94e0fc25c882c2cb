"""Supervision of an engine that runs in separate processes: when these have ended, they are started again."""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from tinker_local.backend.daemon_thread import in_daemon_thread
from tinker_local.backend.scheduling.memory_sharing import MemorySharing

log = logging.getLogger(__name__)

SHORT_LIFE = 10.0
"""Seconds. A process that ends sooner after its start than this may end so again."""

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
"""Seconds before the start after the second short life in a row, doubled for each later one, and the most."""


PATIENCE = 5.0
"""Seconds. Calls wait for a start that is at most this far away, and fail otherwise."""


class Supervised(Protocol):
    """An engine in processes that end together. Only `ended` and `why` do not block."""

    ended: bool
    """Whether the processes have ended by themselves, or were killed because they did not answer."""

    on_end: Callable[[], None]
    """Called from a thread after `ended` was set, and before a running call fails. Set by the supervision."""

    @property
    def why(self) -> str:
        """How they ended, as a sentence without its end."""

    def restart(self) -> None:
        """Start new processes, which take no memory of a device yet."""

    def load(self) -> None:
        """Load the engine in the new processes; raises if they end or the time limit is over."""


class Adapters(Protocol):
    """What the training runs of one base model have in the trainer."""

    async def lost(self, why: str) -> None:
        """The trainer has ended: fail what cannot go on."""

    async def restore(self) -> None:
        """A new trainer is loaded: put the adapters of all others into it, with `MemorySharing.in_turn`."""


class Supervision:
    """Starts the trainer of a base model again, and restores its adapters, each time that its processes have ended.

    The first start follows at once. A trainer that ends within `SHORT_LIFE` of its start, twice in a row, is started
    after a pause that doubles, and during a long one every call fails. `problem`: what is wrong now; None if the
    trainer works. `restarts`: how often it was started again.
    """

    def __init__(self, trainer: Supervised, memory_sharing: MemorySharing) -> None:
        self.problem: str | None = None
        self.restarts = 0
        self.adapters: Adapters | None = None
        self._trainer = trainer
        self._memory_sharing = memory_sharing
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        self._up_since: float | None = time.monotonic()
        self._short_lives = 0
        self._dead = False
        trainer.on_end = self._on_end
        if trainer.ended:
            self._lost()

    def close(self) -> None:
        """Start nothing any more."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()

    def _on_end(self) -> None:
        """In a thread."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._lost)

    def _lost(self) -> None:
        self._dead = True
        recovers = self._task is not None and not self._task.done()  # and will see it
        if not self._closed and not recovers:
            self.problem = f"{self._trainer.why}; a new one is starting"
            self._memory_sharing.trainer_lost()
            self._task = asyncio.create_task(self._recover(), name="restart-trainer")

    async def _recover(self) -> None:
        why = self._trainer.why
        if self.adapters is not None:
            try:
                await self.adapters.lost(why)
            except Exception:
                log.exception("training runs were not told that their trainer has ended")
        self._memory_sharing.settle()
        while self._dead:
            await self._pause(why)
            self._dead = False
            try:
                await self._start()
            except Exception as error:
                self._dead = True
                log.exception("the trainer could not be started again")
                why = f"a new trainer could not be started: {error}"
        self.problem = None
        self._up_since = time.monotonic()
        self._memory_sharing.trainer_back()
        log.warning("the trainer works again")

    async def _pause(self, why: str) -> None:
        """Wait before the next start if the last lives were short."""
        short = self._up_since is None or time.monotonic() - self._up_since < SHORT_LIFE
        self._short_lives = self._short_lives + 1 if short else 0
        self._up_since = None
        if self._short_lives < 2:
            return
        seconds = pause_after(self._short_lives)
        self.problem = (
            f"{why}; that was {self._short_lives} times in a row soon after its start, so the next start waits "
            f"{seconds:.0f} s"
        )
        log.error("%s", self.problem)
        if seconds > PATIENCE:
            self._memory_sharing.refuse(self.problem)
        await asyncio.sleep(seconds)
        self._memory_sharing.refuse(None)

    async def _start(self) -> None:
        self.restarts += 1
        await in_daemon_thread(self._trainer.restart)
        await self._memory_sharing.load_trainer(self._trainer.load, self._restore)

    async def _restore(self) -> None:
        if self.adapters is not None:
            await self.adapters.restore()


def pause_after(short_lives: int) -> float:
    """Seconds before the start after so many short lives in a row, two or more."""
    return min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(short_lives - 2, 30))
