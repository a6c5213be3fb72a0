"""Writes slices, instants and counters as a trace of Perfetto's protobuf format.

The format: a file is a list of packets. Descriptors name a process, its threads, and tracks below
it; events begin or end a slice of a track, or set a counter. Slices of a track must nest, so
overlapping slices are spread over several lanes.
https://perfetto.dev/docs/reference/synthetic-track-event
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TracePacket, TrackEvent
from perfetto.trace_builder.proto_builder import TraceProtoBuilder

from sgljax_engine import InvalidConfigError

PROCESS_NAME = "tunix-sgljax"
_SEQUENCE = 1


class Slice(NamedTuple):
    """An event on a track, in seconds of one clock; an instant if it begins when it ends."""

    name: str
    begin_s: float
    end_s: float
    args: Mapping[str, int | float | str]


class Track(NamedTuple):
    """The slices, in any order, of a thread, or of a device or other owner."""

    name: str
    is_thread: bool
    slices: Sequence[Slice]


class Counter(NamedTuple):
    """A number over time: pairs of seconds and value, ascending."""

    name: str
    points: Sequence[tuple[float, float]]


def write_trace(path: str | Path, tracks: Iterable[Track], counters: Iterable[Counter]) -> Path:
    """Writes a file for https://ui.perfetto.dev with the tracks in the order given."""
    path = check_parent(path)
    trace = _Trace()
    for track in tracks:
        trace.add_track(track)
    for counter in counters:
        trace.add_counter(counter)
    path.write_bytes(trace.serialize())
    return path


def check_parent(path: str | Path) -> Path:
    """The path, or an InvalidConfigError if its folder is missing."""
    parent = Path(path).parent
    if not parent.is_dir():
        raise InvalidConfigError(f"no such folder to write a timeline to: {str(parent)!r}")
    return Path(path)


def lanes(slices: Iterable[Slice]) -> list[list[Slice]]:
    """Spreads slices over the fewest lanes in which they nest; ordered by begin, outer first."""
    found: list[list[Slice]] = []
    open_ends: list[list[float]] = []  # of each lane, outermost first
    for each in sorted(slices, key=lambda s: (s.begin_s, -s.end_s)):
        place = next((i for i, ends in enumerate(open_ends) if _nests(each, ends)), len(found))
        if place == len(found):
            found.append([])
            open_ends.append([])
        found[place].append(each)
        open_ends[place].append(each.end_s)
    return found


def _nests(each: Slice, ends: list[float]) -> bool:
    """Whether a slice fits into a lane's open ones; drops the ends of those that are over."""
    while ends and ends[-1] <= each.begin_s:
        ends.pop()
    return not ends or each.end_s <= ends[-1]


class _Trace:
    """Packets: descriptors first, then events in the order of their times."""

    def __init__(self) -> None:
        self._builder = TraceProtoBuilder()
        self._events: list[TracePacket] = []
        self._last_uuid = 1
        self._num_threads = 0
        process = self._add_descriptor(1)
        process.process.pid = os.getpid()
        process.process.process_name = PROCESS_NAME

    def add_track(self, track: Track) -> None:
        for i, lane in enumerate(lanes(track.slices)):
            descriptor = self._add_descriptor()
            descriptor.parent_uuid = 1
            descriptor.sibling_order_rank = descriptor.uuid
            if track.is_thread and not i:
                self._num_threads += 1
                descriptor.thread.pid = os.getpid()
                descriptor.thread.tid = os.getpid() + self._num_threads  # ours, not the system's
                descriptor.thread.thread_name = track.name
            else:
                descriptor.name = track.name
            self._add_lane(descriptor.uuid, lane)

    def add_counter(self, counter: Counter) -> None:
        descriptor = self._add_descriptor()
        descriptor.parent_uuid = 1
        descriptor.name = counter.name
        descriptor.sibling_order_rank = descriptor.uuid
        descriptor.counter.SetInParent()
        for time_s, value in counter.points:
            event = self._add_event(descriptor.uuid, time_s, TrackEvent.TYPE_COUNTER)
            event.double_counter_value = value

    def serialize(self) -> bytes:
        self._events.sort(key=lambda packet: packet.timestamp)  # stable: ends stay before begins
        self._builder.trace.packet.extend(self._events)
        return self._builder.serialize()

    def _add_lane(self, uuid: int, lane: Sequence[Slice]) -> None:
        """Begins and ends in their order; what ends when another begins is ended first."""
        ends: list[float] = []
        for each in lane:
            while ends and ends[-1] <= each.begin_s:
                self._add_event(uuid, ends.pop(), TrackEvent.TYPE_SLICE_END)
            is_instant = each.begin_s == each.end_s
            kind = TrackEvent.TYPE_INSTANT if is_instant else TrackEvent.TYPE_SLICE_BEGIN
            event = self._add_event(uuid, each.begin_s, kind)
            event.name = each.name
            for name, value in each.args.items():
                _annotate(event, name, value)
            if not is_instant:
                ends.append(each.end_s)
        while ends:
            self._add_event(uuid, ends.pop(), TrackEvent.TYPE_SLICE_END)

    def _add_descriptor(self, uuid: int | None = None) -> Any:
        packet = self._builder.add_packet()
        packet.trusted_packet_sequence_id = _SEQUENCE
        if uuid is None:
            self._last_uuid += 1
            uuid = self._last_uuid
        else:
            packet.sequence_flags = TracePacket.SEQ_INCREMENTAL_STATE_CLEARED
        packet.track_descriptor.uuid = uuid
        return packet.track_descriptor

    def _add_event(self, uuid: int, time_s: float, kind: Any) -> Any:
        packet = TracePacket()
        packet.timestamp = round(time_s * 1e9)
        packet.trusted_packet_sequence_id = _SEQUENCE
        packet.track_event.type = kind
        packet.track_event.track_uuid = uuid
        self._events.append(packet)
        return packet.track_event


def _annotate(event: Any, name: str, value: int | float | str) -> None:
    annotation = event.debug_annotations.add()
    annotation.name = name
    if isinstance(value, str):
        annotation.string_value = value
    elif isinstance(value, float):
        annotation.double_value = value
    else:
        annotation.int_value = int(value)
