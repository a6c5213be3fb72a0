"""Totals of a fleet go on where a worker was started again."""

from __future__ import annotations

import asyncio
import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from sgljax_engine import Engine, EngineCounters
from sgljax_engine.fleet.states import FleetState
from tests.engine.models import TINY
from tests.geometry import SMALL


@pytest.fixture(scope="module")
def state():
    with Engine(model_config=TINY, load_format="dummy", **SMALL) as engine:
        return dataclasses.asdict(engine.get_internal_state())


class Workers:
    """Answers of a fleet, each worker's counters as they are set."""

    def __init__(self, state: dict[str, Any]) -> None:
        self._state = state
        self.counters: dict[str, EngineCounters] = {}

    async def tell_all(self, path: str, body: Any, timeout_s: float) -> list[Any]:
        assert path == "/server_info"
        return [
            SimpleNamespace(
                url=url,
                content={
                    "internal_states": [{**self._state, "counters": dataclasses.asdict(counters)}]
                },
            )
            for url, counters in self.counters.items()
        ]


def mean_use(counters: EngineCounters, total_kv_tokens: int) -> float:
    """As docstrings of EngineCounters tell it."""
    return counters.used_kv_tokens / counters.num_dispatches / total_kv_tokens


def test_a_worker_that_was_started_again(state):
    workers: Any = Workers(state)
    fleet, pool = FleetState(workers), state["total_kv_tokens"]

    def read() -> Any:
        return asyncio.run(fleet.read())

    busy = EngineCounters(num_requests=10, num_dispatches=10, used_kv_tokens=10 * pool // 2)
    workers.counters = {"one": busy, "other": busy}
    found = read()
    assert found.counters.num_requests == 20
    assert mean_use(found.counters, found.total_kv_tokens) == 0.5

    again = EngineCounters(num_requests=4, num_dispatches=4, used_kv_tokens=4 * pool // 2)
    for _ in range(2):
        workers.counters = {"one": again, "other": busy}
        found = read()
        assert found.counters.num_requests == 24
        assert mean_use(found.counters, found.total_kv_tokens) == 0.5

    workers.counters = {"other": busy}  # "one" is gone: its work stays counted
    assert read().counters.num_requests == 24
