"""What is kept of sessions' operations: no more than the bounds, and the newest."""

from typing import Any

import pytest
from tinker_local.backend.scheduling.operations import LONGEST_ERROR, Timeline
from tinker_local.backend.traces import recorder
from tinker_local.backend.traces.perfetto import OwnerTrack, SessionTrace, packets
from tinker_local.backend.traces.recorder import TraceRecorder
from tinker_local.types import InternalError


def kept(traces: TraceRecorder, session: str) -> list[str]:
    found = traces.of(session)
    return [] if found is None else [each.request_id for each in (*found.training, *found.samples)]


def fill(traces: TraceRecorder, session: str, count: int, kind: str = "optim_step") -> None:
    owner = f"{session}:{'sample' if kind == 'sample' else 'train'}:0"
    for seq_id in range(count):
        traces.record(Timeline(f"{owner}:{seq_id}", kind))


def test_oldest_are_dropped_and_samples_push_out_no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "MOST_TRAINING", 3)
    monkeypatch.setattr(recorder, "MOST_SAMPLES", 4)
    traces = TraceRecorder(lambda _: True)
    fill(traces, "s-a", 5)
    fill(traces, "s-a", 100, "sample")
    assert kept(traces, "s-a") == [
        *(f"s-a:train:0:{n}" for n in (2, 3, 4)),
        *(f"s-a:sample:0:{n}" for n in range(96, 100)),
    ]
    found = traces.of("s-a")
    assert found is not None
    assert (found.recorded, found.dropped, len(found), len(traces)) == (105, 98, 7, 7)


def test_all_sessions_together_keep_no_more_than_the_bound_and_ended_ones_go_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recorder, "MOST_IN_ALL", 40)
    live = {"s-live", "s-new"}
    traces = TraceRecorder(lambda session: session in live)
    for session in ("s-live", "s-old", "s-older"):
        fill(traces, session, 10)
    fill(traces, "s-old", 1)  # more lately than s-older
    fill(traces, "s-new", 10)
    assert len(kept(traces, "s-older")) == 0
    assert len(kept(traces, "s-old")) == 11
    fill(traces, "s-new", 20)
    assert len(kept(traces, "s-old")) == 0
    assert len(kept(traces, "s-live")) == 10
    fill(traces, "s-new", 1000)
    assert len(traces) <= 40
    assert len(kept(traces, "s-live")) == 10  # who has most makes room
    assert kept(traces, "s-new")[-1] == "s-new:train:0:999"
    assert len(traces) == sum(len(kept(traces, session)) for session in ("s-live", "s-old", "s-older", "s-new"))


def test_room_is_made_seldom_however_many_sessions_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "MOST_IN_ALL", 1024)
    for live in (lambda _: True, lambda session: session < "s-0900", lambda _: False):
        asked: list[str] = []

        def is_live(session: str, live: Any = live, asked: list[str] = asked) -> bool:
            asked.append(session)
            return bool(live(session))

        traces = TraceRecorder(is_live)
        for number in range(2048):
            fill(traces, f"s-{number:04}", 1)
            assert len(traces) <= 1024
        assert kept(traces, "s-2047")
        assert len(asked) < 150 * 1024  # 1024 times as many if all were looked at each time


def test_sessions_that_made_room_while_they_lived_take_nobodys_turn_when_they_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recorder, "MOST_IN_ALL", 40)
    live = {f"s-{number}" for number in range(100)}
    traces = TraceRecorder(lambda session: session in live)
    for number in range(80):
        fill(traces, f"s-{number}", 1)
    live = {"s-80"}
    fill(traces, "s-80", 60)
    assert len(traces) <= 40
    assert kept(traces, "s-80")[-1] == "s-80:train:0:59"


def test_sessions_that_ended_long_ago_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(recorder.time, "monotonic", lambda: now[0])
    traces = TraceRecorder(lambda session: session == "s-live")
    for session in ("s-live", "s-ended"):
        fill(traces, session, 2)
    now[0] += recorder.KEPT_SECONDS - 1
    traces.forget_old()
    assert len(traces) == 4
    now[0] += 2
    traces.forget_old()
    assert (kept(traces, "s-ended"), len(kept(traces, "s-live")), len(traces)) == ([], 2, 2)


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
