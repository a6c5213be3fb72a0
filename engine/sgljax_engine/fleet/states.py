"""What a fleet did: its workers' states as one, and the trainer's own counts. Host only."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping
from typing import Any

from sgljax_engine.fleet.client import FleetClient
from sgljax_engine.observability.combined import combine_counters, combine_states
from sgljax_engine.observability.metrics import EngineCounters, EngineState, MemoryReport
from sgljax_engine.observability.progress import EngineProgress
from sgljax_engine.outputs import RequestOutput

_TIMEOUT_S = 10.0


class FleetState:
    """Reads the states of workers. Totals go on where a worker was started again."""

    def __init__(self, client: FleetClient) -> None:
        self._client = client
        self._newest: dict[str, EngineCounters] = {}
        self._before: dict[str, EngineCounters] = {}  # of earlier lives

    async def read(self) -> EngineState:
        replies = await self._client.tell_all("/server_info", None, _TIMEOUT_S)
        states = {each.url: _read_state(each.content["internal_states"][0]) for each in replies}
        for url, state in states.items():
            newest = self._newest.get(url, EngineCounters())
            if state.counters.num_requests < newest.num_requests:
                self._before[url] = self._with_before(url, newest)
            self._newest[url] = state.counters
        combined = combine_states(list(states.values()))
        counters = [self._with_before(*item) for item in self._newest.items()]
        return dataclasses.replace(combined, counters=combine_counters(counters))

    def _with_before(self, url: str, counters: EngineCounters) -> EngineCounters:
        before = self._before.get(url, EngineCounters())
        return combine_counters([before, counters], share_pool=True)


def _read_state(content: Mapping[str, Any]) -> EngineState:
    fields = {field.name: content[field.name] for field in dataclasses.fields(EngineState)}
    for name, value in fields.items():
        if isinstance(value, list):
            fields[name] = tuple(value)
    fields["engines"] = tuple(map(_read_state, content["engines"]))
    fields["memory"] = MemoryReport(**content["memory"])
    fields["counters"] = EngineCounters(**content["counters"])
    return EngineState(**fields)


class FleetCounts:
    """Counts of one trainer's requests. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_open = 0
        self._num_finished = 0
        self._num_output_tokens = 0
        self._num_prefill_tokens = 0
        self._num_cached_tokens = 0

    def started(self, count: int) -> None:
        with self._lock:
            self._num_open += count

    def ended(self, count: int) -> None:
        with self._lock:
            self._num_open -= count

    def finished(self, output: RequestOutput) -> None:
        with self._lock:
            self._num_finished += 1
            self._num_output_tokens += len(output.output_ids)
            self._num_cached_tokens += output.num_cached_tokens
            self._num_prefill_tokens += output.num_prompt_tokens - output.num_cached_tokens

    def progress(self, weight_version: int) -> EngineProgress:
        with self._lock:
            return EngineProgress(
                num_running=self._num_open,
                num_waiting=0,
                num_finished=self._num_finished,
                num_output_tokens=self._num_output_tokens,
                num_prefill_tokens=self._num_prefill_tokens,
                num_cached_tokens=self._num_cached_tokens,
                num_verified_tokens=0,
                num_accepted_tokens=0,
                weight_version=weight_version,
                halted_s=None,
            )
