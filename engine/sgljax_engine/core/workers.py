"""Threads beside the engines': one hands out commands, others do jobs, one after another."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, Generic, Protocol, TypeVar

from sgljax_engine.core.command import SHUT_DOWN, Command
from sgljax_engine.errors import EngineShutdownError, forget_locals
from sgljax_engine.processing.futures import reject, resolve


class HandOut:
    """Commands in the order in which they came, each to all engines that it concerns.

    A caller may be interrupted between any two steps, and a garbage collection may run a finalizer
    there that submits or shuts down. So callers take one step that cannot be divided, `put`, and
    everything else is this thread's, which nobody interrupts. Otherwise one engine could wait for
    another that was never told.

    Attributes:
        thread: Started at once.
    """

    def __init__(
        self, distribute: Callable[[Command], None], on_stop: Callable[[], None], name: str
    ) -> None:
        """Starts the thread.

        Args:
            distribute: Hands out one command; must not fail.
            on_stop: Called on the thread when `stop` is due: refuses all commands from then on.
            name: Of the thread.
        """
        self._distribute = distribute
        self._on_stop = on_stop
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def put(self, command: Command) -> None:
        """Queues a command. Any thread."""
        self._commands.put(command)

    def stop(self) -> None:
        """Ends the thread behind the commands that came before. Any thread; idempotent."""
        self._commands.put(None)

    def _run(self) -> None:
        while self._take():
            pass
        self._on_stop()
        while not self._commands.empty():
            self._take()

    def _take(self) -> bool:
        """Hands out one command; False for the end. Keeps nothing of it when it returns."""
        command = self._commands.get()
        if command is None:
            return False
        try:
            self._distribute(command)
        finally:
            del command
        return True


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
        self._condition = threading.Condition()
        self._current: Future[Any] | None = None
        self._is_reading = self._is_stopped = self._is_over = False
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    def put(self, job: _J) -> None:
        """Queues a job. Not reentrant; the caller serialises."""
        if self.thread.ident is None:
            self.thread.start()
        self._jobs.put(job)

    def stop(self) -> None:
        """Ends the thread after the jobs that are queued; waits for it.

        But not for a caller's source that is being read, which may block for ever. That job and
        those behind it are refused, and the thread ends when the source comes back.
        """
        with self._condition:
            self._is_stopped = True
            self._jobs.put(None)
            if self.thread.ident is None:
                return
            self._condition.wait_for(lambda: self._is_reading or self._is_over)
            is_blocked = not self._is_over
            if is_blocked and self._current is not None:
                reject(self._current, EngineShutdownError(SHUT_DOWN))
        if not is_blocked:
            self.thread.join()
            return
        with contextlib.suppress(queue.Empty):
            while True:
                job = self._jobs.get_nowait()
                if job is not None:
                    reject(job.future, EngineShutdownError(SHUT_DOWN))
        self._jobs.put(None)

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Around what a job does with a caller's source alone; `stop` does not wait for that.

        Raises:
            EngineShutdownError: behind it, when the thread was to end meanwhile.
        """
        with self._condition:
            self._is_reading = True
            self._condition.notify_all()
        try:
            yield
        finally:
            with self._condition:
                self._is_reading = False
        if self._is_stopped:
            raise EngineShutdownError(SHUT_DOWN)

    def _run(self) -> None:
        while self._take():
            pass
        with self._condition:
            self._is_over = True
            self._condition.notify_all()

    def _take(self) -> bool:
        """Does one job; False at the end. Keeps nothing of it when it returns."""
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
