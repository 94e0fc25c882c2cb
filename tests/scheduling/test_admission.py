"""Bounds of what may be queued: who is refused, for how long, and that they lock no one out."""

from dataclasses import dataclass, field
from typing import Any

import pytest
from tinker_local.backend.scheduling.run_queue import (
    LONGEST_RETRY,
    PATIENCE,
    REFUSED_PATIENCE,
    SHORTEST_RETRY,
    CommandLog,
    Load,
)
from tinker_local.types import TooManyRequestsError

from tests.scheduling.traffic import bounds_of

SDK_RETRIES_SECONDS = 300
BOUNDS = bounds_of(Load(6, 600), Load(4, 400))


@dataclass(eq=False)
class Queue:
    session_id: str = "s"
    owner: str = "local"
    clock: float = 0.0
    size: int = 0
    commands: CommandLog[Any] = field(default_factory=CommandLog)

    def now(self) -> float:
        return self.clock

    @property
    def load(self) -> Load:
        return Load(len(self.commands), self.size)

    def add(self, *seq_ids: int, size: int = 10) -> "Queue":
        for seq_id in seq_ids:
            self.commands.add(seq_id, f"c{seq_id}", chunk=True, now=self.clock)
            self.size += size
        return self


def refusal(
    queue: Queue, seq_id: int, size: int = 10, *, others: tuple[Queue, ...] = ()
) -> TooManyRequestsError | None:
    try:
        BOUNDS.check(queue, [queue, *others], seq_id, size)
    except TooManyRequestsError as error:
        return error
    return None


def test_session_is_refused_beyond_its_own_bounds_and_others_are_not() -> None:
    full, other = Queue().add(1, 2, 3, 4), Queue("t").add(1)
    assert "this session" in str(refusal(full, 5, others=(other,)))
    assert "4 training requests" in str(refusal(full, 5, others=(other,)))
    assert refusal(other, 2, others=(full,)) is None
    heavy = Queue().add(1, size=350)
    assert "400 bytes" in str(refusal(heavy, 2, 60))
    assert refusal(heavy, 2, 50) is None


def test_models_of_a_session_share_its_bounds() -> None:
    first, second = Queue().add(1, 2, 3), Queue().add(1)
    assert "this session" in str(refusal(second, 2, others=(first,)))


def test_all_are_refused_beyond_the_bounds_of_all() -> None:
    one, two, small = Queue().add(1, 2, 3), Queue("t").add(1, 2), Queue("u").add(1)
    assert "all sessions" in str(refusal(small, 2, others=(one, two)))


def test_model_that_cannot_run_without_it_is_never_refused() -> None:
    """The first chunk comes last; a lower id may have been refused while a higher one was taken."""
    full = Queue().add(1, 2, 3, 4)
    assert refusal(Queue(), 1, others=(full,)) is None  # nothing queued
    assert refusal(Queue().add(2, 3), 1, others=(full,)) is None
    assert refusal(Queue().add(2, 3), 4, others=(full,)) is None  # the first is sent only when all others were taken
    assert refusal(Queue().add(1, 3), 2, others=(full,)) is not None  # 1 runs, and makes room
    drained = Queue().add(1, 3)
    drained.commands.pop(0)
    assert refusal(drained, 2, others=(full,)) is None


def test_nobody_is_refused_for_as_long_as_the_sdk_tries() -> None:
    queue = Queue().add(1, 2, 3, 4)
    waited = []
    while (error := refusal(queue, 5)) is not None and queue.clock < SDK_RETRIES_SECONDS:
        assert error.retry_after is not None
        waited.append(error.retry_after)
        queue.clock += error.retry_after + 30  # the SDK's own pause between its rounds
    assert queue.clock <= PATIENCE + LONGEST_RETRY + 30 < SDK_RETRIES_SECONDS
    assert waited[0] == SHORTEST_RETRY
    assert max(waited) == LONGEST_RETRY
    assert refusal(queue, 6) is not None  # each on its own


def test_refused_id_is_no_gap_for_a_step_to_skip() -> None:
    queue = Queue().add(1, 2, 3, 4)
    assert refusal(queue, 5) is not None
    log = queue.commands
    for _ in range(4):
        log.pop(0)
    log.add(6, "step", chunk=False, now=0)
    assert log.head(0) is None
    assert not log.can_run(0)
    log.add(5, "again", chunk=True, now=1)
    assert log.head(1) == "again"
    log.pop(1)
    assert log.head(1) == "step"
    assert log.take_poisoned() is None


def test_refused_id_that_is_not_sent_again_is_given_up() -> None:
    log: CommandLog[str] = CommandLog()
    log.refuse(1, 10)
    log.refuse(1, 40)
    log.add(2, "step", chunk=False, now=41)
    assert log.deadline() == 40 + REFUSED_PATIENCE
    assert log.head(40 + REFUSED_PATIENCE - 0.1) is None
    assert log.head(40 + REFUSED_PATIENCE) == "step"
    assert log.take_poisoned() == "the request with seq_id 1 never arrived"
    assert not log.accepts(1)
    assert log.refused_since(1) is None


def test_what_can_never_fit_is_told_so() -> None:
    waiting = Queue().add(2, 3, size=250)
    assert BOUNDS.too_large(waiting, 4, 100) is None
    assert "101 bytes behind 500 bytes" in str(BOUNDS.too_large(waiting, 4, 101))
    assert BOUNDS.too_large(waiting, 1, 600) is None  # with it everything runs
    assert BOUNDS.too_large(Queue().add(1, size=600), 2, 500) is None  # that runs, and makes room
    assert "601 bytes exceed" in str(BOUNDS.too_large(Queue(), 1, 601))
    assert "601 bytes exceed" in str(BOUNDS.too_large(Queue().add(1), 2, 601))


@pytest.mark.parametrize("count", [1, 5])
def test_ids_above_a_refused_one_wait_for_it_in_any_number(count: int) -> None:
    log: CommandLog[str] = CommandLog()
    log.refuse(1, 0)
    for seq_id in range(2, 2 + count):
        log.add(seq_id, f"c{seq_id}", chunk=False, now=0)
    assert log.head(1) is None
    log.add(1, "c1", chunk=True, now=2)
    assert log.head(2) == "c1"
