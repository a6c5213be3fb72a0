"""The engine thread: the one place where anything changes.

It takes commands only between two dispatches and blocks on the command queue when there is
nothing to run, or generation is paused. It knows nothing of the `Engine` object that feeds it, so
that dropping the last reference to an engine can end its thread.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import queue
import threading
import time
from concurrent.futures import Future

from sgljax_engine.core import commands as cmd
from sgljax_engine.core.adapter_loading import AdapterLoader
from sgljax_engine.core.background import Worker
from sgljax_engine.core.checkpoint_writer import CheckpointWriter, SaveJob
from sgljax_engine.core.engine_core import EngineCore
from sgljax_engine.core.handlers import handle
from sgljax_engine.core.interruptions import settle
from sgljax_engine.core.staging import Stager, WeightJob, do_weight_job
from sgljax_engine.core.weight_updates import WeightUpdater
from sgljax_engine.errors import EngineShutdownError
from sgljax_engine.observability.progress import EngineProgress
from sgljax_engine.observability.trace import ENGINE_TRACK, Recorder
from sgljax_engine.types import FinishReason, Request
from sgljax_engine.weights.adapters import AdapterSlots
from sgljax_engine.weights.served import ServedSource
from sgljax_engine.weights.sync import WeightMaker

logger = logging.getLogger(__name__)


class EngineLoop:
    """Commands and jobs in, answers out.

    Only `submit`, `request_stop`, `stop`, `weight_version`, `is_sleeping`, `is_running`,
    `progress` and `recorder` may be used from other threads.
    """

    def __init__(
        self,
        core: EngineCore,
        *,
        weight_maker: WeightMaker,
        served: ServedSource,
        slots: AdapterSlots | None,
        name: str,
    ) -> None:
        """Starts the thread.

        Args:
            core: Fresh; from now on the thread's alone.
            weight_maker: Makes the weights of updates.
            served: What the first weights were made of.
            slots: Room for adapters.
            name: Of the threads.
        """
        self._core = core
        core.outputs.connect(self._end_answered, f"{name}-detokenizer")
        updater = WeightUpdater(weight_maker, served, self.submit, self._check_open, self.recorder)
        loader = AdapterLoader(slots, weight_maker.targets, self.submit, self._check_open)
        self._stager = Stager(weight_maker, served, self.submit, self._check_open)
        self._updates = Worker(
            functools.partial(do_weight_job, updater, loader, self._stager), f"{name}-updates"
        )
        writer = CheckpointWriter(core.runner.model_config, self.submit)
        self._saves = Worker(writer.save, f"{name}-checkpoints")
        self._is_step_due = False
        self._halted_since_s: float | None = None
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
    def recorder(self) -> Recorder:
        """Of the engine's threads."""
        return self._core.recorder

    @property
    def weight_version(self) -> int:
        """Of the weights that serve."""
        return self._core.serving.version

    @property
    def is_sleeping(self) -> bool:
        """Whether weights or KV cache sleep."""
        return bool(self._core.sleep_manager.asleep)

    @property
    def is_running(self) -> bool:
        """Whether `submit` takes anything. In a forked child the thread does not exist."""
        return not self._is_closed and self._thread.is_alive()

    @property
    def progress(self) -> EngineProgress:
        """Reads what the engine thread writes, without waiting for it."""
        core, since_s = self._core, self._halted_since_s
        return EngineProgress(
            num_running=len(core.scheduler.running),
            num_waiting=len(core.scheduler.waiting),
            num_finished=core.counters.num_finished,
            num_output_tokens=core.counters.num_output_tokens,
            num_prefill_tokens=core.counters.num_prefill_tokens,
            num_cached_tokens=core.counters.num_cached_tokens,
            weight_version=core.serving.version,
            halted_s=None if since_s is None else time.perf_counter() - since_s,
        )

    def submit(self, command: cmd.Command | WeightJob | SaveJob) -> None:
        """Queues a command for the engine thread, or a job for one of the workers.

        Jobs that concern weights are done in their order, and so are checkpoints.

        Raises:
            EngineShutdownError: when nobody would answer it.
        """
        with self._submit_lock:
            self._check_open()
            if isinstance(command, cmd.Command):
                self._commands.put(command)
            elif isinstance(command, SaveJob):
                self._saves.put(command)
            else:
                self._updates.put(command)

    def _check_open(self) -> None:
        if not self.is_running:
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
        workers = (self._updates.thread, self._saves.thread)
        own = (self._thread, self._core.outputs.thread, *workers)
        if threading.current_thread() not in own:
            self._thread.join()

    def _end_answered(self, request: Request, reason: FinishReason) -> None:
        with contextlib.suppress(EngineShutdownError):
            self.submit(cmd.EndAnswered(request, reason, Future()))

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            while self._take_commands():
                if self._core.can_step:
                    self._core.step()
        except BaseException as error:  # a bug: never leave a caller waiting
            logger.exception("the engine thread failed")
            self._close_reason = f"the engine thread failed: {error!r}"
        self._close()

    def _take_commands(self) -> bool:
        """Handles queued commands, waiting for one when nothing may run; False at shutdown.

        All that there are, but for those behind a part of a long job: a step comes first.
        """
        core = self._core
        while True:
            settle(core)
            self._note_halt()
            if not core.can_step:
                core.outputs.flush()
            try:
                # Kept in no variable: a command that was handled must not keep its arrays alive.
                go_on = self._handle(self._commands.get(block=not core.can_step))
            except queue.Empty:
                return True
            if not go_on:
                return False
            if self._is_step_due and core.can_step:
                return True

    def _note_halt(self) -> None:
        if self._core.starts_requests:
            self._halted_since_s = None
        elif self._halted_since_s is None:
            self._halted_since_s = time.perf_counter()

    def _handle(self, command: cmd.Command) -> bool:
        """Answers a command, or has it wait; False when it was the last."""
        name, started = type(command).__name__, time.perf_counter()
        self._is_step_due = command.is_part_of_long_job
        try:
            self._core.outputs.flush()
            if isinstance(command, cmd.Shutdown):
                return False
            handle(self._core, command)
        except BaseException as error:  # a bug, which ends the thread; see `_run`
            message = f"the engine thread failed: {error!r}"
            command.refuse(lambda: EngineShutdownError(message))
            raise
        finally:
            del command  # see `commands.answer`
            if self.recorder.is_on:
                self.recorder.slice(ENGINE_TRACK, name, started, time.perf_counter(), {})
        return True

    # ------------------------------------------------------------------ the end

    def _close(self) -> None:
        with self._submit_lock:
            self._is_closed = True
        self._core.close(self._closed_error)
        while not self._commands.empty():
            self._commands.get().refuse(self._closed_error)
        self._updates.stop()
        self._stager.release()
        self._saves.stop()
        atexit.unregister(self.stop)

    def _closed_error(self) -> EngineShutdownError:
        return EngineShutdownError(self._close_reason)
