"""What is kept of sessions' operations: no more than the bounds, and the newest."""

from typing import Any

import pytest
from tinker_local.backend.perfetto import OwnerTrack, SessionTrace, packets
from tinker_local.backend.scheduling import operations
from tinker_local.backend.scheduling.operations import LONGEST_ERROR, Timeline, TraceRecorder
from tinker_local.types import InternalError


def kept(traces: TraceRecorder, session: str) -> list[str]:
    found = traces.of(session)
    return [] if found is None else [each.request_id for each in found.timelines]


def fill(traces: TraceRecorder, session: str, count: int) -> None:
    for seq_id in range(count):
        traces.record(Timeline(f"{session}:train:0:{seq_id}", "optim_step"))


def test_all_sessions_together_keep_no_more_than_the_bound_and_the_oldest_go_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(operations, "MOST_TIMELINES", 40)
    monkeypatch.setattr(operations, "MOST_OF_A_SESSION", 1000)
    traces = TraceRecorder()
    for session in ("s-a", "s-b", "s-a"):
        fill(traces, session, 15)
    assert len(traces) == 40
    assert kept(traces, "s-a") == [f"s-a:train:0:{n}" for n in (*range(5, 15), *range(15))]
    assert len(kept(traces, "s-b")) == 15
    found = traces.of("s-a")
    assert found is not None
    assert (found.recorded, found.dropped) == (30, 5)
    fill(traces, "s-c", 1000)
    assert kept(traces, "s-c") == [f"s-c:train:0:{n}" for n in range(960, 1000)]
    assert traces.of("s-a") is traces.of("s-b") is None
    assert len(traces) == 40


def test_a_busy_session_drops_its_own_timelines_and_not_those_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "MOST_TIMELINES", 40)
    monkeypatch.setattr(operations, "MOST_OF_A_SESSION", 10)
    traces = TraceRecorder()
    fill(traces, "s-quiet", 3)
    fill(traces, "s-busy", 1000)
    assert kept(traces, "s-quiet") == [f"s-quiet:train:0:{n}" for n in range(3)]
    assert kept(traces, "s-busy") == [f"s-busy:train:0:{n}" for n in range(990, 1000)]
    found = traces.of("s-busy")
    assert found is not None
    assert (found.recorded, found.dropped, len(traces)) == (1000, 990, 13)


def test_sessions_without_timelines_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "MOST_TIMELINES", 10)
    traces = TraceRecorder()
    for number in range(1000):
        fill(traces, f"s-{number}", 1)
    assert len(traces) == len(traces._sessions) == 10
    fill(traces, "s-0", 1)  # again, after its first one was dropped
    found = traces.of("s-0")
    assert found is not None
    assert (found.recorded, found.dropped) == (1, 0)


def test_an_error_that_is_no_text_spoils_no_trace() -> None:
    timeline = Timeline("s-a:train:0:1", "optim_step")
    timeline.end(InternalError("no such file: /data/\udcff"))  # as Python has names of files that are not UTF-8
    owner = OwnerTrack("run", "", [timeline])
    assert b"no such file: /data/?" in b"".join(
        packet.SerializeToString() for packet in packets(SessionTrace("", "", "", [owner], [], 0))
    )


def test_of_an_error_no_more_than_its_text_is_kept() -> None:
    timeline = Timeline("s-a:train:0:1", "optim_step")
    timeline.end(InternalError("x" * 10_000))
    assert (timeline.outcome, len(timeline.error)) == ("server", LONGEST_ERROR)
    held: list[Any] = [getattr(timeline, name) for name in Timeline.__slots__]
    assert not any(isinstance(each, BaseException) for each in held)
