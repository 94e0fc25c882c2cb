"""The order of one model's commands: by `seq_id`, whatever order they arrive in.

Knows nothing of asyncio, trainers or HTTP: time is passed in, and what to run is taken out. The rules:

1. Commands run in `seq_id` order, from 1. A `seq_id` that was taken again is the same command (the caller dedupes).
2. A hole (a `seq_id` that never came) is bridged at once when a command arrives that is not a forward/backward and
   has a higher id: the SDK sends it only after everything before it was submitted or given up. Chunks of one
   forward/backward arrive as 2, 3, ..., 1, so a hole below a forward/backward waits, but at most `patience` seconds.
3. A bridged id is closed: `accepts` is false for it.
4. A bridged hole, like a failed forward/backward, spoils the gradient: the next optimizer step must fail.
"""

from dataclasses import dataclass
from typing import Generic, TypeVar

C = TypeVar("C")

HOLE_PATIENCE = 360.0
"""Seconds to wait for a missing chunk: the SDK retries a submit for five minutes."""


@dataclass(slots=True)
class Entry(Generic[C]):
    seq_id: int
    command: C
    waits_for_holes: bool


class CommandLog(Generic[C]):
    """The commands of one model that have not run yet, in order."""

    def __init__(self, patience: float = HOLE_PATIENCE) -> None:
        self.next_seq_id = 1
        self._entries: dict[int, Entry[C]] = {}
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
        if not chunk:
            self._bridge_to = max(self._bridge_to, seq_id)
        self._look_for_hole(now)

    def head(self, now: float) -> C | None:
        """The next command in order, bridging holes that the rules say to bridge; None if there is none yet."""
        if not self._entries:
            return None
        if self.next_seq_id not in self._entries:
            first = min(self._entries)
            overdue = self._hole_since is not None and now - self._hole_since >= self._patience
            if first > self._bridge_to and not overdue:
                return None
            missing = f"{self.next_seq_id}" if first == self.next_seq_id + 1 else f"{self.next_seq_id} to {first - 1}"
            self.spoil(f"the request with seq_id {missing} never arrived")
            self.next_seq_id = first
            self._hole_since = None
        return self._entries[self.next_seq_id].command

    def pop(self, now: float) -> None:
        """The head has been taken to run."""
        del self._entries[self.next_seq_id]
        self.next_seq_id += 1
        self._look_for_hole(now)

    def deadline(self) -> float | None:
        """When a hole at the front is to be bridged, or None if there is none."""
        return None if self._hole_since is None else self._hole_since + self._patience

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

    def _look_for_hole(self, now: float) -> None:
        if self._entries and self.next_seq_id not in self._entries:
            if self._hole_since is None:
                self._hole_since = now
        else:
            self._hole_since = None
