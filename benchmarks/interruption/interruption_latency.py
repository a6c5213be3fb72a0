"""How long a pause takes under load, and what a paused process uses."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from sgljax_engine import Engine, EngineShutdownError, SamplingParams
from sgljax_engine.io_struct import PauseMode

LATENCY_MODES: tuple[PauseMode, ...] = ("retract", "in_place")

WAIT_S = 120
"""Longer than anything here takes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Latencies:
    """Pauses of one mode.

    Attributes:
        mode: Of the pauses.
        max_dispatch_s: Of the engine.
        tokens_per_s: Without a pause, just before.
        pauses_s: Seconds of each `pause_generation`, in order.
        waited: For each pause, the dispatches that ended while it waited.
        dispatches_s: Seconds of each dispatch that ran to its end meanwhile, in order.
    """

    mode: PauseMode
    max_dispatch_s: float
    tokens_per_s: float
    pauses_s: list[float]
    waited: list[int]
    dispatches_s: list[float]

    @property
    def in_dispatches(self) -> np.ndarray:
        """Each pause in units of the median dispatch."""
        return np.array(self.pauses_s) / np.median(self.dispatches_s)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Idleness:
    """CPU time of the whole process while it is paused with requests held."""

    mode: PauseMode
    num_held: int
    period_s: float
    cpu_s: float

    @property
    def share(self) -> float:
        """Of one core."""
        return self.cpu_s / self.period_s


class Load:
    """More threads than rows, each generating one request after another until it is closed.

    So others wait for the place of one that ends, and the batch stays full.
    """

    def __init__(self, engine: Engine, num_rows: int, *, max_prompt: int, max_new: int) -> None:
        self.engine = engine
        self.num_rows = num_rows
        self.num_answered = 0
        self._max_prompt, self._max_new = max_prompt, max_new
        self._lock = threading.Lock()
        self._failures: list[Exception] = []
        self._is_over = False
        for seed in range(num_rows + num_rows // 4):
            threading.Thread(target=self._generate, args=(seed,), daemon=True).start()

    def _generate(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        vocab_size = self.engine.model_config.vocab_size
        with contextlib.suppress(EngineShutdownError):
            while not self._is_over:
                prompt = rng.integers(1, vocab_size, rng.integers(8, self._max_prompt + 1)).tolist()
                params = SamplingParams(
                    max_new_tokens=int(rng.integers(self._max_new // 2, self._max_new + 1)),
                    ignore_eos=True,
                )
                try:
                    self.engine.generate_requests([prompt], params)
                except EngineShutdownError:
                    raise
                except Exception as error:
                    self._failures.append(error)
                    return
                with self._lock:
                    self.num_answered += 1

    def wait_until_full(self) -> None:
        """Until nearly all rows decode: some have ended at any time between two dispatches."""
        deadline = time.monotonic() + WAIT_S
        while True:
            state = self.engine.get_internal_state()
            if state.running_batch_size >= 0.75 * self.num_rows and not state.num_prefilling:
                return
            self.check()
            if time.monotonic() > deadline:
                raise TimeoutError(f"{state.running_batch_size} of {self.num_rows} rows run")

    def check(self) -> None:
        """Raises what a request failed with."""
        if self._failures:
            raise self._failures[0]

    def close(self) -> None:
        """The engine is shut down; every thread ends with its request."""
        self._is_over = True
        self.check()


@contextlib.contextmanager
def _timed_dispatches(engine: Engine) -> Iterator[list[float]]:
    """Collects the seconds of every dispatch, host work included."""
    core: Any = engine._group.loops[0]._core
    real, durations = core.step, []

    def step() -> None:
        start = time.perf_counter()
        real()
        durations.append(time.perf_counter() - start)

    core.step = step
    try:
        yield durations
    finally:
        core.step = real


def _measure_speed(load: Load, period_s: float) -> float:
    """Tokens a second of a load that nobody interrupts."""
    start, before = time.perf_counter(), load.engine.get_internal_state().counters
    time.sleep(period_s)  # the measurement
    after = load.engine.get_internal_state().counters
    num_tokens = after.num_output_tokens - before.num_output_tokens
    return num_tokens / (time.perf_counter() - start)


def measure_latencies(
    load: Load,
    mode: PauseMode,
    count: int,
    max_dispatch_s: float,
    speed_s: float,
    seed: int = 0,
) -> Latencies:
    """Pauses at random moments: after a time of up to two dispatches without a pause.

    Args:
        load: Of the engine that is paused.
        mode: Of the pauses.
        count: Of pauses.
        max_dispatch_s: Of the engine.
        speed_s: Seconds of uninterrupted load, measured before pauses.
        seed: Of the moments.
    """
    rng, engine = np.random.default_rng(seed), load.engine
    pauses_s: list[float] = []
    waited: list[int] = []
    load.wait_until_full()
    tokens_per_s = _measure_speed(load, speed_s)
    with _timed_dispatches(engine) as durations:
        deadline = time.monotonic() + WAIT_S
        while len(durations) < 4 and time.monotonic() < deadline:
            engine.get_internal_state()
        for _ in range(count):
            time.sleep(rng.uniform(0, 2 * float(np.median(durations))))
            start, num_before = time.perf_counter(), len(durations)
            engine.pause_generation(mode)
            pauses_s.append(time.perf_counter() - start)
            waited.append(len(durations) - num_before)
            engine.continue_generation()
            load.check()
    return Latencies(
        mode=mode,
        max_dispatch_s=max_dispatch_s,
        tokens_per_s=tokens_per_s,
        pauses_s=pauses_s,
        waited=waited,
        dispatches_s=durations,
    )


def measure_idleness(load: Load, mode: PauseMode, period_s: float) -> Idleness:
    """CPU time over a pause with all requests held."""
    engine = load.engine
    load.wait_until_full()
    engine.pause_generation(mode)
    state = engine.get_internal_state()
    start, used = time.perf_counter(), time.process_time()
    time.sleep(period_s)  # the measurement
    cpu_s, period_s = time.process_time() - used, time.perf_counter() - start
    engine.continue_generation()
    return Idleness(
        mode=mode,
        num_held=state.running_batch_size + state.waiting_queue_size,
        period_s=period_s,
        cpu_s=cpu_s,
    )


def format_latencies(measured: list[Latencies]) -> list[str]:
    """A section in Markdown."""
    lines = [
        "## How long a pause takes",
        "",
        "From the call to its return, at random moments. A dispatch is the median one of the same "
        "run. `max_dispatch_s` is what dispatches aim at; they end before that when a request "
        "finishes, since others wait for its place. Speed is that before the first pause.",
        "",
        "| `max_dispatch_s` | mode | pauses | | median | p90 | p99 | max | dispatch, median "
        "| dispatch, max | tokens/s |",
        "|---|---|---:|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for each in measured:
        dispatches = np.array(each.dispatches_s)
        typical = float(np.median(dispatches))
        for unit, values, one, most, digits in (
            ("ms", np.array(each.pauses_s) * 1e3, typical * 1e3, dispatches.max() * 1e3, 1),
            ("dispatches", each.in_dispatches, 1.0, dispatches.max() / typical, 2),
        ):
            marks = [float(np.percentile(values, p)) for p in (50, 90, 99, 100)]
            cells = " | ".join(f"{mark:.{digits}f}" for mark in [*marks, one, float(most)])
            lines.append(
                f"| {each.max_dispatch_s:g} s | {each.mode} | {len(values)} | {unit} | {cells} "
                f"| {each.tokens_per_s:.0f} |"
            )
    lines += ["", "Dispatches that ended between the call and its return:", ""]
    lines += ["| `max_dispatch_s` | mode | none | 1 | 2 | more |", "|---|---|---:|---:|---:|---:|"]
    for each in measured:
        counts = [sum(count == n for count in each.waited) for n in range(3)]
        cells = " | ".join(map(str, [*counts, len(each.waited) - sum(counts)]))
        lines.append(f"| {each.max_dispatch_s:g} s | {each.mode} | {cells} |")
    return [*lines, ""]


def format_idleness(measured: list[Idleness]) -> list[str]:
    """A section in Markdown."""
    lines = [
        "## What a paused process uses",
        "",
        "CPU time of all threads; target: below 1 % of one core.",
        "",
        "| mode | requests held | s | CPU, ms | of one core |",
        "|---|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {each.mode} | {each.num_held} | {each.period_s:.1f} | {each.cpu_s * 1e3:.1f} "
        f"| {each.share:.3%} |"
        for each in measured
    ]
    return [*lines, ""]
