"""A thread that does jobs for an engine, one after another."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, Protocol, TypeVar

from sgljax_engine.errors import forget_locals
from sgljax_engine.processing.futures import reject, resolve


class Job(Protocol):
    """What a caller waits for."""

    @property
    def future(self) -> Future[Any]:
        """Gets the result."""
        ...


_J = TypeVar("_J", bound=Job)


class Worker(Generic[_J]):
    """Does jobs in the order in which they come. `put` and `stop` may be called from any thread.

    Attributes:
        thread: Started by the first job, so a caller's thread-local JAX contexts (a transfer guard,
            say, which Tunix sets while it syncs weights) do not apply.
    """

    def __init__(self, do: Callable[[_J], Any], name: str) -> None:
        """Starts no thread yet.

        Args:
            do: Does a job; its result, or what it raises, goes to the job's future.
            name: Of the thread.
        """
        self._do = do
        self._jobs: queue.SimpleQueue[_J | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    def put(self, job: _J) -> None:
        """Queues a job. Not reentrant; the caller serialises."""
        if self.thread.ident is None:
            self.thread.start()
        self._jobs.put(job)

    def stop(self) -> None:
        """Ends the thread after the jobs that are queued; waits for it."""
        self._jobs.put(None)
        if self.thread.ident is not None:
            self.thread.join()

    def _run(self) -> None:
        while self._take():
            pass

    def _take(self) -> bool:
        """Does one job; False at the end. Keeps nothing of it when it returns."""
        job = self._jobs.get()
        if job is None:
            return False
        future = job.future
        try:
            result = self._do(job)
        except BaseException as error:  # a user's hook may raise anything: the caller's to see
            forget_locals(error)
            del job  # a caller who has an answer may count on what it held being free
            reject(future, error)
        else:
            del job
            resolve(future, result)
        finally:
            del future  # the error refers to this frame, which must not refer to the error
        return True
