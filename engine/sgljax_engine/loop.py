"""The engine thread: the one place where anything changes.

It takes commands only between two dispatches and blocks on the command queue when there is
nothing to run, or generation is paused. It knows nothing of the `Engine` object that feeds it, so
that dropping the last reference to an engine can end its thread.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from sgljax_engine import commands as cmd
from sgljax_engine.cache.pool import PagePool
from sgljax_engine.core import EngineCore
from sgljax_engine.detokenizer import Detokenizer, reject, resolve
from sgljax_engine.errors import EngineShutdownError, EngineStateError, forget_locals
from sgljax_engine.io_struct import PauseMode
from sgljax_engine.metrics import MemoryReport
from sgljax_engine.runner.runner import ModelRunner
from sgljax_engine.scheduler.scheduler import Scheduler
from sgljax_engine.tokenizer import Tokenizer
from sgljax_engine.types import FinishReason, Request
from sgljax_engine.updates import UpdateJob, UpdateWorker
from sgljax_engine.weights.sync import WeightMaker

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


class EngineLoop:
    """Commands in, answers out.

    Only `submit`, `update`, `request_stop`, `stop` and `weight_version` may be used from other
    threads.
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        pool: PagePool,
        runner: ModelRunner,
        weight_maker: WeightMaker,
        memory: MemoryReport,
        tokenizer: Tokenizer | None,
        name: str,
    ) -> None:
        """Starts the thread.

        Args:
            scheduler: Fresh, over `pool`.
            pool: The pages.
            runner: Holds weights and pages.
            weight_maker: Makes the weights of updates.
            memory: What weights and pages take.
            tokenizer: For output text.
            name: Of the threads.
        """
        self._core = EngineCore(
            scheduler=scheduler,
            pool=pool,
            runner=runner,
            memory=memory,
            detokenizer=Detokenizer(tokenizer, f"{name}-detokenizer", self._end_answered),
        )
        self._updates = UpdateWorker(weight_maker, self.submit, f"{name}-updates")
        self._pause: PauseMode | None = None
        # What is answered once no request is left that has begun.
        self._quiet_futures: list[Future[None]] = []
        self._waiting_swap: cmd.SwapWeights | None = None
        self._commands: queue.SimpleQueue[cmd.Command] = queue.SimpleQueue()
        # Reentrant: a garbage collection inside `submit` may end a stream or an engine, and so
        # submit on the same thread.
        self._submit_lock = threading.RLock()
        self._is_closed = False
        self._close_reason = "the engine was shut down"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        # A daemon thread must not touch the device while the interpreter is torn down.
        atexit.register(self.stop)
        self._thread.start()

    # ------------------------------------------------------------------ any thread

    @property
    def weight_version(self) -> int:
        """Of the weights that serve."""
        return self._core.weight_version

    def submit(self, command: cmd.Command) -> None:
        """Queues a command, or raises EngineShutdownError when nobody would answer it."""
        with self._submit_lock:
            self._check_open()
            self._commands.put(command)

    def update(self, job: UpdateJob) -> None:
        """Queues a weight update behind earlier ones, or raises EngineShutdownError."""
        with self._submit_lock:
            self._check_open()
            self._updates.put(job)

    def _check_open(self) -> None:
        # In a forked child the thread does not exist.
        if self._is_closed or not self._thread.is_alive():
            raise EngineShutdownError(self._close_reason)

    def request_stop(self) -> None:
        """Lets the thread fail what is unfinished and end, without waiting. Idempotent."""
        with self._submit_lock:
            if not self._is_closed:
                self._is_closed = True
                self._commands.put(cmd.Shutdown())

    def stop(self) -> None:
        """`request_stop`, then waits for the threads to end."""
        self.request_stop()
        # A finalizer may call this on any thread; on these it would wait for itself.
        own = (self._thread, self._core.detokenizer.thread, self._updates.thread)
        if threading.current_thread() not in own:
            self._thread.join()

    def _end_answered(self, request: Request, reason: FinishReason) -> None:
        with contextlib.suppress(EngineShutdownError):
            self.submit(cmd.EndAnswered(request, reason, Future()))

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            while self._take_commands():
                if self._can_step:
                    self._core.step()
        except BaseException as error:  # a bug: never leave a caller waiting
            logger.exception("the engine thread failed")
            self._close_reason = f"the engine thread failed: {error!r}"
        self._close()

    @property
    def _can_step(self) -> bool:
        return self._pause in (None, "wait") and self._core.scheduler.has_work

    def _take_commands(self) -> bool:
        """Handles all queued commands, waiting for one when nothing may run; False at shutdown."""
        while True:
            self._settle()
            if not self._can_step:
                self._core.answers.hand_over()
            try:
                # Kept in no variable: a command that was handled must not keep its arrays alive.
                go_on = self._handle(self._commands.get(block=not self._can_step))
            except queue.Empty:
                return True
            if not go_on:
                return False

    def _handle(self, command: cmd.Command) -> bool:
        """Answers a command, or has it wait; False when it was the last."""
        core = self._core
        core.answers.hand_over()
        if isinstance(command, cmd.Shutdown):
            return False
        if isinstance(command, cmd.AddRequests):
            core.add(command.requests, command.answers)
        elif isinstance(command, cmd.Pause):
            self._pause_generation(command.request.mode, command.future)
        elif isinstance(command, cmd.SwapWeights):
            self._swap(command)
        else:
            future: Future[Any] = command.future
            _answer(future, lambda: self._result(command))
        return True

    def _result(self, command: cmd.Command) -> Any:
        """The answer to a command that never has to wait."""
        core = self._core
        if isinstance(command, cmd.AbandonRequests):
            reason = FinishReason("abort", message="aborted by the caller")
            return core.end(command.requests, reason)
        if isinstance(command, cmd.Abort):
            asked = command.request
            found = core.scheduler.requests() if asked.rid is None else core.find(asked.rid)
            return core.end(found, FinishReason("abort", message=asked.message))
        if isinstance(command, cmd.EndAnswered):
            return core.end([command.request], command.reason)
        if isinstance(command, cmd.Continue):
            return self._continue_generation()
        if isinstance(command, cmd.FlushCache):
            return core.flush_cache()
        if isinstance(command, cmd.ReleaseKV):
            return core.release_kv()
        if isinstance(command, cmd.GetState):
            return core.state(self._pause)
        if isinstance(command, cmd.CheckIntegrity):
            return core.scheduler.check_integrity()
        core.check_weights()
        if isinstance(command, cmd.ChecksumWeights):
            return core.runner.checksum_weights()
        if isinstance(command, cmd.Score):
            return core.runner.score(command.sequences, command.temperature)
        assert isinstance(command, cmd.Warmup)
        return core.runner.warmup(
            include_score=command.include_score, include_table=command.include_table
        )

    # ------------------------------------------------------------------ pauses and updates

    def _pause_generation(self, mode: PauseMode, future: Future[None]) -> None:
        """Pauses; the last call's mode holds. Answered by `_settle` once nothing runs."""
        self._core.counters.num_pauses += self._pause is None
        self._pause = mode
        if mode != "wait":
            self._core.disturb(mode)
            self._core.answers.hand_over()
            self._core.runner.wait()
            self._answer_quiet()
            resolve(future, None)
        else:
            self._quiet_futures.append(future)
        self._set_admission()

    def _continue_generation(self) -> None:
        self._pause = None
        self._set_admission()
        futures, self._quiet_futures = self._quiet_futures, []
        for future in futures:
            message = "continue_generation ended a pause whose requests had not finished"
            reject(future, EngineStateError(message))

    def _swap(self, command: cmd.SwapWeights) -> None:
        if command.mode == "wait" and self._core.scheduler.num_begun and not self._can_step:
            message = (
                f"update_weights(mode='wait') cannot wait for {self._core.scheduler.num_begun} "
                f"request(s): generation is paused ({self._pause}); continue_generation first, "
                "or use another mode"
            )
            reject(command.future, EngineStateError(message))
        elif command.mode == "wait":
            self._waiting_swap = command
            self._set_admission()
        else:
            _answer(command.future, lambda: self._core.swap_weights(command))

    def _settle(self) -> None:
        """Answers what waited until no request was left that has begun."""
        if self._core.scheduler.num_begun:
            return
        if self._waiting_swap is not None:
            swap, self._waiting_swap = self._waiting_swap, None
            _answer(swap.future, lambda: self._core.swap_weights(swap))
        if self._quiet_futures:
            self._core.runner.wait()
            self._answer_quiet()
        self._set_admission()

    def _answer_quiet(self) -> None:
        futures, self._quiet_futures = self._quiet_futures, []
        for future in futures:
            resolve(future, None)

    def _set_admission(self) -> None:
        is_open = self._pause is None and self._waiting_swap is None
        self._core.scheduler.admits_new = is_open

    # ------------------------------------------------------------------ the end

    def _close(self) -> None:
        with self._submit_lock:
            self._is_closed = True
        self._core.close(self._closed_error)
        self._quiet_futures, futures = [], self._quiet_futures
        for future in futures:
            reject(future, self._closed_error())
        if self._waiting_swap is not None:
            reject(self._waiting_swap.future, self._closed_error())
            self._waiting_swap = None
        while not self._commands.empty():
            command = self._commands.get()
            if isinstance(command, cmd.AddRequests):
                for answer in command.answers:
                    reject(answer.future, self._closed_error())
            elif not isinstance(command, cmd.Shutdown):
                reject(command.future, self._closed_error())
        self._updates.stop()
        atexit.unregister(self.stop)

    def _closed_error(self) -> EngineShutdownError:
        return EngineShutdownError(self._close_reason)


def _answer(future: Future[_T], act: Callable[[], _T]) -> None:
    """Hands the result to the caller, or the error: they asked for it."""
    try:
        result = act()
    except BaseException as error:
        forget_locals(error)
        reject(future, error)
        if not isinstance(error, Exception):
            raise
    else:
        resolve(future, result)
    finally:
        # An error refers to this frame, which must not refer to it, or keep a command's arrays.
        del future, act
