"""A line for each slow phase of a run in a script: compilation, rollouts, the trainer's turn."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator

from sgljax_engine import Engine

SLOW_S = 2.0
"""Rollouts that take less than this many seconds are silent, except for the first."""

HEARTBEAT_S = 20.0
"""Seconds between two lines of a rollout that takes long."""


class PhaseLines:
    """Writes lines to stderr while a run would be silent otherwise. Any thread.

    A rollout without a `Progress` has one, since the first minutes of a run are compilation. Once
    programs are compiled and rollouts are fast, it writes nothing.
    """

    def __init__(self, *, has_trainer: bool = False) -> None:
        """Writes nothing yet.

        Args:
            has_trainer: Whether a trainer follows the first rollout.
        """
        self.has_trainer = has_trainer
        self._lock = threading.Lock()
        self._totals: dict[str, tuple[int, int]] = {}
        self._num_programs = 0
        self._rounds: dict[int, _Round] = {}
        self._num_rounds = 0

    # ------------------------------------------------------------------ a ProgressListener

    def started(self, task: str, total: int, unit: str) -> None:
        """Notes the number of programs, if the task compiles some."""
        del unit
        if not task.startswith("compile ") or not total:
            return
        with self._lock:
            if task == "compile programs":
                self._totals[task] = (0, total)
                line = f"rollout compiles {total} program{'s' if total > 1 else ''}"
            else:
                self._num_programs += 1
                name = task.removeprefix("compile ")
                line = f"rollout compiles program {self._num_programs}, {name}"
        _write(line)

    def advanced(self, task: str, count: int) -> None:
        """Counts units of a task that is noted."""
        with self._lock:
            if task not in self._totals:
                return
            done, total = self._totals[task]
            self._totals[task] = (done + count, total)
        _write(f"rollout compiled {done + count} of {total}")

    def finished(self, task: str) -> None:
        """Forgets the task."""
        with self._lock:
            self._totals.pop(task, None)

    # ------------------------------------------------------------------ rollouts

    @contextlib.contextmanager
    def rollout(self, engine: Engine, num_requests: int) -> Iterator[None]:
        """Wraps a call that generates; concurrent calls of an engine share their lines."""
        with self._lock:
            current = self._rounds.get(id(engine))
            if current is None:
                current = self._rounds[id(engine)] = _Round(engine)
            current.num_calls += 1
            current.num_samples += num_requests
        try:
            yield
        finally:
            with self._lock:
                current.num_calls -= 1
                is_over, is_first = not current.num_calls, not self._num_rounds
                if is_over:
                    del self._rounds[id(engine)]
                    self._num_rounds += 1
            if is_over:
                current.close()
                if is_first or current.seconds >= SLOW_S:
                    turn = "; next the trainer, whose first step compiles"
                    _write(current.describe() + (turn if self.has_trainer else ""))

    def updated(self) -> None:
        """The trainer has made a step and updated the weights."""
        self.has_trainer = False


class _Round:
    """Concurrent calls of an engine, and the thread that writes while they last."""

    def __init__(self, engine: Engine) -> None:
        self.num_calls = 0
        self.num_samples = 0
        self._engine = engine
        self._first = engine.get_progress()
        self._began = time.perf_counter()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sgljax-progress", daemon=True)
        self._thread.start()

    @property
    def seconds(self) -> float:
        """Seconds since the round began."""
        return time.perf_counter() - self._began

    def describe(self) -> str:
        """What the round did so far, in a line."""
        now, seconds = self._engine.get_progress(), self.seconds
        done = min(now.num_finished - self._first.num_finished, self.num_samples)
        samples = f"{self.num_samples} sample{'s' if self.num_samples > 1 else ''}"
        part = f"{done} of " if done < self.num_samples else ""
        rate = (now.num_output_tokens - self._first.num_output_tokens) / max(seconds, 1e-9)
        return (
            f"rollout {seconds:.1f} s, {part}{samples}, {rate:.0f} tokens/s, "
            f"weights v{now.weight_version}"
        )

    def close(self) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_over.wait(HEARTBEAT_S):
            _write(self.describe())


def _write(line: str) -> None:
    """Writes a line to stderr, above bars if there are any; a closed stderr is no error."""
    from tqdm import tqdm

    with contextlib.suppress(OSError, ValueError):
        if sys.stderr is not None:
            tqdm.write(line, file=sys.stderr)
            sys.stderr.flush()
