"""Reads a trace as Perfetto does: slices by track, each with those that lie within it."""

from dataclasses import dataclass, field
from typing import Any

from tinker_local.types.wire.perfetto_trace_pb2 import Trace, TrackEvent


@dataclass
class Slice:
    """`track`: its name. Times in nanoseconds since 1970; `end` None: it has none."""

    name: str
    track: str
    begin: int
    end: int | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    within: list["Slice"] = field(default_factory=list)

    @property
    def stages(self) -> list[str]:
        return [each.name for each in self.within]


@dataclass
class ReadTrace:
    """`tracks`: the parent's name of each by its name. `counters`: (time, value) by track. `notes`: instants."""

    tracks: dict[str, str | None]
    operations: list[Slice]
    counters: dict[str, list[tuple[int, float]]]
    notes: list[str]

    def of(self, request_id: str) -> Slice:
        """The only operation of that id."""
        (found,) = (each for each in self.operations if each.arguments["request_id"] == request_id)
        return found


def read_trace(content: bytes) -> ReadTrace:
    """AssertionError if an event has no track, slices overlap, or a slice ends that has not begun."""
    names: dict[int, str] = {}
    parents: dict[int, int] = {}
    stacks: dict[int, list[Slice]] = {}
    read = ReadTrace({}, [], {}, [])
    times: dict[int, int] = {}
    for packet in Trace.FromString(content).packet:
        assert packet.trusted_packet_sequence_id
        if packet.HasField("track_descriptor"):
            track = packet.track_descriptor
            assert track.uuid not in names
            assert not track.parent_uuid or track.parent_uuid in names
            names[track.uuid], parents[track.uuid] = track.name, track.parent_uuid
            read.tracks[track.name] = names.get(track.parent_uuid)
        elif packet.HasField("track_event"):
            event, at = packet.track_event, packet.timestamp
            assert times.get(event.track_uuid, 0) <= at
            times[event.track_uuid] = at
            stack = stacks.setdefault(event.track_uuid, [])
            if event.type == TrackEvent.TYPE_SLICE_BEGIN:
                arguments = {each.name: getattr(each, each.ListFields()[0][0].name) for each in event.debug_annotations}
                found = Slice(event.name, names[event.track_uuid], at, arguments=arguments)
                assert len(stack) < 2, "stages have no stages"
                (stack[-1].within if stack else read.operations).append(found)
                stack.append(found)
            elif event.type == TrackEvent.TYPE_SLICE_END:
                stack.pop().end = at
            elif event.type == TrackEvent.TYPE_COUNTER:
                values = read.counters.setdefault(names[event.track_uuid], [])
                values.append((at, event.double_counter_value))
            else:
                read.notes.append(event.name)
    return read
