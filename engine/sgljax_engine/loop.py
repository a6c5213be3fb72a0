"""The engine thread: the one place where anything changes.

It takes commands only between two dispatches and blocks on the command queue when there is
nothing to run. It knows nothing of the `Engine` object that feeds it, so that dropping the last
reference to an engine can end its thread.

What a dispatch produced is handed to the detokenizer when the next dispatch is on its way, so that
the device does not wait for that; but before any command, and before waiting for one.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import logging
import queue
import threading
import time
import traceback
from concurrent.futures import Future
from typing import Any, NamedTuple

from sgljax_engine import commands as cmd
from sgljax_engine.cache.pool import PagePool
from sgljax_engine.detokenizer import Answer, Detokenizer, reject, resolve
from sgljax_engine.errors import CompileForbiddenError, EngineShutdownError, EngineStepError
from sgljax_engine.metrics import EngineCounters, EngineState, MemoryReport
from sgljax_engine.runner.runner import ModelRunner
from sgljax_engine.scheduler.scheduler import Scheduler
from sgljax_engine.tokenizer import Tokenizer
from sgljax_engine.types import (
    FinishReason,
    PromptLogprobs,
    Request,
    RequestStatus,
    SchedulerOutput,
    StepOutput,
)
from sgljax_engine.weights.sync import WeightMaker

logger = logging.getLogger(__name__)


class _News(NamedTuple):
    """A request that is finished, or has new tokens that somebody watches."""

    request: Request
    answer: Answer
    now_s: float
    failure: EngineStepError | None = None


class EngineLoop:
    """Scheduler, runner and futures, driven by commands.

    Only `submit`, `request_stop`, `stop` and `weight_version` may be used from other threads.
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
        self.weight_version = 0
        self._scheduler = scheduler
        self._pool = pool
        self._runner = runner
        self._weight_maker = weight_maker
        self._memory = memory
        self._counters = EngineCounters()
        self._answers: dict[str, Answer] = {}
        self._failures: dict[str, EngineStepError] = {}
        self._news: list[_News] = []
        self._commands: queue.SimpleQueue[cmd.Command] = queue.SimpleQueue()
        # Reentrant: a garbage collection inside `submit` may end a stream or an engine, and so
        # submit on the same thread.
        self._submit_lock = threading.RLock()
        self._is_closed = False
        self._close_reason = "the engine was shut down"
        self._detokenizer = Detokenizer(tokenizer, f"{name}-detokenizer", self._end_answered)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        # A daemon thread must not touch the device while the interpreter is torn down.
        atexit.register(self.stop)
        self._thread.start()

    # ------------------------------------------------------------------ any thread

    def submit(self, command: cmd.Command) -> None:
        """Queues a command, or raises EngineShutdownError when nobody would answer it."""
        with self._submit_lock:
            # In a forked child the thread does not exist.
            if self._is_closed or not self._thread.is_alive():
                raise EngineShutdownError(self._close_reason)
            self._commands.put(command)

    def request_stop(self) -> None:
        """Lets the thread fail what is unfinished and end, without waiting. Idempotent."""
        with self._submit_lock:
            if not self._is_closed:
                self._is_closed = True
                self._commands.put(cmd.Shutdown())

    def stop(self) -> None:
        """`request_stop`, then waits for both threads to end."""
        self.request_stop()
        # A finalizer may call this on any thread; on these two it would wait for itself.
        if threading.current_thread() not in (self._thread, self._detokenizer.thread):
            self._thread.join()

    def _end_answered(self, request: Request, reason: FinishReason) -> None:
        with contextlib.suppress(EngineShutdownError):
            self.submit(cmd.EndAnswered(request.rid, reason, Future()))

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            while self._take_commands():
                if self._scheduler.has_work:
                    self._step()
        except BaseException as error:  # a bug: never leave a caller waiting
            logger.exception("the engine thread failed")
            self._close_reason = f"the engine thread failed: {error!r}"
        self._close()

    def _take_commands(self) -> bool:
        """Handles all queued commands, waiting for one when idle; False at shutdown."""
        while True:
            if not self._scheduler.has_work:
                self._hand_over()
            try:
                # Kept in no variable: a command that was handled must not keep its arrays alive.
                go_on = self._handle(self._commands.get(block=not self._scheduler.has_work))
            except queue.Empty:
                return True
            if not go_on:
                return False

    def _handle(self, command: cmd.Command) -> bool:
        """Answers a command; False when it was the last."""
        self._hand_over()
        if isinstance(command, cmd.Shutdown):
            return False
        if isinstance(command, cmd.AddRequests):
            self._add(command)
            return True
        try:
            result = self._answer(command)
        except BaseException as error:  # handed to the caller, who asked for it
            _forget_locals(error)
            reject(command.future, error)
            if not isinstance(error, Exception):
                raise
        else:
            future: Future[Any] = command.future
            resolve(future, result)
        finally:
            del command
        return True

    def _answer(self, command: cmd.Command) -> Any:
        if isinstance(command, cmd.AbortRequests):
            reason = FinishReason("abort", message="aborted by the caller")
            return self._end(command.rids, reason)
        if isinstance(command, cmd.EndAnswered):
            return self._end([command.rid], command.reason)
        if isinstance(command, cmd.UpdateWeights):
            return self._update_weights(command)
        if isinstance(command, cmd.Score):
            return self._runner.score(command.sequences, command.temperature)
        if isinstance(command, cmd.Warmup):
            return self._runner.warmup(
                include_score=command.include_score, include_table=command.include_table
            )
        if isinstance(command, cmd.FlushCache):
            return self._pool.reset_cache() * self._pool.page_size
        if isinstance(command, cmd.CheckIntegrity):
            return self._scheduler.check_integrity()
        assert isinstance(command, cmd.GetState)
        return self._state()

    def _add(self, command: cmd.AddRequests) -> None:
        for request, answer in zip(command.requests, command.answers, strict=True):
            try:
                self._runner.check_warm(request)
            except CompileForbiddenError as error:
                reject(answer.future, error)
                continue
            self._answers[request.rid] = answer
            self._scheduler.add(request)
            self._counters.num_requests += 1

    def _end(self, rids: list[str], reason: FinishReason) -> int:
        found = [r for r in map(self._scheduler.find, dict.fromkeys(rids)) if r is not None]
        for request in found:
            self._scheduler.finish(request, reason)
            self._deliver(request)
        return len(found)

    def _state(self) -> EngineState:
        size = self._pool.page_size
        return EngineState(
            running_batch_size=len(self._scheduler.running),
            waiting_queue_size=len(self._scheduler.waiting),
            available_kv_tokens=self._pool.num_available * size,
            cached_kv_tokens=self._pool.num_cached * size,
            total_kv_tokens=self._pool.num_pages * size,
            weight_version=self.weight_version,
            new_token_ratio=self._scheduler.policy.new_token_ratio,
            num_compiles=self._runner.programs.num_compiles,
            compile_s=self._runner.programs.compile_s,
            memory=self._memory,
            counters=copy.copy(self._counters),
        )

    # ------------------------------------------------------------------ weights

    def _update_weights(self, command: cmd.UpdateWeights) -> int:
        """Builds all new weights, then swaps; any failure before leaves the old ones serving."""
        started = time.perf_counter()
        weights = self._weight_maker.make(command.source, command.rules)
        # Keys and values of running requests belong to the old weights: prefill them again.
        self._pool.reset_cache()
        for request in list(self._scheduler.running):
            self._retract(request)
            if not request.output_ids:
                request.prompt_logprobs = None
        self._runner.swap_weights(weights)
        self.weight_version += 1
        self._counters.num_weight_updates += 1
        self._counters.update_s += time.perf_counter() - started
        return self.weight_version

    def _retract(self, request: Request) -> None:
        self._scheduler.retract(request)
        self._counters.num_retractions += 1

    # ------------------------------------------------------------------ one dispatch

    def _step(self) -> None:
        output = self._scheduler.schedule()
        self._counters.num_retractions += len(output.retracted)
        if output.is_empty:
            raise EngineStepError("the scheduler has requests but nothing to run")
        try:
            step = self._dispatch(output)
        except Exception as error:  # fails these requests; the thread lives on
            self._fail_step(output, error)
            return
        for request in _touched(output):
            request.weight_version = self.weight_version
            request.num_cache_misses += step.num_cache_misses
        self._stamp_first_tokens(output, step)
        for request in self._scheduler.update(output, step):
            self._deliver(request)
        for rid, failure in list(self._failures.items()):
            self._end([rid], FinishReason("error", message=str(failure)))
        for request in output.decode:
            if request.is_watched and request.rid in self._answers:
                self._news.append(_News(request, self._answers[request.rid], time.perf_counter()))
        self._count(output, step)

    def _dispatch(self, output: SchedulerOutput) -> StepOutput:
        compiles = self._runner.programs.num_compiles
        started = time.perf_counter()
        if any(request.logprob_options.start_len >= 0 for request in output.started):
            self._hand_over()  # scoring waits for the device, prompt by prompt
            self._score_prompts(output.started)
        if output.prefill:
            self._runner.prefill(output.prefill)
        if output.copies:
            self._runner.copy_pages(output.copies)
        prefilled = time.perf_counter()
        pending = self._runner.decode(output) if output.decode else None
        self._hand_over()
        rows = [] if pending is None else pending.wait()
        decoded = time.perf_counter()
        self._counters.prefill_s += prefilled - started
        self._counters.decode_s += decoded - prefilled
        compiles = self._runner.programs.num_compiles - compiles
        return StepOutput(rows, compiles, None if compiles else decoded - prefilled)

    def _stamp_first_tokens(self, output: SchedulerOutput, step: StepOutput) -> None:
        now = time.perf_counter()
        for request, row in zip(output.decode, step.rows, strict=True):
            if request.first_token_s is None and row.token_ids:
                request.first_token_s = now
                self._counters.num_first_tokens += 1
                self._counters.time_to_first_token_s += now - request.arrival_s

    def _score_prompts(self, started: list[Request]) -> None:
        """Prompt log-probs for those that ask, each prompt once. A failure is theirs alone."""
        done: dict[Any, PromptLogprobs] = {}
        for request in started:
            if request.logprob_options.start_len < 0 or request.prompt_logprobs is not None:
                continue
            key = (tuple(request.prompt_ids), request.logprob_options)
            try:
                if key not in done:
                    done[key] = self._runner.score_prompt(request)
                request.prompt_logprobs = done[key]
            except Exception as error:  # no pages were donated: the step can go on
                logger.exception("scoring a prompt failed")
                _forget_locals(error)
                failure = EngineStepError(f"scoring the prompt of {request.rid} failed: {error!r}")
                failure.__cause__ = error
                self._failures[request.rid] = failure

    def _count(self, output: SchedulerOutput, step: StepOutput) -> None:
        counters = self._counters
        counters.num_dispatches += 1
        counters.num_decode_rows += len(output.decode)
        counters.max_decode_batch = max(counters.max_decode_batch, len(output.decode))
        counters.num_prefill_tokens += sum(chunk.num_tokens for chunk in output.prefill)
        counters.num_cached_tokens += sum(
            request.num_cached for request in output.started if request.num_retractions == 0
        )
        counters.num_page_copies += len(output.copies)
        counters.num_output_tokens += sum(len(row.token_ids) for row in step.rows)

    def _count_end(self, request: Request) -> float:
        """Counts a request that has ended; returns the time."""
        now_s = time.perf_counter()
        self._counters.num_finished += 1
        self._counters.e2e_latency_s += now_s - request.arrival_s
        return now_s

    def _deliver(self, request: Request) -> None:
        now_s = self._count_end(request)
        failure = self._failures.pop(request.rid, None)
        self._news.append(_News(request, self._answers.pop(request.rid), now_s, failure))

    def _hand_over(self) -> None:
        """Gives the detokenizer what the last dispatch and commands left for it."""
        news, self._news = self._news, []
        for item in news:
            self._detokenizer.put(item.request, item.answer, item.now_s, item.failure)

    def _fail_step(self, output: SchedulerOutput, error: Exception) -> None:
        """Ends the requests that the step touched; others keep going."""
        logger.exception("a device step failed")
        _forget_locals(error)
        self._hand_over()
        self._counters.num_failed_steps += 1
        # Pages may lack what the step was to write: after this none of them is kept.
        self._pool.reset_cache()
        for request in _touched(output):
            reason = FinishReason("error", message=repr(error))
            self._scheduler.finish(request, reason)
            now_s = self._count_end(request)
            failure = EngineStepError(f"request {request.rid} failed in a device step: {error!r}")
            failure.__cause__ = error
            self._failures.pop(request.rid, None)
            self._detokenizer.put(request, self._answers.pop(request.rid), now_s, failure)
        # A step that failed after it took the donated pages took everybody's keys and values.
        if self._runner.recover_kv():
            for request in list(self._scheduler.running):
                self._retract(request)

    # ------------------------------------------------------------------ the end

    def _close(self) -> None:
        with self._submit_lock:
            self._is_closed = True
        self._hand_over()
        self._detokenizer.stop()
        for request in self._scheduler.requests():
            request.status = RequestStatus.FINISHED
        for answer in self._answers.values():
            self._refuse(answer.future)
        self._answers.clear()
        while not self._commands.empty():
            command = self._commands.get()
            if isinstance(command, cmd.AddRequests):
                for answer in command.answers:
                    self._refuse(answer.future)
            elif not isinstance(command, cmd.Shutdown):
                self._refuse(command.future)
        self._runner.release()
        atexit.unregister(self.stop)

    def _refuse(self, future: Future[Any]) -> None:
        # Each caller gets an error of its own: raised on two threads, one would mix up their
        # tracebacks and keep both their frames alive.
        reject(future, EngineShutdownError(self._close_reason))


def _touched(output: SchedulerOutput) -> list[Request]:
    """The requests that a dispatch works on, each once."""
    touched = [*output.decode, *(chunk.request for chunk in output.prefill), *output.started]
    return list({request.rid: request for request in touched}.values())


def _forget_locals(error: BaseException) -> None:
    """Frees what an error's frames hold, weights and commands among it; callers keep errors."""
    cause: BaseException | None = error
    while cause is not None:
        traceback.clear_frames(cause.__traceback__)
        cause = cause.__cause__ or cause.__context__
