"""Idle policy: what a rollout's engine frees on the device between the rollout's calls."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator

from sgljax_engine import Engine, EngineError, EngineShutdownError, EngineState, EngineStateError

logger = logging.getLogger(__name__)


class IdlePolicy:
    """Counts the calls that need the engine, and frees device memory while there are none.

    There are two ways. With `releases_kv` the KV cache is released when the last of the concurrent
    calls ends. With a cluster that offloads its models, the engine sleeps from the cluster's signal
    (`offload`) until the next call. This class leaves alone an engine that its owner put to sleep.

    Any thread. All changes of the engine are made under one lock, so no call begins on an engine
    that is going to sleep, and no engine goes to sleep during a call.
    """

    def __init__(self, *, releases_kv: bool) -> None:
        self._releases_kv = releases_kv
        self._lock = threading.Lock()
        self._num_calls = 0
        self._is_offloading = False
        self._is_used = False  # since the engine was built or woken
        self._own_sleep: int | None = None  # number of the engine's sleep that began here

    @property
    def is_offloading(self) -> bool:
        return self._is_offloading

    @contextlib.contextmanager
    def call(self, engine: Engine) -> Iterator[None]:
        """Wraps a call that needs the engine awake; wakes it if this class put it to sleep.

        After an OffloadError it stays asleep, and a later call may wake it.
        """
        with self._lock:
            self._wake(engine)
            self._num_calls += 1
            self._is_used = True
        has_failed = True
        try:
            yield
            has_failed = False
        finally:
            with self._lock:
                self._num_calls -= 1
                if not self._num_calls:
                    self._end(engine, has_failed)

    def offload(self, engine: Engine | None) -> None:
        """Takes Tunix's signal that it offloads models, sent before and after each of its calls.

        The engine goes to sleep unless a call is running. It also stays awake if no call has run
        since it woke: then this is the signal before a call. After an OffloadError it is awake.
        """
        with self._lock:
            self._is_offloading = True
            if engine is not None and self._is_used:
                self._sleep(engine)

    def updated(self, engine: Engine) -> None:
        """Puts the engine back to sleep after an update, which woke its weights."""
        with self._lock:
            if self._is_offloading:
                self._is_used = True  # if it cannot sleep now, the next signal tries again
                self._sleep(engine)

    # ------------------------------------------------------------------ under the lock

    def _wake(self, engine: Engine) -> None:
        if self._own_sleep is not None and self._is_own(engine.get_internal_state()):
            engine.wake_up()
        self._own_sleep = None

    def _sleep(self, engine: Engine) -> None:
        """Puts the engine to sleep, unless a call is running or the owner put it to sleep."""
        if self._num_calls:
            return
        with contextlib.suppress(EngineShutdownError):  # its memory is free already
            state = engine.get_internal_state()
            if state.is_sleeping and not self._is_own(state):
                return
            if set(state.asleep) != {"weights", "kv_cache"}:
                self._put_to_sleep(engine, state)
            self._is_used = False

    def _put_to_sleep(self, engine: Engine, state: EngineState) -> None:
        before = self._own_sleep
        # Set before, since an interrupt leaves the call but does not undo it.
        self._own_sleep = state.counters.num_sleeps + 1
        try:
            engine.sleep()
        except Exception:
            self._own_sleep = before
            raise

    def _is_own(self, state: EngineState) -> bool:
        """Whether it sleeps because of this class, and the owner has not woken it since."""
        return state.is_sleeping and state.counters.num_sleeps == self._own_sleep

    def _end(self, engine: Engine, has_failed: bool) -> None:
        """Handles the end of the last of the concurrent calls."""
        if self._is_offloading and has_failed:
            # Tunix sends its signal only after successful calls. The call's own error goes first.
            try:
                self._sleep(engine)
            except EngineError:
                logger.exception("the engine could not be put to sleep after a call that failed")
        elif self._releases_kv:
            # Other users may have running requests, or have closed the engine: then this call must
            # not free its memory.
            with contextlib.suppress(EngineStateError, EngineShutdownError):
                engine.release_kv_cache()
