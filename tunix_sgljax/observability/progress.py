"""What a person sees of a rollout: bars, or a line for each slow phase where there are none."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

from tqdm.auto import tqdm

from sgljax_engine import Engine, EngineProgress, HomeProcess

REDRAW_S = 0.2
"""Seconds between two polls of a generating engine."""

LOG_S = 10.0
"""The same for log files, where each drawing adds a line."""

SLOW_S = 2.0
"""Rollouts that take less than this many seconds have no line, except for the first."""

HEARTBEAT_S = 20.0
"""Seconds between two lines of a rollout that takes long."""


def is_interactive() -> bool:
    """Whether stderr is a terminal, or this is IPython: then Tunix draws its own training bar."""
    ipython = sys.modules.get("IPython")
    if ipython is not None and ipython.get_ipython() is not None:
        return True
    return sys.stderr is not None and sys.stderr.isatty()


class Progress:
    """Draws bars on stderr, or in the notebook. Any thread; bars of a task that failed are closed.

    For `SglJaxRollout(..., progress=Progress())` and `Engine(..., progress=Progress())`. A thread
    draws the bar for rollouts while calls of `generate` are running, and removes it afterwards. It
    polls the engine a few times a second without waiting for it.
    """

    def __init__(self, enabled: bool | None = None) -> None:
        """Draws nothing yet.

        Args:
            enabled: False draws nothing. None draws if stderr is a terminal or this is a notebook.
        """
        self._is_enabled = is_interactive() if enabled is None else enabled
        self._home = HomeProcess("progress")
        self._lock = threading.Lock()
        self._bars: dict[str, tqdm[Any]] = {}
        self._rounds = _Rounds(_RolloutBar)

    @property
    def is_enabled(self) -> bool:
        """Whether anything is drawn."""
        return self._is_enabled

    def started(self, task: str, total: int, unit: str) -> None:
        """Opens the task's bar."""
        if not self._is_enabled:
            return
        is_bytes = unit == "B"
        with self._lock:
            self._bars[task] = tqdm(
                desc=task.capitalize(),
                total=total,
                unit=unit if is_bytes else f" {unit}",
                unit_scale=is_bytes,
                unit_divisor=1024 if is_bytes else 1000,
                dynamic_ncols=True,
            )

    def advanced(self, task: str, count: int) -> None:
        """Moves the task's bar on."""
        with self._lock:
            if task in self._bars:
                self._bars[task].update(count)

    def finished(self, task: str) -> None:
        """Closes the task's bar."""
        with self._lock:
            if task in self._bars:
                self._bars.pop(task).close()

    @contextlib.contextmanager
    def rollout(self, engine: Engine, num_requests: int) -> Iterator[None]:
        """Wraps a call that generates: one bar for all concurrent calls of an engine."""
        if not self._is_enabled:
            yield
            return
        with self._rounds.call(engine, num_requests):
            yield

    def close(self) -> None:
        """Closes the remaining bars, except those of running rollouts. Idempotent.

        Does nothing in a forked child, whose parent goes on drawing.
        """
        if not self._home.is_here:
            return
        with self._lock:
            bars, self._bars = self._bars, {}
            for bar in bars.values():
                bar.close()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class PhaseLines:
    """Writes lines to stderr while a run would be silent otherwise. Any thread.

    A rollout without a `Progress` has one, since the first minutes of a run are compilation. Once
    programs are compiled and rollouts are fast, it writes nothing.
    """

    def __init__(self, *, has_trainer: bool = False) -> None:
        self.has_trainer = has_trainer
        self._lock = threading.Lock()
        self._totals: dict[str, tuple[int, int]] = {}
        self._num_programs = 0
        self._rounds = _Rounds(self._open_round)
        self._is_first = True

    def started(self, task: str, total: int, unit: str) -> None:
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
        with self._lock:
            if task not in self._totals:
                return
            done, total = self._totals[task]
            self._totals[task] = (done + count, total)
        _write(f"rollout compiled {done + count} of {total}")

    def finished(self, task: str) -> None:
        with self._lock:
            self._totals.pop(task, None)

    def rollout(self, engine: Engine, num_requests: int) -> contextlib.AbstractContextManager[None]:
        """Wraps a call that generates; concurrent calls of an engine share their lines."""
        return self._rounds.call(engine, num_requests)

    def updated(self) -> None:
        self.has_trainer = False

    def _open_round(self, poll: _Poll) -> _RolloutLines:
        is_first, self._is_first = self._is_first, False
        return _RolloutLines(poll, is_first=is_first, has_trainer=lambda: self.has_trainer)


class _Poll:
    """What an engine did since concurrent calls began, and how many requests they have."""

    def __init__(self, engine: Engine) -> None:
        self.num_calls = 0
        self.num_requests = 0
        self._engine = engine
        self._first = engine.get_progress()
        self._began = time.perf_counter()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._began

    def __call__(self) -> tuple[EngineProgress, EngineProgress, int]:
        """The first and the newest numbers, and the requests that ended; others may use it too."""
        now = self._engine.get_progress()
        return self._first, now, min(now.num_finished - self._first.num_finished, self.num_requests)


class _RolloutBar:
    def __init__(self, poll: _Poll) -> None:
        self.period_s = REDRAW_S if is_interactive() else LOG_S
        self._poll = poll
        self._bar: tqdm[Any] = tqdm(
            desc="Rollout", total=0, unit=" request", leave=False, dynamic_ncols=True
        )

    def show(self) -> None:
        first, now, num_finished = self._poll()
        self._bar.set_postfix_str(describe(first, now, self._poll.seconds), refresh=False)
        self._bar.total, self._bar.n = self._poll.num_requests, num_finished
        self._bar.refresh()

    def close(self) -> None:
        self.show()
        self._bar.close()


class _RolloutLines:
    def __init__(self, poll: _Poll, *, is_first: bool, has_trainer: Callable[[], bool]) -> None:
        self.period_s = HEARTBEAT_S
        self._poll = poll
        self._is_first = is_first
        self._has_trainer = has_trainer

    def show(self) -> None:
        _write(self._line())

    def close(self) -> None:
        if self._is_first or self._poll.seconds >= SLOW_S:
            turn = "; next the trainer, whose first step compiles"
            _write(self._line() + (turn if self._has_trainer() else ""))

    def _line(self) -> str:
        (first, now, done), num = self._poll(), self._poll.num_requests
        seconds = self._poll.seconds
        rate = (now.num_output_tokens - first.num_output_tokens) / max(seconds, 1e-9)
        return (
            f"rollout {seconds:.1f} s, {f'{done} of ' if done < num else ''}{num} "
            f"sample{'s' if num > 1 else ''}, {rate:.0f} tokens/s, weights v{now.weight_version}"
        )


class _Rounds:
    """Shows concurrent calls of an engine as one: by a thread while they last, and at their end."""

    def __init__(self, open_view: Callable[[_Poll], _RolloutBar | _RolloutLines]) -> None:
        self._open_view = open_view
        self._lock = threading.Lock()
        self._open: dict[int, tuple[_Poll, Callable[[], None]]] = {}

    @contextlib.contextmanager
    def call(self, engine: Engine, num_requests: int) -> Iterator[None]:
        with self._lock:
            if id(engine) not in self._open:
                self._open[id(engine)] = self._begin(_Poll(engine))
            poll, end = self._open[id(engine)]
            poll.num_calls += 1
            poll.num_requests += num_requests
        try:
            yield
        finally:
            with self._lock:
                poll.num_calls -= 1
                is_over = not poll.num_calls
                if is_over:
                    del self._open[id(engine)]
            if is_over:
                end()

    def _begin(self, poll: _Poll) -> tuple[_Poll, Callable[[], None]]:
        view, is_over = self._open_view(poll), threading.Event()

        def show() -> None:
            while not is_over.wait(view.period_s):
                view.show()

        thread = threading.Thread(target=show, name="sgljax-progress", daemon=True)
        thread.start()

        def end() -> None:
            is_over.set()
            thread.join()
            view.close()

        return poll, end


def describe(first: EngineProgress, now: EngineProgress, seconds: float) -> str:
    """A short text on what an engine did between two polls, and what it does now."""
    prefilled = now.num_prefill_tokens - first.num_prefill_tokens
    cached = now.num_cached_tokens - first.num_cached_tokens
    rate = (now.num_output_tokens - first.num_output_tokens) / max(seconds, 1e-9)
    verified = now.num_verified_tokens - first.num_verified_tokens
    accepted = now.num_accepted_tokens - first.num_accepted_tokens
    drafts = f", {accepted / verified:.0%} drafted" if verified else ""
    return (
        f"{rate:.0f} tokens/s, {now.num_running} running, {now.num_waiting} waiting, "
        f"{cached / max(prefilled + cached, 1):.0%} cached{drafts}, weights v{now.weight_version}"
    )


def _write(line: str) -> None:
    """Writes a line to stderr, above bars if there are any; a closed stderr is no error."""
    with contextlib.suppress(OSError, ValueError):
        if sys.stderr is not None:
            tqdm.write(line, file=sys.stderr)
            sys.stderr.flush()
