"""Progress bars for loading, warm-up and rollouts, in terminals and notebooks.

Nothing here writes unless the user makes a `Progress` and passes it on.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from tqdm.auto import tqdm

from sgljax_engine import Engine, EngineProgress, HomeProcess

REDRAW_S = 0.2
"""Seconds between two polls of a generating engine."""

LOG_S = 10.0
"""The same for log files, where each drawing adds a line."""


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
        self._rollouts: dict[int, _RolloutBar] = {}

    @property
    def is_enabled(self) -> bool:
        """Whether anything is drawn."""
        return self._is_enabled

    # ------------------------------------------------------------------ loading and warm-up

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
            bar = self._bars.get(task)
            if bar is not None:
                bar.update(count)

    def finished(self, task: str) -> None:
        """Closes the task's bar."""
        with self._lock:
            bar = self._bars.pop(task, None)
            if bar is not None:
                bar.close()

    # ------------------------------------------------------------------ rollouts

    @contextlib.contextmanager
    def rollout(self, engine: Engine, num_requests: int) -> Iterator[None]:
        """Wraps a call that generates: one bar for all concurrent calls of an engine."""
        if not self._is_enabled:
            yield
            return
        with self._lock:
            bar = self._rollouts.get(id(engine))
            if bar is None:
                bar = self._rollouts[id(engine)] = _RolloutBar(engine)
            bar.num_calls += 1
            bar.add(num_requests)
        try:
            yield
        finally:
            with self._lock:
                bar.num_calls -= 1
                if not bar.num_calls:
                    del self._rollouts[id(engine)]
                    bar.close()

    # ------------------------------------------------------------------ the end

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
        """Returns the object."""
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Closes it."""
        self.close()


class _RolloutBar:
    """The bar of one engine, and the thread that draws it. Calls are made under one lock."""

    def __init__(self, engine: Engine) -> None:
        self.num_calls = 0
        self._engine = engine
        self._first = engine.get_progress()
        self._began = time.perf_counter()
        self._bar: tqdm[Any] = tqdm(
            desc="Rollout", total=0, unit=" request", leave=False, dynamic_ncols=True
        )
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sgljax-progress", daemon=True)
        self._thread.start()

    def add(self, num_requests: int) -> None:
        """Adds requests to the bar."""
        self._bar.total += num_requests

    def close(self) -> None:
        self._is_over.set()
        self._thread.join()
        self._draw()
        self._bar.close()

    def _run(self) -> None:
        while not self._is_over.wait(REDRAW_S if is_interactive() else LOG_S):
            self._draw()

    def _draw(self) -> None:
        now = self._engine.get_progress()
        self._bar.set_postfix_str(
            describe(self._first, now, time.perf_counter() - self._began), refresh=False
        )
        # Others may use the same engine.
        self._bar.n = min(now.num_finished - self._first.num_finished, self._bar.total)
        self._bar.refresh()


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
