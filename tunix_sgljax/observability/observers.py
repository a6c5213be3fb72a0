"""Events and totals of a rollout, for what a person sees and for what is recorded."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from sgljax_engine import Engine, EngineCounters
from tunix_sgljax.observability.progress import PhaseLines, Progress


class HostSpan(NamedTuple):
    """Time that a thread on the trainer's side spent on something, by `time.perf_counter`."""

    thread_id: int
    thread_name: str
    name: str
    begin_s: float
    end_s: float
    args: Mapping[str, int | float | str]


class RolloutTotals(NamedTuple):
    """Totals of a rollout since it was made.

    `busy_s` are seconds in which at least one `generate` call was running and did not rest;
    `sync_s` those of `update_params`, on its callers' threads. `total_kv_tokens` is what the
    engine's pages hold; 0 without an engine.
    """

    busy_s: float
    sync_s: float
    counters: EngineCounters
    total_kv_tokens: int
    weight_version: int

    def since(self, before: RolloutTotals) -> RolloutTotals:
        """What was added, with the newest of tokens and version."""
        return self._replace(
            busy_s=self.busy_s - before.busy_s,
            sync_s=self.sync_s - before.sync_s,
            counters=self.counters.since(before.counters),
        )


class RolloutObservers:
    """Passes events of `SglJaxRollout`'s calls to observers. Any thread.

    `on_updated` is called after each weight update that succeeded, on the thread of its caller;
    `on_span` with each span of the rollout's calls, on the thread that they ran on.
    """

    def __init__(self, progress: Progress | None) -> None:
        self.progress: Progress | PhaseLines = progress or PhaseLines()
        self.engine: Engine | None = None
        self.on_built: list[Callable[[Engine], None]] = []
        self.on_updated: list[Callable[[], None]] = []
        if isinstance(self.progress, PhaseLines):
            self.on_updated.append(self.progress.updated)
        self.on_span: list[Callable[[HostSpan], None]] = []
        self._lock = threading.Lock()
        self._num_calls = 0
        self._is_resting = False
        self._counted_s = 0.0  # up to when `_busy_s` counts
        self._busy_s = 0.0
        self._sync_s = 0.0

    def built(self, engine: Engine) -> None:
        self.engine = engine
        for tell in list(self.on_built):
            tell(engine)

    def expect_trainer(self, is_expected: bool) -> None:
        """Says whether a trainer's step follows the first rollout."""
        if isinstance(self.progress, PhaseLines):
            self.progress.has_trainer = is_expected

    def totals(self) -> RolloutTotals:
        """The totals so far, including running calls."""
        engine = self.engine
        with self._lock:
            self._count()
            busy_s, sync_s = self._busy_s, self._sync_s
        if engine is None:
            return RolloutTotals(busy_s, sync_s, EngineCounters(), 0, 0)
        state = engine.get_internal_state()
        return RolloutTotals(
            busy_s, sync_s, state.counters, state.total_kv_tokens, state.weight_version
        )

    @contextlib.contextmanager
    def generating(self, engine: Engine, num_requests: int) -> Iterator[None]:
        with self._lock:
            self._count()
            self._num_calls += 1
        try:
            shown = self.progress.rollout(engine, num_requests)
            with self.span("generate", requests=num_requests), shown:
                yield
        finally:
            with self._lock:
                self._count()
                self._num_calls -= 1

    def rest(self, is_resting: bool) -> None:
        """Says whether calls that are under way wait for the trainer; that time is not busy."""
        with self._lock:
            self._count()
            self._is_resting = is_resting

    def _count(self) -> None:
        now_s = time.perf_counter()
        if self._num_calls and not self._is_resting:
            self._busy_s += now_s - self._counted_s
        self._counted_s = now_s

    @contextlib.contextmanager
    def updating(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            with self.span("update_params"):
                yield
        finally:
            with self._lock:
                self._sync_s += time.perf_counter() - began
        for tell in list(self.on_updated):
            tell()

    @contextlib.contextmanager
    def span(self, name: str, **args: int) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            thread, now_s = threading.current_thread(), time.perf_counter()
            self.tell(HostSpan(threading.get_ident(), thread.name, name, began, now_s, args))

    def tell(self, span: HostSpan) -> None:
        """Passes on a span that is over, of any thread."""
        for tell in list(self.on_span):
            tell(span)
