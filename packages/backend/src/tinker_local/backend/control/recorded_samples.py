"""Samples that were recorded for losses that need them: who may train on them, how long, and how many are kept."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np
from tinker_local.backend.scheduling.operations import OBJECT_BYTES
from tinker_local.backend.training.losses.recorded import RecordedSequence
from tinker_local.types import InvalidRequestError, SampledSequence

LIFETIME = 24 * 60 * 60.0
"""Seconds from the last use of a record, as on the hosted service."""

SESSION_BYTES = 2**28
"""Of the records of one session: 33 million tokens."""

ALL_BYTES = 2**30


class RecordedSamples:
    """Records by session, the least recently used first. They live in memory, until their session ends, a day after
    their last use, or until newer ones need their place. Methods may be called from any thread."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        session_bytes: int = SESSION_BYTES,
        all_bytes: int = ALL_BYTES,
    ) -> None:
        self._clock = clock
        self._session_bytes = session_bytes
        self._all_bytes = all_bytes
        self._sessions: dict[str, _Records] = {}
        self._changing = threading.Lock()

    @property
    def bytes(self) -> int:
        """Of all records."""
        return sum(records.bytes for records in list(self._sessions.values()))

    def add(
        self, session_id: str, sequences: Sequence[SampledSequence], prompt_length: int, version: str | None = None
    ) -> None:
        """Record the sequences of one sample, which have ids and logprobs. `version`: the weights that drew them."""
        now = self._clock()
        with self._changing:
            records = self._sessions.setdefault(session_id, _Records())
            for sequence in sequences:
                assert sequence.sequence_id is not None
                assert sequence.logprobs is not None
                record = RecordedSequence(
                    np.array(sequence.tokens, np.int32),
                    np.array(sequence.logprobs, np.float32),
                    prompt_length,
                    version,
                )
                records.add(sequence.sequence_id, record, now)
            for each in self._sessions.values():
                each.drop_older(now - LIFETIME)
            while records.bytes > self._session_bytes:
                records.drop_first()
            while self.bytes > self._all_bytes:
                max(self._sessions.values(), key=lambda each: each.bytes).drop_first()

    def end_session(self, session_id: str) -> None:
        """Forget what a session recorded."""
        with self._changing:
            self._sessions.pop(session_id, None)

    def known(self, session_id: str, sequence_id: str) -> RecordedSequence | None:
        """A record, for a training run of this session, if there is one."""
        now = self._clock()
        with self._changing:
            records = self._sessions.get(session_id)
            return None if records is None else records.use(sequence_id, now, now - LIFETIME)

    def find(self, session_id: str, sequence_id: str) -> RecordedSequence:
        """A record, for a training run of this session; InvalidRequestError if there is none."""
        record = self.known(session_id, sequence_id)
        if record is None:
            raise InvalidRequestError(
                f"sequence_id: {sequence_id!r} is not recorded in this run's session. Records are made of samples with "
                "record_stability_info=True, belong to the session that sampled, and are kept for one day from their "
                f"last use, {self._session_bytes >> 20} MiB for each session, and not over a restart of the server: "
                "sample again, with the newest weights, and train on that"
            )
        return record


class _Records:
    """Of one session."""

    def __init__(self) -> None:
        self.bytes = 0
        self._kept: OrderedDict[str, tuple[RecordedSequence, float]] = OrderedDict()

    def add(self, sequence_id: str, record: RecordedSequence, now: float) -> None:
        """A request that comes again after its result was read has new sequences of the same ids."""
        if (before := self._kept.pop(sequence_id, None)) is not None:
            self.bytes -= _size(before[0])
        self._kept[sequence_id] = record, now
        self.bytes += _size(record)

    def use(self, sequence_id: str, now: float, oldest: float) -> RecordedSequence | None:
        """The record, if it was used since `oldest`; it is used now."""
        record, used = self._kept.get(sequence_id, (None, 0.0))
        if record is None or used < oldest:
            return None
        self._kept[sequence_id] = record, now
        self._kept.move_to_end(sequence_id)
        return record

    def drop_first(self) -> None:
        _, (record, _) = self._kept.popitem(last=False)
        self.bytes -= _size(record)

    def drop_older(self, oldest: float) -> None:
        while self._kept and next(iter(self._kept.values()))[1] < oldest:
            self.drop_first()


def _size(record: RecordedSequence) -> int:
    return record.tokens.nbytes + record.logprobs.nbytes + OBJECT_BYTES
