"""Timelines as Perfetto's packets."""

from tinker_local.backend.perfetto import OwnerTrack, SessionTrace, packets
from tinker_local.backend.scheduling.operations import Stage, Timeline
from tinker_local.types.wire.perfetto_trace_pb2 import Trace

from tests.traces.trace_reading import ReadTrace, read_trace

YEAR_2026 = 1_767_225_600 * 10**9


def timeline(number: int, *stages: tuple[Stage, int], ended: int = 0, kind: str = "sample", **facts: int) -> Timeline:
    outcome = "ok" if ended else ""
    return Timeline(f"s-a:sample:0:{number}", kind, list(stages), ended, outcome, facts=facts or None)


def built(*timelines: Timeline, training: tuple[Timeline, ...] = ()) -> ReadTrace:
    sampling = [OwnerTrack("sampler 0", "s-a:sample:0", timelines)] if timelines else []
    runs = [OwnerTrack("run 0", "s-a:train:0", training)] if training else []
    trace = SessionTrace("session s-a", "", "a note", runs, sampling, YEAR_2026)
    return read_trace(Trace(packet=packets(trace)).SerializeToString())


def test_operations_that_overlap_lie_on_lines_of_their_own_and_lines_are_used_again() -> None:
    first, second = timeline(0, ("waiting", 10), ended=20), timeline(1, ("waiting", 15), ended=30)
    third, endless = timeline(2, ("waiting", 20), ended=40), timeline(3, ("waiting", 21))
    after = timeline(4, ("waiting", 50), ended=60)
    trace = SessionTrace("s", "", "", [], [OwnerTrack("a", "", [first, second, third, endless, after])], 0)
    tracks = [p.track_descriptor.uuid for p in packets(trace) if p.track_descriptor.name == "a"]
    assert len(tracks) == 3
    lines = {}
    for packet in packets(trace):
        for argument in packet.track_event.debug_annotations:
            if argument.name == "request_id":
                lines[int(argument.string_value[-1])] = packet.track_event.track_uuid
    assert lines[0] == lines[2] == lines[4] == tracks[0]
    assert (lines[1], lines[3]) == (tracks[1], tracks[2])
    read = built(first, second, third, endless, after)  # and no slices of one line overlap
    assert [each.end for each in sorted(read.operations, key=lambda each: each.begin)] == [
        None if end is None else end + YEAR_2026 for end in (20, 30, 40, None, 60)
    ]


def test_stages_without_time_are_left_out_and_none_goes_on_after_the_end() -> None:
    stopped = timeline(0, ("waiting", 10), ("preparing", 10), ("waiting", 30), ("running", 50), ended=40)
    (operation,) = built(stopped).operations
    stages = [(each.name, each.begin - YEAR_2026, (each.end or 0) - YEAR_2026) for each in operation.within]
    assert stages == [("preparing", 10, 30), ("waiting", 30, 40)]


def test_counters_add_up_to_nothing_in_the_end() -> None:
    operations = [
        timeline(n, ("waiting", n * 10**9), ("running", (n + 1) * 10**9), ended=(n + 3) * 10**9, sampled_tokens=60)
        for n in range(3)
    ]
    counters = built(*operations).counters
    seconds = {
        name.partition(": ")[2]: [((at - YEAR_2026) // 10**9, value) for at, value in values]
        for name, values in counters.items()
    }
    assert seconds["requests that wait"] == [(0, 1), (1, 1), (2, 1), (3, 0)]
    assert seconds["requests that run"] == [(1, 1), (2, 2), (3, 2), (4, 1), (5, 0)]
    assert seconds["tokens per second"] == [(1, 30), (2, 60), (3, 60), (4, 30), (5, 0)]


def test_trace_of_an_operation_that_has_just_begun_can_be_read() -> None:
    read = built(training=(timeline(0, ("waiting", 5), kind="forward_backward"),))
    (operation,) = read.operations
    assert (operation.end, operation.stages) == (None, ["waiting"])
    assert read.notes == ["a note"]
