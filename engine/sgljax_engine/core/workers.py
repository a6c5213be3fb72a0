"""Threads beside the engines': one hands out commands, others do jobs, one after another."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Generic, Protocol, TypeVar

from sgljax_engine.core.calls import RequestGroups, Router
from sgljax_engine.core.command import Command, Task
from sgljax_engine.core.engine_core import EngineCore
from sgljax_engine.core.loop import EngineLoop
from sgljax_engine.errors import EngineShutdownError, forget_locals
from sgljax_engine.processing.futures import reject, resolve
from sgljax_engine.types import Request

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Distribute(Task):
    """Hand a command out, on the thread of the only engine."""

    hand_out: HandOut
    command: Command | None

    def run(self, core: EngineCore) -> None:
        del core
        self.hand_out.distribute(self.command)

    def refuse(self, make_error: Callable[[], BaseException]) -> None:
        if self.command is not None:
            self.command.refuse(make_error)


class HandOut:
    """Hands out commands in order of arrival, each to all engines that it concerns.

    It is the commands' `Recipients`. A caller may be interrupted between any two steps, and a
    garbage collection may run a finalizer there that submits or shuts down. So a caller takes only
    one indivisible step, `put`; a thread does the rest, and nobody interrupts it. Otherwise one
    engine could wait for another that was never told.

    A single engine's thread hands out its commands itself: a thread in between takes time. Pause
    and continue of an idle engine take 275 us with one and 180 without (2 cores, November 2026).
    """

    def __init__(
        self,
        loops: Sequence[EngineLoop],
        groups: RequestGroups,
        router: Router,
        *,
        stop_engines: Callable[[str | None], None],
        name: str,
    ) -> None:
        self.num_engines = len(loops)
        self.groups = groups
        self._loops = loops
        self._router = router
        self._stop_engines = stop_engines
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._only = loops[0] if len(loops) == 1 else None
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        if self._only is not None:
            self.thread = self._only.thread
        else:
            self.thread.start()

    def put(self, command: Command) -> None:
        """Queues a command. Any thread, under the group's lock and after `check_open`."""
        if self._only is not None:
            self._only.put(Distribute(self, command))
        else:
            self._commands.put(command)

    def stop(self) -> None:
        """Ends the engines after the commands that came before. Any thread; idempotent."""
        if self._only is None:
            self._commands.put(None)
            return
        with contextlib.suppress(EngineShutdownError):
            self._only.submit(Distribute(self, None))

    # ------------------------------------------------------------------ for commands

    def enqueue(self, index: int, task: Task) -> None:
        """Queues a task for one engine; the only engine does it next, before what came since."""
        if self._only is not None:
            self._only.do_next(task)
        else:
            self._loops[index].submit(task)

    def route(self, requests: Sequence[Request]) -> None:
        for request, engine in zip(requests, self._router.route(requests), strict=True):
            request.engine = engine

    # ------------------------------------------------------------------ the thread

    def distribute(self, command: Command | None) -> None:
        """Gives a command to all engines that it concerns, or ends them; on the thread."""
        if command is None:
            self._stop_engines(None)
            return
        with self.groups.lock:
            try:
                for loop in self._loops:  # all or none, since they are stopped under the lock
                    loop.check_open()
                command.hand_out(self)
            except EngineShutdownError as error:
                reason = str(error)
            except BaseException as error:  # a bug: never leave a caller waiting
                logger.exception("handing out a command failed")
                reason = f"handing out a command failed: {error!r}"
                self._stop_engines(reason)
            else:
                return
            command.refuse(lambda: EngineShutdownError(reason))

    def _run(self) -> None:
        while self._do_one():
            pass
        while not self._commands.empty():
            self._do_one()

    def _do_one(self) -> bool:
        """Hands out one command; False at the end. Keeps no reference to it."""
        command = self._commands.get()
        try:
            self.distribute(command)
            return command is not None
        finally:
            del command


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
