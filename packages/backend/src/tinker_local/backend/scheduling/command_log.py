"""The order of one model's commands: by `seq_id`, whatever order they arrive in.

Knows nothing of asyncio, trainers or HTTP: time is passed in, and what to run is taken out. The rules:

1. Commands run in `seq_id` order, from 1. A `seq_id` that was taken again is the same command (the caller dedupes).
2. A hole (a `seq_id` that never came) is bridged at once when a command arrives that is not a forward/backward and
   has a higher id: the SDK sends it only after everything before it was submitted or given up. Chunks of one
   forward/backward arrive as 2, 3, ..., 1, so a hole below a forward/backward waits, but at most `patience` seconds.
3. A bridged id is closed: `accepts` is false for it.
4. A bridged hole, like a failed forward/backward, spoils the gradient: the next optimizer step must fail.
5. An id that was refused for now (there was no room) is going to be sent again: no higher command bridges it before
   `REFUSED_PATIENCE` seconds after its last refusal.
"""

import math
from dataclasses import dataclass
from typing import Generic, TypeVar

C = TypeVar("C")

HOLE_PATIENCE = 360.0
"""Seconds to wait for a missing chunk: the SDK retries a submit for five minutes."""

REFUSED_PATIENCE = 60.0
"""Seconds to wait for a refused id to be sent again: the longest pause of the SDK between two is half of it."""

MOST_REFUSED = 4096
"""Refused ids that are remembered; a client that is refused sends a few chunks at once and then waits."""


@dataclass(slots=True)
class Entry(Generic[C]):
    seq_id: int
    command: C
    waits_for_holes: bool


@dataclass(slots=True)
class Refusals:
    """When one id was refused, first and last."""

    first: float
    last: float


class CommandLog(Generic[C]):
    """The commands of one model that have not run yet, in order."""

    def __init__(self, patience: float = HOLE_PATIENCE) -> None:
        self.next_seq_id = 1
        self._entries: dict[int, Entry[C]] = {}
        self._refused: dict[int, Refusals] = {}
        self._bridge_to = 1
        self._patience = patience
        self._hole_since: float | None = None
        self._spoiled: str | None = None

    def __len__(self) -> int:
        """Commands that have not been taken."""
        return len(self._entries)

    def accepts(self, seq_id: int) -> bool:
        """Whether a new command with this id can still run; false if the model has gone on without it."""
        return seq_id >= self.next_seq_id and seq_id not in self._entries

    def add(self, seq_id: int, command: C, *, chunk: bool, now: float) -> None:
        """Take a command that `accepts` accepted. `chunk`: a forward/backward, below which holes may still fill."""
        self._entries[seq_id] = Entry(seq_id, command, chunk)
        self._refused.pop(seq_id, None)
        if not chunk:
            self._bridge_to = max(self._bridge_to, seq_id)
        self._look_for_hole(now)

    def head(self, now: float) -> C | None:
        """The next command in order, bridging holes that the rules say to bridge; None if there is none yet."""
        if not self._entries:
            return None
        if self.next_seq_id not in self._entries:
            overdue = self._hole_since is not None and now - self._hole_since >= self._patience
            if not self._bridged(now) and not overdue:
                return None
            first = min(self._entries)
            missing = f"{self.next_seq_id}" if first == self.next_seq_id + 1 else f"{self.next_seq_id} to {first - 1}"
            self.spoil(f"the request with seq_id {missing} never arrived")
            self.next_seq_id = first
            self._hole_since = None
            self._refused = {seq_id: times for seq_id, times in self._refused.items() if seq_id >= first}
        return self._entries[self.next_seq_id].command

    def can_run(self, now: float) -> bool:
        """Whether there is a command that waits for no other to arrive."""
        return bool(self._entries) and (self.next_seq_id in self._entries or self._bridged(now))

    def refuse(self, seq_id: int, now: float) -> None:
        """The command is not taken for now, and will be sent again."""
        if (times := self._refused.get(seq_id)) is not None:
            times.last = now
        elif len(self._refused) < MOST_REFUSED:
            self._refused[seq_id] = Refusals(now, now)

    def refused_since(self, seq_id: int) -> float | None:
        """When a command that has not been taken yet was refused first; None if it never was."""
        times = self._refused.get(seq_id)
        return None if times is None else times.first

    def pop(self, now: float) -> None:
        """The head has been taken to run."""
        del self._entries[self.next_seq_id]
        self.next_seq_id += 1
        self._look_for_hole(now)

    def deadline(self) -> float | None:
        """When a hole at the front is to be bridged, or None if there is none."""
        if self._hole_since is None:
            return None
        deadline = self._hole_since + self._patience
        first = min(self._entries)
        return min(deadline, self._refused_until(first)) if first <= self._bridge_to else deadline

    def pending(self) -> list[C]:
        """Commands that have not been taken, in order."""
        return [self._entries[seq_id].command for seq_id in sorted(self._entries)]

    def spoil(self, reason: str) -> None:
        """The gradient added up since the last step is not what the client thinks: the next step must fail."""
        self._spoiled = self._spoiled or reason

    def take_spoiled(self) -> str | None:
        """Why the gradient is spoiled, if it is; the next window starts clean."""
        reason, self._spoiled = self._spoiled, None
        return reason

    def _bridged(self, now: float) -> bool:
        """Whether the hole at the front need not be waited for."""
        first = min(self._entries)
        return first <= self._bridge_to and self._refused_until(first) <= now

    def _refused_until(self, first: int) -> float:
        """When no refused id below `first` is waited for any longer."""
        last = (times.last for seq_id, times in self._refused.items() if seq_id < first)
        return max((when + REFUSED_PATIENCE for when in last), default=-math.inf)

    def _look_for_hole(self, now: float) -> None:
        if self._entries and self.next_seq_id not in self._entries:
            if self._hole_since is None:
                self._hole_since = now
        else:
            self._hole_since = None
