"""A sanitiser of threads: whoever takes or gives up a lock may lose its turn there, at random.

Python's threads change where the interpreter's switch interval ends, seldom between the two lines
that a race needs. `yield_at_locks` makes each operation of a lock such a place.
"""

from __future__ import annotations

import functools
import os
import queue
import random
import sys
import threading
from collections.abc import Callable
from typing import Any

_CHANCE = 0.3
_LONG_CHANCE = 0.02
_FEW, _MANY = 5, 2_000
"""Turns given up at a time. Many let the others come far, as a slow machine would."""

_SWITCH_S = (1e-6, 1e-3)
"""The shortest and the longest switch interval; JAX's own calls are cut up as well."""


class _Yields:
    """Gives up turns at random. Each thread has a generator of its own, by the order of starts."""

    def __init__(self, seed: int) -> None:
        self.count = 0
        self._seed = seed
        self._num_threads = 0
        self._own = threading.local()

    def __call__(self) -> None:
        rng: random.Random | None = getattr(self._own, "rng", None)
        if rng is None:
            self._num_threads += 1
            rng = self._own.rng = random.Random(f"{self._seed} {self._num_threads}")
        if rng.random() >= _CHANCE:
            return
        self.count += 1
        sys.setswitchinterval(rng.choice(_SWITCH_S))
        for _ in range(_MANY if rng.random() < _LONG_CHANCE else rng.randint(1, _FEW)):
            os.sched_yield()  # lets go of the interpreter's lock


class _YieldingLock:
    """A lock, before and after whose operations another thread may run."""

    def __init__(self, lock: Any, yields: Callable[[], None]) -> None:
        self._lock = lock
        self._yields = yields

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        self._yields()
        is_held = self._lock.acquire(blocking, timeout)
        self._yields()
        return is_held

    def release(self) -> None:
        self._yields()
        self._lock.release()
        self._yields()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def __getattr__(self, name: str) -> Any:
        """What a Condition asks of a reentrant lock, around its wait, and a fork of any."""
        found = getattr(self._lock, name)
        return self._around(found) if name in ("_release_save", "_acquire_restore") else found

    def _around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        return functools.partial(_between_yields, self._yields, call)


def _between_yields(yields: Callable[[], None], call: Callable[..., Any], *arguments: Any) -> Any:
    yields()
    result = call(*arguments)
    yields()
    return result


INDIVISIBLE = frozenset(
    function.__code__
    for function in (
        _YieldingLock.__enter__,
        _YieldingLock.__exit__,
        _YieldingLock.release,
        _between_yields,
    )
)
"""What no signal may raise in, since none can in a lock of C: it would stay held, or be free."""


def _yielding_queue(yields: Callable[[], None]) -> type[queue.SimpleQueue[Any]]:
    """A queue of C, whose lock nobody sees."""

    class YieldingQueue(queue.SimpleQueue[Any]):
        def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
            yields()
            super().put(item, block, timeout)
            yields()

        def get(self, block: bool = True, timeout: float | None = None) -> Any:
            yields()
            item = super().get(block, timeout)
            yields()
            return item

    return YieldingQueue


def yield_at_locks(seed: int) -> Callable[[], int]:
    """Has each lock and queue that this process makes from now on yield at random.

    Those within conditions, events, futures, executors and queues are among them. Call it before
    what is tested is made, and in a child process: nothing undoes it.

    Returns:
        Counts how often a thread gave up its turn so far.
    """
    yields, plain, reentrant = _Yields(seed), threading.Lock, threading.RLock
    patched: Any = threading
    patched.Lock = patched._allocate_lock = lambda: _YieldingLock(plain(), yields)
    patched.RLock = lambda: _YieldingLock(reentrant(), yields)
    patched = queue
    patched.SimpleQueue = _yielding_queue(yields)
    return lambda: yields.count
