"""A session's timelines as a trace that https://ui.perfetto.dev opens.

The session's track contains counters and one track for each training run and sampling session. An operation is a
slice, and its stages are slices inside it. Slices of one track must not overlap, so overlapping operations go to
several tracks of the same name, which Perfetto shows as one track with several lines.
"""

import heapq
from collections.abc import Collection, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from tinker_local.backend.scheduling.operations import RUNNING, WAITING, Stage, Timeline, stages
from tinker_local.types.wire.perfetto_trace_pb2 import (
    ClockSnapshot,
    CounterDescriptor,
    DebugAnnotation,
    TracePacket,
    TrackDescriptor,
    TrackEvent,
)

SEQUENCE = 1
REALTIME, BOOTTIME = 1, 6

Change = tuple[int, float]
"""A time, and the change of a counter at that time."""


@dataclass(frozen=True, slots=True)
class OwnerTrack:
    """Operations of one training run or sampling session, in order of arrival."""

    name: str
    description: str
    timelines: Sequence[Timeline]


@dataclass(frozen=True, slots=True)
class SessionTrace:
    """The content of a trace.

    `unix_ns` is added to the times of timelines to get nanoseconds since 1970. `note` says which requests the trace has
    and which it lacks; it is shown at the start of the trace.
    """

    name: str
    description: str
    note: str
    training: Sequence[OwnerTrack]
    sampling: Sequence[OwnerTrack]
    unix_ns: int


def packets(trace: SessionTrace) -> Iterator[TracePacket]:
    """The packets of `trace`; packets of equal time are in the order in which Perfetto must read them."""
    owners = [*trace.training, *trace.sampling]
    begun = min((timeline.stages[0][1] for owner in owners for timeline in owner.timelines), default=0)
    writer = _Writer(trace.unix_ns)
    yield writer.clocks(begun)
    session = yield from writer.track(trace.name, description=trace.description)
    note = yield from writer.track("about this trace", session)
    yield writer.event(begun, note, TrackEvent.TYPE_INSTANT, trace.note)
    for what, tokens, tracks in (
        ("training", "tokens", trace.training),
        ("sampling", "sampled_tokens", trace.sampling),
    ):
        timelines = [timeline for track in tracks for timeline in track.timelines]
        if timelines:
            for doing, counted in (("wait", WAITING), ("run", RUNNING)):
                changes = _in_stages(timelines, counted)
                yield from writer.counter(f"{what}: requests that {doing}", "requests", session, changes)
            yield from writer.counter(f"{what}: tokens per second", "tokens/s", session, _rates(timelines, tokens))
    for owner in owners:
        yield from writer.lanes(owner, session)


class _Writer:
    def __init__(self, unix_ns: int) -> None:
        self._unix_ns = unix_ns
        self._ids = count(1)

    def clocks(self, at: int) -> TracePacket:
        """Make the trace's clock show the time since 1970."""
        when = at + self._unix_ns
        clocks = [ClockSnapshot.Clock(clock_id=each, timestamp=when) for each in (REALTIME, BOOTTIME)]
        return TracePacket(
            timestamp=when, clock_snapshot=ClockSnapshot(clocks=clocks), trusted_packet_sequence_id=SEQUENCE
        )

    def track(
        self, name: str, parent: int | None = None, *, description: str | None = None, unit: str | None = None
    ) -> Generator[TracePacket, None, int]:
        """Describe a new track and return its id; tracks are shown in the order of creation."""
        uuid = next(self._ids)
        track = TrackDescriptor(
            uuid=uuid,
            name=name,
            parent_uuid=parent,
            description=description,
            counter=None if unit is None else CounterDescriptor(unit_name=unit),
            child_ordering=TrackDescriptor.EXPLICIT,
            sibling_order_rank=uuid,
        )
        yield TracePacket(track_descriptor=track, trusted_packet_sequence_id=SEQUENCE)
        return uuid

    def event(
        self,
        at: int,
        track: int,
        kind: "TrackEvent.Type",
        name: str | None = None,
        category: str | None = None,
        arguments: Iterable[DebugAnnotation] = (),
        value: float | None = None,
    ) -> TracePacket:
        event = TrackEvent(
            type=kind,
            track_uuid=track,
            name=name,
            categories=() if category is None else (category,),
            debug_annotations=arguments,
            double_counter_value=value,
        )
        return TracePacket(timestamp=at + self._unix_ns, track_event=event, trusted_packet_sequence_id=SEQUENCE)

    def counter(self, name: str, unit: str, parent: int, changes: Iterable[Change]) -> Iterator[TracePacket]:
        """A counter that adds up `changes`."""
        track = yield from self.track(name, parent, unit=unit)
        value, last = 0.0, None
        for at, change in sorted(changes):
            if last is not None and at != last:
                yield self.event(last, track, TrackEvent.TYPE_COUNTER, value=round(value, 3))
            value += change
            last = at
        if last is not None:
            yield self.event(last, track, TrackEvent.TYPE_COUNTER, value=round(value, 3))

    def lanes(self, owner: OwnerTrack, parent: int) -> Iterator[TracePacket]:
        """Put every operation on the first free line; one that has not ended blocks its line."""
        free: list[int] = []  # lines
        taken: list[tuple[int, int]] = []  # until when, and the line
        for timeline in sorted(owner.timelines, key=lambda timeline: timeline.stages[0][1]):
            ended = timeline.ended
            while taken and taken[0][0] <= timeline.stages[0][1]:
                heapq.heappush(free, heapq.heappop(taken)[1])
            if free:
                line = heapq.heappop(free)
            else:
                line = yield from self.track(owner.name, parent, description=owner.description)
            if ended:
                heapq.heappush(taken, (ended, line))
            yield from self.slices(timeline, ended, line)

    def slices(self, timeline: Timeline, ended: int, track: int) -> Iterator[TracePacket]:
        """An operation, with its stages inside."""
        begin, end = TrackEvent.TYPE_SLICE_BEGIN, TrackEvent.TYPE_SLICE_END
        category = "sampling" if timeline.kind == "sample" else "training"
        yield self.event(timeline.stages[0][1], track, begin, timeline.kind, category, _arguments(timeline, ended))
        for stage, began, until in stages(timeline, ended):
            yield self.event(began, track, begin, stage, "stage")
            if until:
                yield self.event(until, track, end)
        if ended:
            yield self.event(ended, track, end)


def _arguments(timeline: Timeline, ended: int) -> Iterator[DebugAnnotation]:
    yield DebugAnnotation(name="request_id", string_value=timeline.request_id)
    seq_id = timeline.request_id.rpartition(":")[2]
    if seq_id.isdecimal():  # the creation of a model has none
        yield DebugAnnotation(name="seq_id", int_value=int(seq_id))
    yield DebugAnnotation(name="outcome", string_value=timeline.outcome if ended else "not ended")
    if ended and timeline.error:
        yield DebugAnnotation(name="error", string_value=timeline.error)
    for name, value in (timeline.facts or {}).items():
        yield DebugAnnotation(name=name, int_value=value)


def _in_stages(timelines: Iterable[Timeline], counted: Collection[Stage]) -> Iterator[Change]:
    """Changes of the number of requests in some stages."""
    for timeline in timelines:
        for stage, began, until in stages(timeline, timeline.ended):
            if stage in counted:
                yield began, 1.0
                if until:
                    yield until, -1.0


def _rates(timelines: Iterable[Timeline], tokens: str) -> Iterator[Change]:
    """Changes of the tokens per second, with each request's tokens spread evenly over its running time."""
    for timeline in timelines:
        number, ended = (timeline.facts or {}).get(tokens, 0), timeline.ended
        if not number or not ended or timeline.outcome != "ok":
            continue
        ran: list[tuple[int, int]] = []
        for stage, at, until in stages(timeline, ended):
            if stage in RUNNING:
                joins = bool(ran) and ran[-1][1] == at
                ran.append((ran.pop()[0] if joins else at, until))
        seconds = sum(until - at for at, until in ran) / 1e9
        for at, until in ran:
            yield at, number / seconds
            yield until, -number / seconds
