"""Reads a Perfetto trace back with the protobuf classes alone, and checks that it is sound."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TrackEvent


class ReadSlice(NamedTuple):
    """A slice as the file has it; an instant has no end."""

    track: str
    name: str
    begin_ns: int
    end_ns: int | None
    depth: int
    args: dict[str, Any]


class ReadTrace(NamedTuple):
    """What a file holds; slices by their begins."""

    threads: list[str]
    slices: list[ReadSlice]
    counters: dict[str, list[tuple[int, float]]]

    def named(self, name: str, track: str | None = None) -> list[ReadSlice]:
        """Slices of a name, perhaps of one track only."""
        return [s for s in self.slices if s.name == name and track in (None, s.track)]


def read_trace(path: Path) -> ReadTrace:
    """Reads and checks: descriptors before use, times in order, begins and ends in pairs."""
    trace = Trace()
    trace.ParseFromString(path.read_bytes())
    names: dict[int, str] = {}
    threads, processes = [], []
    stacks: dict[int, list[int]] = {}
    slices: list[ReadSlice] = []
    counters: dict[str, list[tuple[int, float]]] = {}
    last_ns = 0
    for packet in trace.packet:
        assert packet.trusted_packet_sequence_id
        if packet.HasField("track_descriptor"):
            descriptor = packet.track_descriptor
            assert descriptor.uuid not in names, "two tracks with one id"
            assert not last_ns, "a descriptor behind events"
            if descriptor.HasField("process"):
                processes.append(descriptor.process.pid)
            else:
                assert descriptor.parent_uuid in names
            if descriptor.HasField("thread"):
                assert descriptor.thread.pid == processes[0]
                threads.append(descriptor.thread.thread_name)
            names[descriptor.uuid] = descriptor.thread.thread_name or descriptor.name
            if descriptor.HasField("counter"):
                counters[descriptor.name] = []
            continue
        event, now = packet.track_event, packet.timestamp
        assert now >= last_ns > -1, "times go backwards"
        last_ns = now
        track, stack = names[event.track_uuid], stacks.setdefault(event.track_uuid, [])
        if event.type == TrackEvent.TYPE_COUNTER:
            counters[track].append((now, event.double_counter_value))
        elif event.type == TrackEvent.TYPE_SLICE_END:
            started = stack.pop()
            slices[started] = slices[started]._replace(end_ns=now)
        else:
            args = {a.name: getattr(a, a.WhichOneof("value")) for a in event.debug_annotations}
            if event.type == TrackEvent.TYPE_SLICE_BEGIN:
                stack.append(len(slices))
            depth = len(stack) - (event.type == TrackEvent.TYPE_SLICE_BEGIN)
            slices.append(ReadSlice(track, event.name, now, None, depth, args))
    assert len(processes) == 1
    assert not any(stacks.values()), "slices without an end"
    return ReadTrace(threads, slices, counters)
