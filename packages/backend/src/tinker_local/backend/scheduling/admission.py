"""How much may be queued for training, and what happens to a submit beyond that.

Knows nothing of asyncio, HTTP or clocks. The rules:

1. A submit beyond a bound is refused, and the client sends it again after a while, with the same `seq_id`. (The SDK
   does: HTTP 429 with Retry-After.) Nothing of it is kept but when it was refused first, so that the model's order
   waits for it as for a late chunk.
2. It is refused only while its model has something that can run without it. So no bound can lock a model: what is
   needed to go on (the first of several chunks, which the SDK sends last; a lower `seq_id` of which a higher one was
   taken) is always taken, and one client's queue never keeps another's model from running.
3. No submit is refused for longer than `PATIENCE`. The SDK gives up after five minutes of refusals, and its training
   client does not survive that; a queue of long works may be full for longer.
4. What can never fit (a single forward_backward of more bytes than the bound of all together) is no matter of
   waiting: it fails, in its place.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from tinker_local.backend.scheduling.command_log import CommandLog
from tinker_local.types import TooManyRequestsError

PATIENCE = 120.0
"""Seconds after its first refusal at which a submit is taken whatever the bounds: well below the SDK's 300."""

SHORTEST_RETRY, LONGEST_RETRY = 0.5, 4.0
"""Seconds after which a refused submit is to be sent again: half the time that it has been refused for."""


class Load(NamedTuple):
    """Commands, and bytes of their requests, that have not been taken to run."""

    commands: int = 0
    size: int = 0


def total(loads: Iterable[Load]) -> Load:
    """The sum."""
    commands = size = 0
    for load in loads:
        commands += load.commands
        size += load.size
    return Load(commands, size)


class Queued(Protocol):
    """A model as the bounds see it."""

    @property
    def session_id(self) -> str: ...

    @property
    def commands(self) -> CommandLog[Any]: ...

    @property
    def load(self) -> Load: ...

    @property
    def now(self) -> Callable[[], float]: ...


@dataclass(frozen=True, slots=True)
class Bounds:
    """The most that may be queued for all sessions together, and for one."""

    all: Load
    session: Load

    def check(self, queue: Queued, queues: Iterable[Queued], seq_id: int, size: int) -> None:
        """TooManyRequestsError if a command of `size` bytes is not to be taken for now; `queues`: of all models."""
        now = queue.now()
        if not queue.commands.can_run(now):
            return
        loads = [(other.session_id, other.load) for other in queues]
        reason = self._exceeded(
            size, total(load for name, load in loads if name == queue.session_id), total(load for _, load in loads)
        )
        since = queue.commands.refused_since(seq_id)
        waited = 0.0 if since is None else now - since
        if reason is not None and waited < PATIENCE:
            queue.commands.refuse(seq_id, now)
            raise TooManyRequestsError(reason, retry_after=retry_after(waited))

    def too_large(self, queue: Queued, seq_id: int, size: int) -> str | None:
        """Why a gradient of `size` bytes could never run behind what its model waits with already; None if it can."""
        waiting = 0 if seq_id == queue.commands.next_seq_id or queue.commands.can_run(queue.now()) else queue.load.size
        if waiting + size <= self.all.size:
            return None
        behind = f" behind {waiting} bytes of the model that cannot run yet" if waiting else ""
        return (
            f"{size} bytes{behind} exceed the {self.all.size} bytes that the server queues; send fewer datums at once"
        )

    def _exceeded(self, size: int, session: Load, everything: Load) -> str | None:
        """Which bound a command of `size` bytes would exceed, in words; None if none."""
        for load, bound, whose in ((session, self.session, "this session"), (everything, self.all, "all sessions")):
            if load.commands + 1 > bound.commands:
                return f"{load.commands} training requests of {whose} are queued, the most is {bound.commands}"
            if load.size + size > bound.size:
                return (
                    f"training requests of {load.size} bytes of {whose} are queued, with this one of {size} bytes "
                    f"they would exceed the most, {bound.size} bytes"
                )
        return None


def retry_after(waited: float) -> float:
    """Seconds until a submit that has been refused for `waited` seconds is to be sent again."""
    return min(LONGEST_RETRY, max(SHORTEST_RETRY, waited / 2))
