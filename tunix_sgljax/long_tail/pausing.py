from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from sgljax_engine import EngineShutdownError, HomeProcess
from tunix_sgljax.rollout import SglJaxRollout


class TrainerPause:
    """Pauses a rollout's engine while no thread of the training needs it.

    The trainer then has its devices alone. A training step and an evaluation may need the engine at
    the same time: the last of them to end pauses it. Any thread.
    """

    def __init__(self, rollout: SglJaxRollout) -> None:
        self._rollout = rollout
        self._home = HomeProcess("pause")
        self._lock = threading.Lock()  # held while the engine is told, so that orders do not cross
        self._num_users = 0
        self._is_paused = False

    @contextlib.contextmanager
    def running(self, has_work: Callable[[], bool]) -> Iterator[None]:
        """Lets the engine run inside the block; pauses it after the last if it still `has_work`."""
        with self._lock:
            self._go_on()
            self._num_users += 1
        try:
            yield
        finally:
            if self._home.is_here:  # a reward function may fork, and its child end by an exception
                self._leave(has_work)

    def _leave(self, has_work: Callable[[], bool]) -> None:
        with self._lock:
            self._num_users -= 1
            if not self._num_users and has_work():
                self._pause()

    def end(self) -> None:
        """Lets the engine run from now on, if it lives in this process and was not shut down."""
        if not self._home.is_here:
            return
        with self._lock, contextlib.suppress(EngineShutdownError):
            self._go_on()

    def _go_on(self) -> None:
        if self._is_paused:
            self._rollout.observers.rest(False)
            self._rollout.engine.continue_generation()
            self._is_paused = False

    def _pause(self) -> None:
        mode = self._rollout.weight_update_mode
        self._rollout.engine.pause_generation("in_place" if mode == "in_place" else "retract")
        self._is_paused = True
        self._rollout.observers.rest(True)
