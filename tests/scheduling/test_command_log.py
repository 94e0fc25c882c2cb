"""Order of one model's commands: by seq_id whatever the arrival order, with gaps skipped by the rules."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tinker_local.backend.scheduling.run_queue import CommandLog


def drain(log: CommandLog[str], now: float = 0.0) -> list[str]:
    taken = []
    while (command := log.head(now)) is not None:
        log.pop(now)
        taken.append(command)
    return taken


@given(st.permutations(range(1, 9)))
def test_chunks_run_in_seq_id_order_whatever_the_arrival_order(order: list[int]) -> None:
    log: CommandLog[str] = CommandLog()
    taken: list[str] = []
    for seq_id in order:
        log.add(seq_id, f"c{seq_id}", chunk=True, now=0)
        taken += drain(log)
    assert taken == [f"c{i}" for i in range(1, 9)]
    assert log.take_poisoned() is None


@pytest.mark.mutation(
    "order-of-arrival",
    "CommandLog.head",
    "            if not self._skipped(now) and not overdue:\n",
    "            if False:\n",
)
def test_first_chunk_last_as_the_sdk_sends_them() -> None:
    log: CommandLog[str] = CommandLog()
    log.add(2, "b", chunk=True, now=0)
    log.add(3, "c", chunk=True, now=0)
    assert drain(log) == []
    log.add(1, "a", chunk=True, now=1)
    assert drain(log) == ["a", "b", "c"]


@pytest.mark.mutation(
    "gap-not-skipped-by-a-step", "CommandLog.add", "self._skip_to = max(self._skip_to, seq_id)", "pass"
)
def test_gap_is_skipped_at_once_by_an_operation_that_is_not_forward_backward() -> None:
    log: CommandLog[str] = CommandLog()
    log.add(2, "gradient", chunk=True, now=0)
    assert drain(log) == []
    log.add(3, "step", chunk=False, now=0)
    assert drain(log) == ["gradient", "step"]


def test_gap_below_forward_backward_waits_until_patience_ends() -> None:
    log: CommandLog[str] = CommandLog(patience=360)
    log.add(2, "late chunk", chunk=True, now=100)
    assert log.deadline() == 460
    assert drain(log, now=459.9) == []
    assert drain(log, now=460) == ["late chunk"]
    assert log.deadline() is None


@pytest.mark.mutation(
    "skipped-id-stays-open",
    "CommandLog.accepts",
    "return seq_id >= self.next_seq_id and seq_id not in self._entries",
    "return seq_id not in self._entries",
)
def test_skipped_id_is_closed() -> None:
    log: CommandLog[str] = CommandLog()
    log.add(5, "step", chunk=False, now=0)
    assert drain(log) == ["step"]
    assert not any(log.accepts(seq_id) for seq_id in range(1, 6))
    assert log.accepts(6)


def test_skipped_gap_poisons_the_gradient_of_the_next_step_and_of_that_alone() -> None:
    log: CommandLog[str] = CommandLog()
    log.add(1, "gradient", chunk=True, now=0)
    log.add(4, "step", chunk=False, now=0)
    assert drain(log) == ["gradient", "step"]
    assert log.take_poisoned() == "the request with seq_id 2 to 3 never arrived"
    log.add(5, "gradient", chunk=True, now=0)
    log.add(6, "step", chunk=False, now=0)
    assert drain(log) == ["gradient", "step"]
    assert log.take_poisoned() is None


@pytest.mark.parametrize("seq_id", [1, 2])
def test_taken_ids_are_not_accepted_again(seq_id: int) -> None:
    log: CommandLog[str] = CommandLog()
    log.add(1, "a", chunk=True, now=0)
    log.add(2, "b", chunk=True, now=0)
    assert not log.accepts(seq_id)
    drain(log)
    assert not log.accepts(seq_id)


def test_pending_lists_what_has_not_been_taken_in_order() -> None:
    log: CommandLog[str] = CommandLog()
    for seq_id in (3, 1, 2):
        log.add(seq_id, f"c{seq_id}", chunk=True, now=0)
    log.pop(0)
    assert log.pending() == ["c2", "c3"]
