"""The newest requests of all sessions, kept in memory so that a session can be exported as a trace."""

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from datetime import UTC, datetime

from tinker_local.backend import ids
from tinker_local.backend.scheduling.operations import Timeline

MOST = 65536
"""Timelines kept for all sessions together: about 64 MiB, at a kilobyte each (up to three with a long error)."""

SESSION_MOST = MOST // 4
"""Timelines kept for one session, so that a busy one does not drop all of the others'."""


@dataclass(slots=True, eq=False)
class SessionTimelines:
    """The newest requests of one session, in the order of their arrival.

    `since`: when the first of them arrived, dropped ones included. `recorded`: how many have arrived since then.
    """

    timelines: deque[Timeline] = field(default_factory=deque)
    since: datetime = field(default_factory=lambda: datetime.now(UTC))
    recorded: int = 0

    @property
    def dropped(self) -> int:
        """How many of the oldest have been dropped."""
        return self.recorded - len(self.timelines)


class TraceRecorder:
    """Keeps the newest `SESSION_MOST` timelines of each session and the newest `MOST` of all. Beyond that, each new one
    drops the oldest of its session, or of all."""

    def __init__(self) -> None:
        self._sessions: dict[str, SessionTimelines] = {}
        self._arrivals: OrderedDict[int, Timeline] = OrderedDict()  # by `id`, the oldest first

    def record(self, timeline: Timeline) -> None:
        """Keep a timeline that has just begun; its request id begins with the id of an existing session."""
        session_id = _session_of(timeline)
        session = self._sessions.get(session_id)
        if session is None:
            session = self._sessions[session_id] = SessionTimelines()
        session.timelines.append(timeline)
        session.recorded += 1
        self._arrivals[id(timeline)] = timeline
        if len(session.timelines) > SESSION_MOST:
            self._drop_oldest(session_id)
        elif len(self._arrivals) > MOST:
            self._drop_oldest(_session_of(next(iter(self._arrivals.values()))))

    def _drop_oldest(self, session_id: str) -> None:
        session = self._sessions[session_id]
        del self._arrivals[id(session.timelines.popleft())]
        if not session.timelines:
            del self._sessions[session_id]

    def of(self, session_id: str) -> SessionTimelines | None:
        """The timelines of a session; None if there are none."""
        return self._sessions.get(session_id)

    def __len__(self) -> int:
        """The number of timelines of all sessions."""
        return len(self._arrivals)


def _session_of(timeline: Timeline) -> str:
    return ids.session_of(ids.owner_of(timeline.request_id))
