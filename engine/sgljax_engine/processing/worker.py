"""A thread that does jobs, one after another."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, Generic, Protocol, TypeVar

from sgljax_engine.errors import EngineShutdownError, forget_locals
from sgljax_engine.processing.futures import reject, resolve


class Job(Protocol):
    """A job that a caller waits for."""

    @property
    def future(self) -> Future[Any]:
        """Gets the result."""
        ...


_J = TypeVar("_J", bound=Job)


class Worker(Generic[_J]):
    """Does jobs in the order in which they come. `put` and `stop` may be called from any thread.

    The first job starts the thread. Thread-local JAX contexts of callers do not apply to it, such
    as the transfer guard that Tunix sets while it syncs weights. A job's result or exception goes
    to its future.
    """

    def __init__(self, do: Callable[[_J], Any], name: str) -> None:
        """Starts no thread yet."""
        self._do = do
        self._jobs: queue.SimpleQueue[_J | None] = queue.SimpleQueue()
        self._condition = threading.Condition()
        self._current: Future[Any] | None = None
        self._is_reading = self._is_stopped = self._is_over = False
        self._reason = ""
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    def put(self, job: _J) -> None:
        """Queues a job. Not reentrant; callers must not call it concurrently."""
        if self.thread.ident is None:
            self.thread.start()
        self._jobs.put(job)

    def stop(self, reason: str) -> None:
        """Ends the thread after the queued jobs, and waits for it.

        It does not wait while a caller's source is read, which may block for ever. Then that job
        and those behind it are refused for this reason, and the thread ends after the read.
        """
        with self._condition:
            self._reason = reason
            self._is_stopped = True
            self._jobs.put(None)
            if self.thread.ident is None:
                return
            self._condition.wait_for(lambda: self._is_reading or self._is_over)
            is_blocked = not self._is_over
            if is_blocked and self._current is not None:
                reject(self._current, EngineShutdownError(reason))
        if not is_blocked:
            self.thread.join()
            return
        with contextlib.suppress(queue.Empty):
            while True:
                job = self._jobs.get_nowait()
                if job is not None:
                    reject(job.future, EngineShutdownError(reason))
        self._jobs.put(None)

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """A context for reading a caller's source: `stop` does not wait for it."""
        with self._condition:
            self._is_reading = True
            self._condition.notify_all()
        try:
            yield
        finally:
            with self._condition:
                self._is_reading = False
        if self._is_stopped:
            raise EngineShutdownError(self._reason)

    def _run(self) -> None:
        while self._do_one():
            pass
        with self._condition:
            self._is_over = True
            self._condition.notify_all()

    def _do_one(self) -> bool:
        """Does one job; False at the end. Keeps no reference to it."""
        job = self._jobs.get()
        if job is None:
            return False
        future = self._current = job.future
        try:
            result = self._do(job)
        except BaseException as error:  # a user's hook may raise anything: the caller's to see
            forget_locals(error)
            del job  # a caller who has an answer may count on what it held being free
            self._current = None
            reject(future, error)
        else:
            del job
            self._current = None
            resolve(future, result)
        finally:
            del future  # the error refers to this frame, which must not refer to the error
        return True
