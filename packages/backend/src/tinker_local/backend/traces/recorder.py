"""What is kept in memory of every session's operations, to be exported as a trace."""

import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from tinker_local.backend import ids
from tinker_local.backend.scheduling.operations import Timeline

MOST_TRAINING, MOST_SAMPLES = 8192, 16384
"""Operations of one session that are kept, the newest of each sort: samples, which are many, push out no training."""

MOST_IN_ALL = 65536
"""Of all sessions; a timeline takes about a kilobyte, that of an error up to three."""

KEPT_SECONDS = 86400.0
"""How long the timelines of a session that has ended are kept, from when its last operation began."""


@dataclass(slots=True, eq=False)
class SessionTimelines:
    """The newest operations of one session, in the order in which they came.

    `since`: when the first came, or the first after the session had to make room. `recorded`: how many there were since
    then. `last`: monotonic seconds of the last.
    """

    training: deque[Timeline] = field(default_factory=deque)
    samples: deque[Timeline] = field(default_factory=deque)
    since: datetime = field(default_factory=lambda: datetime.now(UTC))
    recorded: int = 0
    last: float = 0.0

    def __len__(self) -> int:
        return len(self.training) + len(self.samples)

    @property
    def dropped(self) -> int:
        """How many are not kept any more."""
        return self.recorded - len(self)


class TraceRecorder:
    """Keeps the timelines of all sessions, within bounds.

    It costs an append for each operation. Where there are too many, the oldest of the session are dropped; where all
    sessions together have too many, a part of one: of the session that has been silent longest among those that
    `is_live` does not name, else of the one that has most.
    """

    def __init__(self, is_live: Callable[[str], bool]) -> None:
        self._is_live = is_live
        self._sessions: OrderedDict[str, SessionTimelines] = OrderedDict()
        self._total = 0

    def record(self, timeline: Timeline) -> None:
        """Keep a timeline from its beginning on, of a session that exists."""
        session_id = ids.session_of(ids.owner_of(timeline.request_id))
        session = self._sessions.get(session_id)
        if session is None:
            session = self._sessions[session_id] = SessionTimelines()
        else:
            self._sessions.move_to_end(session_id)
        sample = timeline.kind == "sample"
        kept, most = (session.samples, MOST_SAMPLES) if sample else (session.training, MOST_TRAINING)
        kept.append(timeline)
        session.recorded += 1
        session.last = time.monotonic()
        if len(kept) > most:
            kept.popleft()
        else:
            self._total += 1
            if self._total > MOST_IN_ALL:
                self._drop_some()

    def of(self, session_id: str) -> SessionTimelines | None:
        """What is kept of a session; None if nothing is."""
        return self._sessions.get(session_id)

    def forget_old(self) -> None:
        """Drop the sessions that ended long ago."""
        limit = time.monotonic() - KEPT_SECONDS
        for session_id, session in list(self._sessions.items()):
            if session.last < limit and not self._is_live(session_id):
                self._forget(session_id)

    def _drop_some(self) -> None:
        """Make room for so many at once that looking at all sessions is rare."""
        enough = MOST_IN_ALL - MOST_IN_ALL // 64
        for session_id in [each for each in self._sessions if not self._is_live(each)]:
            self._forget(session_id)
            if self._total <= enough:
                return
        if self._total <= MOST_IN_ALL:
            return
        for session in sorted(self._sessions.values(), key=len, reverse=True):
            for kept in (session.training, session.samples):
                for _ in range(len(kept) // 8 + 1 if kept else 0):
                    kept.popleft()
                    self._total -= 1
            if self._total <= enough:
                return

    def _forget(self, session_id: str) -> None:
        self._total -= len(self._sessions.pop(session_id))

    def __len__(self) -> int:
        """Timelines in all."""
        return self._total
