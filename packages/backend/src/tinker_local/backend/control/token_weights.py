"""Which in-flight save drew each token of a sequence, for clients that ask. The plain SDK is not told, as by the hosted
service."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from tinker_local.backend.control.moving_weights import InFlightTarget
from tinker_local.types import DrawnUnder, NotFoundError, SampledSequence

MOST_TOLD = 2**16
"""Sequences of in-flight clients of one session whose weights are known: those that ended last."""


class TokenWeights:
    """By session and by the id of a sequence. Used on the event loop."""

    def __init__(self) -> None:
        self._sessions: dict[str, OrderedDict[str, tuple[tuple[DrawnUnder, ...], InFlightTarget]]] = {}

    def add(self, session_id: str, sequences: Sequence[SampledSequence], target: InFlightTarget) -> None:
        """Remember sequences that were sampled from `target`, which have ids and `drawn_under`."""
        known = self._sessions.setdefault(session_id, OrderedDict())
        for sequence in sequences:
            if sequence.sequence_id is None or sequence.drawn_under is None:
                continue
            known.pop(sequence.sequence_id, None)
            known[sequence.sequence_id] = sequence.drawn_under, target
        while len(known) > MOST_TOLD:
            known.popitem(last=False)

    def find(self, session_id: str, sequence_id: str) -> list[dict[str, Any]]:
        """The spans of a sequence, in order; NotFoundError if it is not known."""
        found = self._sessions.get(session_id, OrderedDict()).get(sequence_id)
        if found is None:
            raise NotFoundError(
                f"sequence_id: which weights drew {sequence_id!r} is not known. It is of samples of clients made with "
                f"kind='inflight', for the newest {MOST_TOLD} sequences of a session, until that ends"
            )
        spans, target = found
        return [
            {
                "version": span.version,
                "optimizer_steps": target.steps[span.version],
                "tokens": span.tokens,
                "on_older_keys": span.on_older_keys,
            }
            for span in spans
        ]

    def drawn_by(self, session_id: str, sequence_id: str) -> list[tuple[int, str]] | None:
        """How many tokens in a row each version drew, in order, by the names of `InFlightTarget.version`; None if that
        is not known. May be called from any thread."""
        found = self._sessions.get(session_id, OrderedDict()).get(sequence_id)
        return None if found is None else [(span.tokens, found[1].version(span.version)) for span in found[0]]

    def end_session(self, session_id: str) -> None:
        """Forget those of a session."""
        self._sessions.pop(session_id, None)
