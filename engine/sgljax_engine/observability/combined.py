"""The engines of a group seen as one. Host only."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from sgljax_engine.observability.metrics import EngineCounters, EngineState, MemoryReport
from sgljax_engine.observability.progress import EngineProgress
from sgljax_engine.observability.trace import RecordedEvent, RecordedSample, Recording

_LARGEST = {
    "max_decode_batch",
    "num_pauses",
    "pause_s",
    "num_weight_updates",
    "update_s",
    "num_sleeps",
    "sleep_s",
    "wake_s",
}
"""Counters that are no sums, or count what the engines do together; all others are added up."""


_SUMS_OF_STATES = (
    "running_batch_size",
    "waiting_queue_size",
    "num_prefilling",
    "host_bytes",
    "available_kv_tokens",
    "cached_kv_tokens",
    "total_kv_tokens",
    "held_window_tokens",
    "free_state_slots",
    "kept_states",
    "forward_ct_decode",
    "num_compiles",
    "compile_s",
)
"""Fields of a state that are added up. Others are combined by hand, or equal in all engines."""


def combine_counters(
    counters: Sequence[EngineCounters], *, share_pool: bool = False
) -> EngineCounters:
    """Those of several engines, or, with `share_pool`, of several times of one."""
    values = {}
    for field in dataclasses.fields(EngineCounters):
        each = [getattr(one, field.name) for one in counters]
        values[field.name] = max(each) if field.name in _LARGEST else sum(each)
    if not share_pool:
        values["used_kv_tokens"] *= len(counters)  # a dispatch sees one pool of several
    return EngineCounters(**values)


def combine_memory(reports: Sequence[MemoryReport]) -> MemoryReport:
    names = (
        "weights_bytes",
        "kv_bytes",
        "kv_tokens",
        "window_kv_tokens",
        "saved_window_bytes",
        "state_bytes",
        "state_slots",
        "program_bytes",
    )
    free = [report.free_bytes for report in reports]
    return dataclasses.replace(
        reports[0],
        **_sums(reports, names),
        free_bytes=None if None in free else sum(each for each in free if each is not None),
        num_engines=len(reports),
    )


def combine_states(states: Sequence[EngineState]) -> EngineState:
    """The state of the group; `EngineState.engines` has those of its engines."""
    first = states[0]
    if len(states) == 1:
        return first
    return dataclasses.replace(
        first,
        **_sums(states, _SUMS_OF_STATES),
        running_rids=tuple(rid for state in states for rid in state.running_rids),
        waiting_rids=tuple(rid for state in states for rid in state.waiting_rids),
        is_kv_allocated=any(state.is_kv_allocated for state in states),
        new_token_ratio=max(state.new_token_ratio for state in states),
        memory=combine_memory([state.memory for state in states]),
        counters=combine_counters([state.counters for state in states]),
        engines=tuple(states),
    )


def combine_progress(progresses: Sequence[EngineProgress]) -> EngineProgress:
    if len(progresses) == 1:
        return progresses[0]
    halts = [progress.halted_s for progress in progresses if progress.halted_s is not None]
    fields = [field.name for field in dataclasses.fields(EngineProgress)]
    sums = _sums(progresses, [name for name in fields if name.startswith("num_")])
    return dataclasses.replace(progresses[0], **sums, halted_s=max(halts, default=None))


def _sums(objects: Sequence[Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: sum([getattr(each, name) for each in objects]) for name in names}


def combine_recordings(recordings: Sequence[Recording]) -> Recording:
    """One recording. Names of tracks end in the engine's index, except for the first engine."""
    if len(recordings) == 1:
        return recordings[0]
    events = [
        _of_engine(event, index)
        for index, recording in enumerate(recordings)
        for event in recording.events
    ]
    return Recording(
        min(recording.begin_s for recording in recordings),
        max(recording.end_s for recording in recordings),
        sorted(events, key=lambda event: event.end_s),
        _sum_samples([recording.samples for recording in recordings]),
        sum(recording.num_dropped for recording in recordings),
    )


def _of_engine(event: RecordedEvent, index: int) -> RecordedEvent:
    return event if index == 0 else event._replace(track=f"{event.track} {index}")


def _sum_samples(samples: Sequence[Sequence[RecordedSample]]) -> list[RecordedSample]:
    """Samples of the group: whenever an engine has a new sample, the sum of the latest of each."""
    merged = sorted(
        ((sample, index) for index, each in enumerate(samples) for sample in each),
        key=lambda pair: pair[0].time_s,
    )
    latest: dict[int, RecordedSample] = {}
    sums: list[RecordedSample] = []
    for sample, index in merged:
        latest[index] = sample
        known = list(latest.values())
        sums.append(
            sample._replace(
                num_running=sum(each.num_running for each in known),
                num_waiting=sum(each.num_waiting for each in known),
                free_kv_tokens=sum(each.free_kv_tokens for each in known),
                num_output_tokens=sum(each.num_output_tokens for each in known),
            )
        )
    return sums
