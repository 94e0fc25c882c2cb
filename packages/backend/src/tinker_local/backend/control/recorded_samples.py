"""Samples that were recorded for losses that need them: who may train on them."""

import time
from collections.abc import Callable, Sequence

import numpy as np
from tinker_local.backend.control.session_records import SessionRecords
from tinker_local.backend.training.losses.recorded import RecordedSequence
from tinker_local.types import InvalidRequestError, SampledSequence

SESSION_BYTES = 2**28
"""Of the records of one session: 33 million tokens."""

ALL_BYTES = 2**30


class RecordedSamples(SessionRecords[RecordedSequence]):
    """What a gradient on samples needs of them."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        session_bytes: int = SESSION_BYTES,
        all_bytes: int = ALL_BYTES,
    ) -> None:
        super().__init__(clock, session_bytes, all_bytes, lambda record: (record.tokens, record.logprobs))

    def add(
        self, session_id: str, sequences: Sequence[SampledSequence], prompt_length: int, version: str | None = None
    ) -> None:
        """Record the sequences of one sample, which have ids and logprobs. `version`: the weights that drew them."""
        records = {}
        for sequence in sequences:
            assert sequence.sequence_id is not None
            assert sequence.logprobs is not None
            records[sequence.sequence_id] = RecordedSequence(
                np.array(sequence.tokens, np.int32), np.array(sequence.logprobs, np.float32), prompt_length, version
            )
        self.keep(session_id, records)

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
