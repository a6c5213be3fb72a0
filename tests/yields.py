"""Locks that make their thread wait now and then, so that others run where they seldom do."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

_CHANCE = 0.2
_LONGEST_S = 0.002


class _Yielding:
    """A lock, before and after whose calls another thread may run."""

    def __init__(self, lock: Any, rng: random.Random) -> None:
        self._lock = lock
        self._rng = rng

    def _yield(self) -> None:
        if self._rng.random() < _CHANCE:
            time.sleep(self._rng.random() * _LONGEST_S)

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        self._yield()
        is_held = self._lock.acquire(blocking, timeout)
        self._yield()
        return is_held

    def release(self) -> None:
        self._lock.release()
        self._yield()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def __getattr__(self, name: str) -> Any:  # what a Condition asks of a reentrant lock
        return getattr(self._lock, name)


def yield_at_locks(seed: int) -> None:
    """Lets every lock of Python that this process makes from now on yield at random.

    Those of queues, futures, conditions and events are among them.
    """
    rng, plain, reentrant = random.Random(seed), threading.Lock, threading.RLock
    patched: Any = threading
    patched.Lock = lambda: _Yielding(plain(), rng)
    patched.RLock = lambda: _Yielding(reentrant(), rng)
