"""The process that an engine lives in: its forked children, and the end of its interpreter.

No JAX. A forked child has copies of an engine's objects, but neither its threads nor a device that
works, and any lock may be held for ever by a thread that it has not. So whatever waits or takes a
lock asks `HomeProcess` first.
"""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401  # pyright: ignore[reportUnusedImport]  see `_end`
import gc
import os
import sys
import threading
import weakref
from concurrent.futures import Future
from typing import Any, NoReturn, Protocol, TypeVar

from sgljax_engine.errors import EngineShutdownError

_T = TypeVar("_T")

ENDING = "the engine was shut down, since the main thread has ended: join threads before it ends"
"""Message to calls that come after the main thread's end, or that it interrupts."""


class HomeProcess:
    """The process that made this object. Any thread; takes no lock."""

    __slots__ = ("_pid", "_what")

    def __init__(self, what: str = "engine") -> None:
        """Names what lives in the process, for errors."""
        self._pid = os.getpid()
        self._what = what

    @property
    def is_here(self) -> bool:
        """Whether this is the process, and not a forked child of it."""
        return self._pid == os.getpid()

    def check(self) -> None:
        """Raises EngineShutdownError in a forked child."""
        if not self.is_here:
            raise EngineShutdownError(
                f"this {self._what} lives in process {self._pid}; a forked child cannot use it"
            )

    def refuse_pickle(self) -> NoReturn:
        """Raises TypeError, for `__reduce__`: spawned processes get their arguments by pickle."""
        raise TypeError(
            f"this {self._what} lives in process {self._pid} and cannot be pickled; give another "
            "process what it needs, such as texts and token ids"
        )


class HomeFuture(Future[_T]):
    """A future whose waits raise EngineShutdownError in a forked child, where nobody answers."""

    def __init__(self) -> None:
        super().__init__()
        self._home = HomeProcess()

    def result(self, timeout: float | None = None) -> _T:
        self._home.check()
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._home.check()
        return super().exception(timeout)


class Stoppable(Protocol):
    """What has threads that must end before the interpreter does."""

    def request_stop(self, reason: str = ...) -> None:
        """Tells the threads to end; does not wait. Idempotent."""
        ...

    def stop(self) -> None:
        """`request_stop`, then waits for the threads to end."""
        ...


_running: dict[int, weakref.ref[Stoppable]] = {}
_home: HomeProcess | None = None
_is_ending = False


def stop_at_end(each: Stoppable) -> None:
    """Has an object's threads stopped when the interpreter ends, until `ended` is called."""
    global _home
    _home = HomeProcess()  # where JAX has its threads
    _running[id(each)] = weakref.ref(each)
    check_not_ending()  # after the line above: one of both sees the other


def check_not_ending() -> None:
    if _is_ending:
        raise EngineShutdownError(ENDING)


def ended(each: Stoppable) -> None:
    """Notes that an object's threads have ended."""
    _running.pop(id(each), None)


def _end() -> None:
    """Stops what runs, when the main thread has ended, by a return or by an error.

    `atexit` would be too late: the interpreter first waits for the program's own threads, which may
    sample for hours. Nor may engine threads use the device while the interpreter is torn down.
    Callbacks run in the opposite order of their registration, and that of `concurrent.futures`
    waits for executors, whose threads may wait for an engine. So its import comes before.
    """
    global _is_ending
    if _home is not None and not _home.is_here:
        _keep_jax()
        return
    _is_ending = True
    running = [each for ref in list(_running.values()) if (each := ref()) is not None]
    for each in running:
        each.request_stop(ENDING)
    for each in running:
        each.stop()


def _keep_jax() -> None:
    """Has a forked child end without JAX's destructors.

    They wait for threads that the child has not, in jaxlib 0.10.2 for ever, or crash. So there is
    one more reference to all that JAX's modules hold.
    """
    roots = ("jax", "jaxlib")
    modules = [each for name, each in sys.modules.items() if name.partition(".")[0] in roots]
    kept: list[Any] = [dict(vars(module)) for module in modules]
    kept.append(kept)  # a circle, which lasts without a name
    gc.freeze()  # and which no collection finds


# Executors end by the same function, which `threading` has for them alone.
threading._register_atexit(_end)  # pyright: ignore[reportAttributeAccessIssue]
