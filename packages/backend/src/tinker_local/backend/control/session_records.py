"""Records of samples in memory: by session, for how long, and how many."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy.typing as npt
from tinker_local.backend.scheduling.operations import OBJECT_BYTES
from tinker_local.backend.threads import Ledger

LIFETIME = 24 * 60 * 60.0
"""Seconds from the last use of a record, as on the hosted service."""


R = TypeVar("R")

Arrays = Sequence[npt.NDArray[Any]]


class SessionRecords(Generic[R]):
    """Records by session and the id of a sequence, the least recently used first. They live until their session ends, a
    day after their last use, or until newer ones need their place: of their session, if that has more than
    `session_bytes`, or of all, if the sessions have more than `all_bytes` together. `arrays`: those of a record; one
    that several records have counts once in their session. Methods may be called from any thread."""

    def __init__(
        self, clock: Callable[[], float], session_bytes: int, all_bytes: int, arrays: Callable[[R], Arrays]
    ) -> None:
        self._clock = clock
        self._arrays = arrays
        self._session_bytes = session_bytes
        self._all_bytes = all_bytes
        self._sessions: dict[str, _OfSession[R]] = {}
        self._changing = threading.Lock()

    @property
    def bytes(self) -> int:
        """Of all records."""
        return sum(records.bytes for records in list(self._sessions.values()))

    def keep(self, session_id: str, sequences: Mapping[str, R]) -> None:
        """Keep what is recorded of the sequences of one sample, by their ids."""
        now = self._clock()
        with self._changing:
            records = self._sessions.setdefault(session_id, _OfSession(self._arrays))
            for sequence_id, record in sequences.items():
                records.add(sequence_id, record, now)
            for each in self._sessions.values():
                each.drop_older(now - LIFETIME)
            while records.bytes > self._session_bytes:
                records.drop_first()
            while self.bytes > self._all_bytes:
                max(self._sessions.values(), key=lambda each: each.bytes).drop_first()

    def known(self, session_id: str, sequence_id: str) -> R | None:
        """A record, for a training run of this session, if there is one."""
        now = self._clock()
        with self._changing:
            records = self._sessions.get(session_id)
            return None if records is None else records.use(sequence_id, now, now - LIFETIME)

    def end_session(self, session_id: str) -> None:
        """Forget what a session recorded."""
        with self._changing:
            self._sessions.pop(session_id, None)


class _OfSession(Generic[R]):
    def __init__(self, arrays: Callable[[R], Arrays]) -> None:
        self.bytes = 0
        self._arrays = arrays
        self._kept: OrderedDict[str, tuple[R, float]] = OrderedDict()
        self._uses: Ledger[int] = Ledger()

    def add(self, sequence_id: str, record: R, now: float) -> None:
        """A request that comes again after its result was read has new sequences of the same ids."""
        if (before := self._kept.pop(sequence_id, None)) is not None:
            self._forget(before[0])
        self._kept[sequence_id] = record, now
        self.bytes += OBJECT_BYTES
        for array in self._arrays(record):
            self.bytes += 0 if self._uses[id(array)] else array.nbytes
            self._uses[id(array)] += 1

    def use(self, sequence_id: str, now: float, oldest: float) -> R | None:
        """The record, if it was used since `oldest`; it is used now."""
        record, used = self._kept.get(sequence_id, (None, 0.0))
        if record is None or used < oldest:
            return None
        self._kept[sequence_id] = record, now
        self._kept.move_to_end(sequence_id)
        return record

    def drop_first(self) -> None:
        _, (record, _) = self._kept.popitem(last=False)
        self._forget(record)

    def drop_older(self, oldest: float) -> None:
        while self._kept and next(iter(self._kept.values()))[1] < oldest:
            self.drop_first()

    def _forget(self, record: R) -> None:
        self.bytes -= OBJECT_BYTES
        for array in self._arrays(record):
            self._uses[id(array)] -= 1
            self.bytes -= 0 if self._uses[id(array)] else array.nbytes
