"""The engine thread: the one place where anything of an engine changes.

It does tasks between two dispatches. It blocks on their queue when there is nothing to run, or
generation is paused. It holds no reference to its `Engine`, so dropping the last one can end the
thread.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable

from sgljax_engine.core.command import SHUT_DOWN, Task
from sgljax_engine.core.commands.requests import EndAnswered
from sgljax_engine.core.engine_core import EngineCore
from sgljax_engine.errors import EngineShutdownError
from sgljax_engine.observability.progress import EngineProgress
from sgljax_engine.observability.trace import ENGINE_TRACK, Recorder
from sgljax_engine.processing.futures import Answer
from sgljax_engine.types import FinishReason, Request

logger = logging.getLogger(__name__)


class EngineLoop:
    """Tasks in, answers out. Other threads may use only what stands under "any thread".

    `lock` is the group's only one. It is reentrant: a garbage collection inside `submit` may end a
    stream or an engine, and so submit on the same thread. `share` is called on the thread after a
    step that left requests waiting, `on_answered` on the detokenizer thread before a request that
    still runs is answered, `on_failed` and at last `on_closed` on the thread.
    """

    def __init__(
        self,
        core: EngineCore,
        *,
        name: str,
        lock: threading.RLock,
        share: Callable[[EngineLoop], None] | None,
        on_answered: Callable[[Request], None],
        on_failed: Callable[[str], None],
        on_closed: Callable[[], None],
    ) -> None:
        self._core = core
        self._share = share
        self._on_answered = on_answered
        self._on_failed = on_failed
        self._on_closed = on_closed
        core.outputs.connect(self._end_answered, f"{name}-detokenizer")
        self._halted_since_s: float | None = None
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._next: collections.deque[Task] = collections.deque()
        self._lock = lock
        self._is_closed = False
        self._close_reason = SHUT_DOWN
        self._is_over = False
        self._over: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    # ------------------------------------------------------------------ any thread

    @property
    def recorder(self) -> Recorder:
        return self._core.recorder

    @property
    def weight_version(self) -> int:
        return self._core.serving.version

    @property
    def is_sleeping(self) -> bool:
        return bool(self._core.sleep_manager.asleep)

    @property
    def is_running(self) -> bool:
        """Whether `submit` accepts tasks.

        `Thread.is_alive` is not asked: a caller who is interrupted in there marks it as dead.
        """
        return not self._is_closed

    @property
    def thread(self) -> threading.Thread:
        return self._thread

    @property
    def threads(self) -> tuple[threading.Thread | None, ...]:
        return self._thread, self._core.outputs.thread

    @property
    def num_waiting(self) -> int:
        """Number of waiting requests, after the engine thread's last change."""
        return len(self._core.scheduler.waiting)

    @property
    def progress(self) -> EngineProgress:
        core, since_s = self._core, self._halted_since_s
        return EngineProgress(
            num_running=len(core.scheduler.running),
            num_waiting=len(core.scheduler.waiting),
            num_finished=core.counters.num_finished,
            num_output_tokens=core.counters.num_output_tokens,
            num_prefill_tokens=core.counters.num_prefill_tokens,
            num_cached_tokens=core.counters.num_cached_tokens,
            num_verified_tokens=core.counters.num_verified_tokens,
            num_accepted_tokens=core.counters.num_accepted_tokens,
            weight_version=core.serving.version,
            halted_s=None if since_s is None else time.perf_counter() - since_s,
        )

    def submit(self, task: Task) -> None:
        """Queues a task for the engine thread; EngineShutdownError if nobody would answer."""
        with self._lock:
            self.check_open()
            self.put(task)

    def put(self, task: Task) -> None:
        """`submit` for a caller who holds the lock and called `check_open`."""
        self._tasks.put(task)

    def check_open(self) -> None:
        if not self.is_running:
            raise EngineShutdownError(self._close_reason)

    def request_stop(self, reason: str = SHUT_DOWN) -> None:
        """Has the thread fail unfinished requests and end; does not wait. Idempotent."""
        with self._lock:
            if not self._is_closed:
                self._close_reason = reason
                # First: an interrupt behind it leaves a call that can be repeated.
                self._tasks.put(None)
                self._is_closed = True

    def join(self) -> None:
        """Waits for the threads to end. May be called again after an interrupt."""
        while not self._is_over:
            self._over.get()
            self._over.put(None)  # for others who wait
        self._thread.join()

    def _end_answered(self, request: Request, reason: FinishReason) -> None:
        with contextlib.suppress(EngineShutdownError):
            self.submit(EndAnswered(request, reason))
        self._on_answered(request)

    # ------------------------------------------------------------------ the thread

    @property
    def num_movable(self) -> int:
        """Number of requests that found no room and have not started; 0 while tasks wait."""
        core = self._core
        is_busy = not self._tasks.empty() or core.pauses.holds_new_requests
        if is_busy or not core.has_no_room:
            return 0
        return core.scheduler.waiting.num_new

    def do_next(self, task: Task) -> None:
        """Has the thread do a task right after the one that it is doing."""
        self._next.append(task)

    def hand_over(self, count: int) -> tuple[list[Request], list[Answer]]:
        """Gives up the newest requests that have not started, for another engine to take."""
        return self._core.hand_over(count)

    def _run(self) -> None:
        try:
            while self._do_tasks():
                # Before a step, since no task waits then: whoever keeps asking for the state
                # must not keep requests from moving.
                if self._share is not None and self.num_movable:
                    self._share(self)
                    if not self._core.can_step:
                        continue
                self._core.step()
        except BaseException as error:  # a bug: never leave a caller waiting
            logger.exception("the engine thread failed")
            self._close_reason = f"the engine thread failed: {error!r}"
            self._on_failed(self._close_reason)
        try:
            self._close()
        finally:
            self._is_over = True
            self._over.put(None)

    def _do_tasks(self) -> bool:
        """Does all queued tasks, waiting for one while no step can be taken; False at shutdown."""
        core = self._core
        while True:
            core.settle()
            self._note_halt()
            can_step = core.can_step
            if not can_step:
                core.outputs.flush()
            try:
                # Kept in no variable: a task that was done must not keep its arrays alive.
                go_on = self._do(self._tasks.get(block=not can_step))
            except queue.Empty:
                return True
            if not go_on:
                return False
            while self._next:
                self._do(self._next.popleft())

    def _note_halt(self) -> None:
        if self._core.starts_requests:
            self._halted_since_s = None
        elif self._halted_since_s is None:
            self._halted_since_s = time.perf_counter()

    def _do(self, task: Task | None) -> bool:
        if task is None:
            return False
        recorder = self._core.recorder
        name, started = (task.name, time.perf_counter()) if recorder.is_on else ("", 0.0)
        try:
            self._core.outputs.flush()
            task.run(self._core)
        except BaseException as error:  # a bug, which ends the thread; see `_run`
            message = f"the engine thread failed: {error!r}"
            task.refuse(lambda: EngineShutdownError(message))
            raise
        finally:
            del task  # see `command.answer`
            if name:
                recorder.slice(ENGINE_TRACK, name, started, time.perf_counter(), {})
        return True

    # ------------------------------------------------------------------ the end

    def _close(self) -> None:
        with self._lock:
            self._is_closed = True
        self._core.close(self._closed_error)
        while self._next:
            self._next.popleft().refuse(self._closed_error)
        while not self._tasks.empty():
            task = self._tasks.get()
            if task is not None:
                task.refuse(self._closed_error)
        self._on_closed()

    def _closed_error(self) -> EngineShutdownError:
        return EngineShutdownError(self._close_reason)
