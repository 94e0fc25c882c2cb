"""Supervision of an engine that runs in separate processes: when these have ended, they are started again."""

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from tinker_local.backend.daemon_thread import in_daemon_thread
from tinker_local.backend.sampling.process_sampler import ProcessSampler
from tinker_local.backend.sampling.replica_pool import ReplicaPool, replica_name
from tinker_local.backend.sampling.sampler import Sampler
from tinker_local.backend.scheduling.memory_sharing import Gate, MemorySharing

log = logging.getLogger(__name__)

SHORT_LIFE = 10.0
"""Seconds. A process that ends sooner after its start than this may end so again."""

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
"""Seconds before the start after the second short life in a row, doubled for each later one, and the most."""


WATCHED, STALLED = 2.0, 10.0
"""Seconds from one look at a sampler's progress to the next, and without progress until health says so."""

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


class Supervision(ABC):
    """Starts an engine of a base model again, each time that its processes have ended.

    The first start follows at once. An engine that ends within `SHORT_LIFE` of its start, twice in a row, is started
    after a pause that doubles, and during a long one every call fails. `name`: of the engine. `gate`: closed while it
    does not work. `problem`: what is wrong now; None if it works. `restarts`: how often it was started again.
    """

    def __init__(self, name: str, engine: Supervised, gate: Gate) -> None:
        self.problem: str | None = None
        self.restarts = 0
        self._name = name
        self._engine = engine
        self._gate = gate
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        self._up_since: float | None = time.monotonic()
        self._short_lives = 0
        self._dead = False
        engine.on_end = self._on_end
        if engine.ended:
            self._lost()

    def close(self) -> None:
        """Start nothing any more."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()

    @abstractmethod
    async def _load(self, load: Callable[[], None]) -> None:
        """Load the engine with `load`, which blocks, and what it had."""

    @abstractmethod
    def _ended(self) -> None:
        """The engine has ended; calls will fail next."""

    @abstractmethod
    async def _settle(self, why: str) -> None:
        """Fail what cannot go on."""

    def _on_end(self) -> None:
        """In a thread."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._lost)

    def _lost(self) -> None:
        self._dead = True
        if self._closed:
            return
        self._gate.close()
        recovers = self._task is not None and not self._task.done()  # and will see it
        if not recovers:
            self.problem = f"{self._engine.why}; a new one is starting"
            self._ended()
            self._task = asyncio.create_task(self._recover(), name=f"restart-{self._name}")

    async def _recover(self) -> None:
        why = self._engine.why
        await self._settle(why)
        while self._dead:
            await self._pause(why)
            self._dead = False
            try:
                self.restarts += 1
                await in_daemon_thread(self._engine.restart)
                await self._load(self._engine.load)
            except Exception as error:
                self._dead = True
                log.exception("the %s could not be started again", self._name)
                why = f"a new {self._name} could not be started: {error}"
        self.problem = None
        self._up_since = time.monotonic()
        self._gate.open()
        log.warning("the %s works again", self._name)

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
            self._gate.refuse(self.problem)
        await asyncio.sleep(seconds)
        self._gate.refuse(None)


class TrainerSupervision(Supervision):
    """Supervises a trainer, and restores its `adapters`."""

    def __init__(self, trainer: Supervised, memory_sharing: MemorySharing) -> None:
        self.adapters: Adapters | None = None
        self._memory_sharing = memory_sharing
        super().__init__("trainer", trainer, memory_sharing.trainer_gate)

    def _ended(self) -> None:
        self._memory_sharing.trainer_lost()

    async def _settle(self, why: str) -> None:
        if self.adapters is not None:
            try:
                await self.adapters.lost(why)
            except Exception:
                log.exception("training runs were not told that their trainer has ended")
        self._memory_sharing.settle()

    async def _load(self, load: Callable[[], None]) -> None:
        await self._memory_sharing.load_trainer(load, self._restore)

    async def _restore(self) -> None:
        if self.adapters is not None:
            await self.adapters.restore()


class SamplerSupervision(Supervision):
    """Supervises a sampler, or with its `gate` one of several replicas (`name`). Its versions are loaded again when
    they are sampled from, and requests that were in it run once more (`WakingSampler`), also in another replica."""

    def __init__(
        self, sampler: Supervised, memory_sharing: MemorySharing, gate: Gate | None = None, name: str = "sampler"
    ) -> None:
        self._memory_sharing = memory_sharing
        super().__init__(name, sampler, gate or memory_sharing.sampler_gate)

    @property
    def works(self) -> bool:
        """Whether it can be sampled from."""
        return self._gate.is_open

    def _ended(self) -> None:
        """Nothing waits for it but calls."""

    async def _settle(self, why: str) -> None:
        """Everything goes on."""

    async def _load(self, load: Callable[[], None]) -> None:
        await self._memory_sharing.load_sampler(load, self._gate)


class StallWatch:
    """Sees when a sampler makes no progress: no step of it ends, nor the command between two."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._asked: float | None = None
        self._task = asyncio.create_task(self._watch(), name="stalls")

    @property
    def problem(self) -> str | None:
        """That it stalls, and for how long; None while it does not."""
        seconds = 0.0 if self._asked is None else time.monotonic() - self._asked
        return f"sampling stalls: no step has ended for {seconds:.0f} s" if seconds > STALLED else None

    def close(self) -> None:
        """Watch no longer."""
        self._task.cancel()

    async def _watch(self) -> None:
        while True:
            self._asked = time.monotonic()
            with suppress(Exception):  # one that has ended is supervised
                await self._sampler.pulse()
            self._asked = None
            await asyncio.sleep(WATCHED)


def supervise_sampler(sampler: Sampler, memory_sharing: MemorySharing) -> tuple[SamplerSupervision, ...]:
    """The supervisions of a sampler, one for each process that it has."""
    if isinstance(sampler, ReplicaPool):
        gates = memory_sharing.replica_gates(len(sampler.replicas))
        return tuple(
            SamplerSupervision(replica, memory_sharing, gate, replica_name(at))
            for at, (replica, gate) in enumerate(zip(sampler.replicas, gates, strict=True))
            if isinstance(replica, ProcessSampler)
        )
    return (SamplerSupervision(sampler, memory_sharing),) if isinstance(sampler, ProcessSampler) else ()


def pause_after(short_lives: int) -> float:
    """Seconds before the start after so many short lives in a row, two or more."""
    return min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(short_lives - 2, 30))
