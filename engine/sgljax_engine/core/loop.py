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
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

from sgljax_engine.cache.pool import PagePool
from sgljax_engine.core import commands as cmd
from sgljax_engine.core.adapter_loading import AdapterLoader
from sgljax_engine.core.adapters import AdapterRegistry
from sgljax_engine.core.background import Worker
from sgljax_engine.core.checkpoint_state import copy_pages, restore, take_snapshot
from sgljax_engine.core.checkpoint_writer import CheckpointWriter, SaveJob
from sgljax_engine.core.engine_core import EngineCore
from sgljax_engine.core.staging import Stager, WeightJob, do_weight_job
from sgljax_engine.core.weight_updates import WeightUpdater
from sgljax_engine.errors import EngineShutdownError, EngineStateError, forget_locals
from sgljax_engine.io_struct import PauseMode
from sgljax_engine.observability.metrics import MemoryReport
from sgljax_engine.observability.progress import EngineProgress
from sgljax_engine.observability.trace import ENGINE_TRACK, Recorder
from sgljax_engine.processing.detokenizer import Detokenizer, reject, resolve
from sgljax_engine.processing.tokenizer import Tokenizer
from sgljax_engine.runner.runner import ModelRunner
from sgljax_engine.scheduler.scheduler import Scheduler
from sgljax_engine.types import FinishReason, Request
from sgljax_engine.weights.adapters import AdapterSlots
from sgljax_engine.weights.served import ServedSource
from sgljax_engine.weights.sync import WeightMaker

logger = logging.getLogger(__name__)


class _Answered(Protocol):
    """A command with an answer."""

    @property
    def future(self) -> Future[Any]:
        """Of the answer."""
        ...


class EngineLoop:
    """Commands in, answers out.

    Only `submit`, `update`, `save`, `request_stop`, `stop`, `weight_version`, `is_sleeping`,
    `progress` and `recorder` may be used from other threads.
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        pool: PagePool,
        runner: ModelRunner,
        weight_maker: WeightMaker,
        served: ServedSource,
        slots: AdapterSlots | None,
        adapters: AdapterRegistry,
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
            served: What the first weights were made of.
            slots: Room for adapters.
            adapters: Those that the weights hold.
            memory: What weights and pages take.
            tokenizer: For output text.
            name: Of the threads.
        """
        self.recorder = Recorder()
        self._core = EngineCore(
            scheduler=scheduler,
            pool=pool,
            runner=runner,
            memory=memory,
            detokenizer=Detokenizer(
                tokenizer, f"{name}-detokenizer", self._end_answered, self.recorder
            ),
            recorder=self.recorder,
            adapters=adapters,
        )
        weight_updater = WeightUpdater(
            weight_maker, served, self.submit, self._check_open, self.recorder
        )
        loader = AdapterLoader(slots, weight_maker.targets, self.submit, self._check_open)
        self._stager = Stager(weight_maker, served, self.submit, self._check_open)
        self._updates = Worker(
            functools.partial(do_weight_job, weight_updater, loader, self._stager),
            f"{name}-updates",
        )
        checkpoint_writer = CheckpointWriter(runner.model_config, self.submit)
        self._saves = Worker(checkpoint_writer.save, f"{name}-checkpoints")
        self._pause: PauseMode | None = None
        # What is answered once no request is left that has started.
        self._quiet_futures: list[Future[None]] = []
        self._waiting_swap: cmd.SwapWeights | cmd.SwapAdapter | None = None
        self._is_step_due = False
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

    @property
    def is_sleeping(self) -> bool:
        """Whether weights or KV cache sleep."""
        return bool(self._core.sleep_manager.asleep)

    @property
    def progress(self) -> EngineProgress:
        """Reads what the engine thread writes, without waiting for it."""
        core = self._core
        return EngineProgress(
            num_running=len(core.scheduler.running),
            num_waiting=len(core.scheduler.waiting),
            num_finished=core.counters.num_finished,
            num_output_tokens=core.counters.num_output_tokens,
            num_prefill_tokens=core.counters.num_prefill_tokens,
            num_cached_tokens=core.counters.num_cached_tokens,
            weight_version=core.weight_version,
        )

    def submit(self, command: cmd.Command) -> None:
        """Queues a command, or raises EngineShutdownError when nobody would answer it."""
        with self._submit_lock:
            self._check_open()
            self._commands.put(command)

    def update(self, job: WeightJob) -> None:
        """Queues what concerns weights behind earlier jobs, or raises EngineShutdownError."""
        with self._submit_lock:
            self._check_open()
            self._updates.put(job)

    def save(self, job: SaveJob) -> None:
        """Queues a checkpoint behind earlier ones, or raises EngineShutdownError."""
        with self._submit_lock:
            self._check_open()
            self._saves.put(job)

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
        workers = (self._updates.thread, self._saves.thread)
        own = (self._thread, self._core.detokenizer.thread, *workers)
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
        return not self._is_held and self._core.scheduler.has_work

    @property
    def _is_held(self) -> bool:
        """Whether nothing may run, whatever there is to do."""
        return self._pause not in (None, "wait") or not self._core.can_run

    def _take_commands(self) -> bool:
        """Handles queued commands, waiting for one when nothing may run; False at shutdown.

        All that there are, but for those behind a part of a long job: a step comes first.
        """
        while True:
            self._settle()
            if not self._can_step:
                self._core.outputs.hand_over()
            try:
                # Kept in no variable: a command that was handled must not keep its arrays alive.
                go_on = self._handle(self._commands.get(block=not self._can_step))
            except queue.Empty:
                return True
            if not go_on:
                return False
            if self._is_step_due and self._can_step:
                return True

    def _handle(self, command: cmd.Command) -> bool:
        """Answers a command, or has it wait; False when it was the last."""
        name, began = type(command).__name__, time.perf_counter()
        self._is_step_due = isinstance(command, cmd.CopyPages)
        try:
            self._core.outputs.hand_over()
            if isinstance(command, cmd.Shutdown):
                return False
            if isinstance(command, cmd.AddRequests):
                self._core.add(command.requests, command.answers)
            elif isinstance(command, cmd.Pause):
                self._pause_generation(command.request.mode, command.future)
            elif isinstance(command, (cmd.SwapWeights, cmd.SwapAdapter)):
                self._swap(command)
            else:
                _answer(command, functools.partial(self._result, command))
        except BaseException as error:  # a bug, which ends the thread; see `_run`
            message = f"the engine thread failed: {error!r}"
            _refuse(command, lambda: EngineShutdownError(message))
            raise
        finally:
            del command  # see `_answer`
            if self.recorder.is_on:
                self.recorder.slice(ENGINE_TRACK, name, began, time.perf_counter(), {})
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
        if isinstance(command, cmd.Sleep):
            return self._sleep(command)
        if isinstance(command, cmd.WakeUp):
            return core.wake_up(command.tags)
        if isinstance(command, cmd.GetState):
            return core.state(self._pause)
        if isinstance(command, cmd.CheckIntegrity):
            return core.scheduler.check_integrity()
        if isinstance(command, cmd.MakeWeights):
            return command.make()
        if isinstance(command, cmd.UnloadAdapter):
            return core.unload_adapter(command.name)
        if isinstance(command, cmd.TakeSnapshot):
            return take_snapshot(core, include_kv=command.include_kv)
        if isinstance(command, cmd.CopyPages):
            return copy_pages(core, command.stamps)
        if isinstance(command, cmd.Restore):
            return restore(core, command.restoration)
        core.check_awake()
        if isinstance(command, cmd.ChecksumWeights):
            return core.runner.checksum_weights()()
        if isinstance(command, cmd.CompareWeights):
            return core.runner.differing_weights(command.source, command.rules)
        if isinstance(command, cmd.CompareAdapter):
            return core.differing_adapter(command.name, command.build)
        if isinstance(command, cmd.Score):
            slot = core.adapters.find(command.lora)
            return core.runner.score(command.sequences, command.starts, command.temperature, slot)
        assert isinstance(command, cmd.Warmup)
        return core.warmup(command)

    # ------------------------------------------------------------------ pauses and updates

    def _pause_generation(self, mode: PauseMode, future: Future[None]) -> None:
        """Pauses; the last call's mode holds. "wait" is answered by `_settle`."""
        core = self._core
        core.stats.paused(mode)
        self._pause = mode
        if mode == "wait":
            self._quiet_futures.append(future)
            self._refuse_if_held()
            self._set_admission()
            return
        core.apply_pause_mode(mode)
        core.outputs.hand_over()
        core.runner.wait()
        self._refuse_if_held()
        self._set_admission()
        resolve(future, None)

    def _sleep(self, command: cmd.Sleep) -> int:
        num_bytes = self._core.sleep(command)
        self._refuse_if_held()
        self._set_admission()
        return num_bytes

    def _refuse_if_held(self) -> None:
        """Answers all that waits for requests to finish, if they cannot. See `_settle` else."""
        core = self._core
        if not core.scheduler.num_started or not self._is_held:
            return
        holder = f"pause_generation({self._pause!r})"
        if not core.can_run:
            holder = "sleep" if core.sleep_manager.asleep else "the want of weights"
        self._refuse_quiet(f"{holder} keeps them from finishing")
        self._refuse_swap(f"{holder} keeps them from finishing")

    def _continue_generation(self) -> None:
        self._pause = None
        self._core.stats.continued()
        self._refuse_quiet("continue_generation ended the pause")
        self._set_admission()

    def _swap(self, command: cmd.SwapWeights | cmd.SwapAdapter) -> None:
        try:
            # Without weights no request ever finishes, so there is nothing to wait for.
            if command.mode != "wait" or not self._core.holds_weights:
                _answer(command, functools.partial(self._core.swap_weights, command))
                return
            self._waiting_swap = command
        finally:
            del command  # see `_answer`
        self._refuse_if_held()
        self._set_admission()

    def _settle(self) -> None:
        """Does what waited until no request was left that has started."""
        if self._core.scheduler.num_started:
            return
        self._core.outputs.hand_over()
        if self._waiting_swap is not None:
            swap, self._waiting_swap = self._waiting_swap, None
            try:
                _answer(swap, functools.partial(self._core.swap_weights, swap))
            finally:
                del swap  # see `_answer`
        if self._quiet_futures:
            self._core.runner.wait()
            futures, self._quiet_futures = self._quiet_futures, []
            for future in futures:
                resolve(future, None)
        self._set_admission()

    def _refuse_quiet(self, why: str) -> None:
        """Answers waiting pauses whose requests will not finish under them."""
        futures, self._quiet_futures = self._quiet_futures, []
        for future in futures:
            reject(future, EngineStateError(f"pause_generation('wait') {self._waited(why)}"))

    def _refuse_swap(self, why: str) -> None:
        """Answers an update whose requests cannot finish."""
        swap, self._waiting_swap = self._waiting_swap, None
        if swap is not None:
            message = f"update_weights(mode='wait') {self._waited(why)}"
            reject(swap.future, EngineStateError(message))

    def _waited(self, why: str) -> str:
        return f"waited for {self._core.scheduler.num_started} request(s), but {why}"

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
            _refuse(self._commands.get(), self._closed_error)
        self._updates.stop()
        self._stager.release()
        self._saves.stop()
        atexit.unregister(self.stop)

    def _closed_error(self) -> EngineShutdownError:
        return EngineShutdownError(self._close_reason)


def _answer(command: _Answered, act: Callable[[], Any]) -> None:
    """Hands the result to the caller, or the error: they asked for it.

    An error refers to this frame, and through it to those of its callers. None of them may refer to
    the command: its future refers to the error, and it may hold weights.
    """
    future: Future[Any] = command.future
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
        del command, future, act


def _refuse(command: cmd.Command, make_error: Callable[[], BaseException]) -> None:
    """Answers a command that nobody will do."""
    if isinstance(command, cmd.AddRequests):
        for answer in command.answers:
            reject(answer.future, make_error())
    elif not isinstance(command, cmd.Shutdown):
        reject(command.future, make_error())
