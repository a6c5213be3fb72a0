"""Threads for work that would hold the event loop up: parsing, tokenizing, templates."""

from __future__ import annotations

import asyncio
import ctypes
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

_T = TypeVar("_T")

_NUM_THREADS = 4
"""More would only let more large requests take memory at a time."""


class TooSlowError(Exception):
    """Work took longer than it may."""


class _Interrupt(BaseException):
    """Raised in a worker whose work takes too long; no `except Exception` stops it."""


class _Task(Generic[_T]):
    """A worker's task. The lock says whether the worker still does it."""

    def __init__(self, work: Callable[[], _T], loop: asyncio.AbstractEventLoop) -> None:
        self.answer: asyncio.Future[_T] = loop.create_future()
        self._work: Callable[[], _T] | None = work
        self._loop = loop
        self._lock = threading.Lock()
        self._thread_id: int | None = None
        self._is_over = False
        self._is_interrupted = False

    def do(self) -> None:
        """On a worker."""
        with self._lock:
            work, self._work = self._work, None
            if self._is_over or work is None:
                return
            self._thread_id = threading.get_ident()
        error: BaseException | None = None
        result: Any = None
        try:
            try:
                result = work()
            except Exception as raised:
                error = raised
            with self._lock:
                self._is_over = True
            while self._is_interrupted:  # it is on its way
                pass
        except _Interrupt:
            return
        try:
            self._loop.call_soon_threadsafe(self._set, result, error)
        except RuntimeError:  # the loop has ended
            return
        finally:
            del work, result, error

    def interrupt(self) -> None:
        """Ends the work, wherever Python code of it is. On the event loop."""
        with self._lock:
            if self._is_over:
                return
            self._is_over, self._work = True, None
            if self._thread_id is not None:
                self._is_interrupted = True
                thread = ctypes.c_ulong(self._thread_id)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(_Interrupt))

    def _set(self, result: Any, error: BaseException | None) -> None:
        if self.answer.done():  # the waiting task was cancelled
            return
        if error is None:
            self.answer.set_result(result)
        else:
            self.answer.set_exception(error)


class Workers:
    """A few daemon threads, started with the first work. Only the event loop calls it."""

    def __init__(self) -> None:
        """Starts no thread yet."""
        self._start_anew()

    def _start_anew(self) -> None:
        self._tasks: queue.SimpleQueue[_Task[Any] | None] = queue.SimpleQueue()
        self._num_threads = 0
        self._finalizer = weakref.finalize(self, self._tasks.put, None)
        self._finalizer.atexit = False

    def close(self) -> None:
        """Ends the threads after the work that they have; later work starts others."""
        self._finalizer()
        self._start_anew()

    async def run(self, work: Callable[[], _T], timeout_s: float | None = None) -> _T:
        """Does work on a thread.

        Args:
            work: Takes no argument.
            timeout_s: Work that takes longer, the wait for a thread included, is interrupted.

        Raises:
            TooSlowError: after `timeout_s`.
        """
        task = _Task(work, asyncio.get_running_loop())
        if self._num_threads < _NUM_THREADS:
            self._num_threads += 1
            name = f"sgljax-server-worker-{self._num_threads}"
            threading.Thread(target=_work, args=(self._tasks,), name=name, daemon=True).start()
        self._tasks.put(task)
        try:
            return await asyncio.wait_for(task.answer, timeout_s)
        except TimeoutError:
            raise TooSlowError from None
        finally:
            task.interrupt()  # also when the client is gone
            del work, task


def _work(tasks: queue.SimpleQueue[_Task[Any] | None]) -> None:
    while (task := tasks.get()) is not None:
        task.do()
        del task
    tasks.put(None)  # for the next thread
