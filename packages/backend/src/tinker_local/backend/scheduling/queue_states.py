"""Whether an unfinished operation waits for others (`paused_capacity`, with a reason) or not (`active`)."""

import time
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class QueueState:
    """The wire's two fields; `reason` is what the SDK shows its user."""

    state: Literal["active", "paused_capacity"]
    reason: str | None = None


ACTIVE = QueueState("active")

COUNT_SECONDS = 1.0
"""How old the answer to a sample may be."""


def training_state(session_id: str, running: Collection[str], queued: Iterable[tuple[str, int]]) -> QueueState:
    """Of a command of `session_id` that has not run.

    `running`: the session of each command in the trainer. `queued`: sessions and how many commands they have queued;
    turns are taken, so that not all of these come first. While one of its own session runs, it waits for nobody.
    """
    if not running or session_id in running:
        return ACTIVE
    others = [session for session in running if session != session_id]
    counted = [(session, count) for session, count in queued if session != session_id and count]
    requests = len(others) + sum(count for _, count in counted)
    return _paused("the trainer is busy with", requests, len({*others, *(session for session, _ in counted)}))


def sample_states(in_flight: Iterable[tuple[str, int]], sequences_waiting: int) -> list[QueueState]:
    """Of the samples in a sampler, which takes them in this order: the session and the number of sequences of each.

    `sequences_waiting`: how many sequences, the last in the order, have no place on the device yet. A sample waits if
    this is true of all of its own.
    """
    order = list(in_flight)
    left = sum(sequences for _, sequences in order)
    before: Counter[str] = Counter()
    states = []
    for place, (session, sequences) in enumerate(order):
        requests, sessions = place - before[session], len(before) - (session in before)
        waits = left <= sequences_waiting and requests > 0
        states.append(_paused("the sampler is full with", requests, sessions) if waits else ACTIVE)
        left -= sequences
        before[session] += 1
    return states


class SamplerQueue:
    """The samples in one sampler, in order, and what each waits for. With thousands that ask, all are counted at once,
    and at most every `COUNT_SECONDS`."""

    def __init__(self) -> None:
        self._samples: dict[object, tuple[str, int]] = {}
        self._states: dict[object, QueueState] = {}
        self._counted_at = -COUNT_SECONDS

    def enter(self, sample: object, session_id: str, sequences: int) -> None:
        """A sample of so many sequences goes into the sampler."""
        self._samples[sample] = (session_id, sequences)

    def leave(self, sample: object) -> None:
        """It has ended."""
        self._samples.pop(sample, None)
        self._states.pop(sample, None)

    def __contains__(self, sample: object) -> bool:
        return sample in self._samples

    def state(self, sample: object, sequences_waiting: int) -> QueueState:
        """What a sample that is in the sampler waits for."""
        now = time.monotonic()
        if sample not in self._states or now - self._counted_at >= COUNT_SECONDS:
            states = sample_states(self._samples.values(), sequences_waiting)
            self._states = dict(zip(self._samples, states, strict=True))
            self._counted_at = now
        return self._states[sample]


def memory_state(session_id: str, running: Collection[str]) -> QueueState:
    """State of a sample that waits while the trainer uses the sampler's memory."""
    others = [session for session in running if session != session_id]
    return _paused("the trainer is using the sampler's memory for", len(others), len(set(others))) if others else ACTIVE


def _paused(why: str, requests: int, sessions: int) -> QueueState:
    return QueueState(
        "paused_capacity",
        f"{why} {requests} {'request' if requests == 1 else 'requests'} of {sessions} other "
        f"{'session' if sessions == 1 else 'sessions'}",
    )
