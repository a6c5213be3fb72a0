"""A group of engines with one interface. A single engine is a group of one.

Each engine has a thread, a scheduler, pages and a prefix cache of its own. A `HandOut` gives
commands to all of them.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

from sgljax_engine.core.calls import RequestGroups, Router
from sgljax_engine.core.command import (
    SHUT_DOWN,
    Command,
    done_queue,
)
from sgljax_engine.core.commands.checkpoint import CheckpointWriter, SaveJob
from sgljax_engine.core.commands.requests import TakeOver
from sgljax_engine.core.engine_core import EngineCore
from sgljax_engine.core.hand_out import HandOut
from sgljax_engine.core.loop import EngineLoop
from sgljax_engine.core.weights_worker import Split, WeightJob, WeightsWorker
from sgljax_engine.errors import EngineShutdownError, EngineStateError
from sgljax_engine.observability.combined import combine_progress, combine_recordings
from sgljax_engine.observability.progress import EngineProgress
from sgljax_engine.observability.trace import MAX_EVENTS, Recording
from sgljax_engine.processing.home import HomeProcess, ended, stop_at_end
from sgljax_engine.processing.worker import Worker
from sgljax_engine.types import Request
from sgljax_engine.weights.adapters import AdapterSlots
from sgljax_engine.weights.plan import WeightPlanner
from sgljax_engine.weights.served import ServedSource

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

Asked = Command | WeightJob | SaveJob
"""Arguments of `EngineGroup.submit`; their futures get the answers."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BuiltGroup:
    """Engines without threads, and what their threads share: calls, router, planner of weights."""

    cores: Sequence[EngineCore]
    groups: RequestGroups
    router: Router
    planner: WeightPlanner
    split: Split
    served: ServedSource
    slots: Sequence[AdapterSlots] | None


class EngineGroup:
    """Takes commands and jobs from any thread. `home` is the process that has the threads."""

    def __init__(self, built: BuiltGroup, name: str) -> None:
        self.home = HomeProcess()
        # Held while a command goes to all engines, so that all of them take commands in one order.
        self._lock = built.groups.lock
        self.groups = built.groups
        self._router = built.router
        built.groups.on_finished = self._finished
        count = len(built.cores)
        names = [name] if count == 1 else [f"{name}-{index}" for index in range(count)]
        self.loops = [
            EngineLoop(
                core,
                name=each,
                lock=self._lock,
                share=self._share if count > 1 else None,
                on_answered=self._answered,
                on_failed=self._failed,
                on_closed=self._closed,
            )
            for core, each in zip(built.cores, names, strict=True)
        ]
        self._num_open = count
        self.weights = WeightsWorker(
            planner=built.planner,
            served=built.served,
            slots=built.slots,
            split=built.split,
            ask=self.ask,
            check_open=self.check_open,
            recorder=built.cores[0].recorder,
            name=f"{name}-updates",
        )
        writer = CheckpointWriter(built.cores[0].runner.model_config, self.ask)
        self._saves = Worker(writer.save, f"{name}-checkpoints")
        self._is_stopping = False
        self._stop_reason = SHUT_DOWN
        self._hand_out = HandOut(
            self.loops,
            built.groups,
            built.router,
            stop_engines=self._stop_engines,
            name=f"{name}-commands",
        )
        stop_at_end(self)
        for loop in self.loops:
            loop.start()

    # ------------------------------------------------------------------ facts

    @property
    def num_engines(self) -> int:
        return len(self.loops)

    @property
    def weight_version(self) -> int:
        return self.loops[0].weight_version

    @property
    def is_sleeping(self) -> bool:
        return self.loops[0].is_sleeping

    @property
    def is_running(self) -> bool:
        open_loops = all(loop.is_running for loop in self.loops)
        return self.home.is_here and not self._is_stopping and open_loops

    @property
    def progress(self) -> EngineProgress:
        return combine_progress([loop.progress for loop in self.loops])

    def start_recording(self, max_events: int = MAX_EVENTS) -> None:
        self.home.check()
        for loop in self.loops:
            loop.recorder.start(max_events)

    def stop_recording(self) -> Recording:
        self.home.check()
        return combine_recordings([loop.recorder.stop() for loop in self.loops])

    # ------------------------------------------------------------------ commands

    def submit(self, asked: Asked) -> None:
        """Queues a command for the engines, or a job for one of the workers.

        Jobs about weights are done in order, and so are checkpoints.
        """
        self.home.check()  # before the lock, which a thread may have held at the fork
        with self._lock:
            self.check_open()
            if isinstance(asked, Command):
                self._hand_out.put(asked)
            elif isinstance(asked, SaveJob):
                self._saves.put(asked)
            else:
                self.weights.put(asked)

    def check_open(self) -> None:
        self.home.check()
        for loop in self.loops:
            loop.check_open()
        if self._is_stopping:
            raise EngineShutdownError(self._stop_reason)

    def check_may_wait(self, asked: Asked) -> None:
        """Refuses a caller on the thread that would have to answer the call.

        Callbacks of restored futures, listeners of progress, hooks of rules and tokenizers are user
        code on these threads.
        """
        current = threading.current_thread()
        answering: list[threading.Thread | None] = [self._hand_out.thread]
        for loop in self.loops:
            answering += loop.threads
        if not isinstance(asked, Command):
            answering.append(
                self._saves.thread if isinstance(asked, SaveJob) else self.weights.thread
            )
        if current in answering:
            raise EngineStateError(
                f"the engine was called on its own thread {current.name!r}, by a callback of a "
                "future, a listener or a hook: it would wait for itself. Call it on another thread"
            )

    def ask(self, make: Callable[[Future[_T]], Asked]) -> _T:
        """Has the engines or a worker do something; waits for the answer."""
        future: Future[_T] = Future()
        done = done_queue([future])
        asked = make(future)
        self.check_may_wait(asked)
        self.submit(asked)
        del asked
        done.get()
        try:
            return future.result()
        finally:
            del future, make

    def _finished(self, request: Request) -> None:
        """Notes that a request is over, or will not come; on its engine's thread."""
        with self._lock:
            self._router.finished(request.engine, request)

    def _answered(self, request: Request) -> None:
        """Notes that a running request was answered, after its engine was told to end it.

        The caller may reuse the id after the answer.
        """
        self.groups.answered([request])

    def _share(self, loop: EngineLoop) -> None:
        """Moves requests that found no room to an engine with free rows; on `loop`'s thread.

        Requests move only while their engine has no commands left. So a command to all engines
        finds them in the one or in the other.
        """
        with self._lock:
            waiting = [each.num_waiting for each in self.loops]
            source = self.loops.index(loop)
            waiting[source] = loop.num_movable
            move = self._router.pick_move(waiting)
            if move is None or move.source != source:
                return
            requests, answers = loop.hand_over(move.num_requests)
            for request in requests:
                self._router.moved(request, source, move.target)
                request.engine = move.target
            self.loops[move.target].submit(TakeOver(requests, answers))

    # ------------------------------------------------------------------ the end

    def request_stop(self, reason: str = SHUT_DOWN) -> None:
        """Has the threads fail unfinished requests and end; does not wait. Idempotent.

        May be interrupted, and called by a finalizer in the middle of a hand-out. In a forked
        child, where there is no thread, it does nothing.
        """
        if not self.home.is_here:
            return
        if not self._is_stopping:
            self._stop_reason = reason
        self._hand_out.stop()
        self._is_stopping = True

    def _failed(self, reason: str) -> None:
        self._stop_engines(reason)
        self._hand_out.stop()

    def _stop_engines(self, reason: str | None) -> None:
        with self._lock:
            for loop in self.loops:
                loop.request_stop(reason or self._stop_reason)

    def stop(self) -> None:
        """`request_stop`, then waits for the threads to end."""
        self.request_stop()
        if not self.home.is_here:
            return
        # A finalizer may call this on any thread; on these it would wait for itself.
        own = {self.weights.thread, self._saves.thread, self._hand_out.thread}
        own.update(thread for loop in self.loops for thread in loop.threads if thread is not None)
        if threading.current_thread() not in own:
            for loop in self.loops:
                loop.join()

    def _closed(self) -> None:
        with self._lock:
            self._num_open -= 1
            is_last = not self._num_open
        if is_last:
            self.weights.stop(self._stop_reason)
            self._saves.stop(self._stop_reason)
            ended(self)
