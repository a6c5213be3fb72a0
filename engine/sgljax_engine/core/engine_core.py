"""Requests and steps: what an engine does, without its thread.

`core.loop` runs it on the engine thread. A test may do so on its own: `Task.run` does a task, and
`EngineCore.step` takes a step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from sgljax_engine.cache.pool import PagePool
from sgljax_engine.core.calls import RequestGroups
from sgljax_engine.core.pause_state import PauseState, PendingDrain
from sgljax_engine.core.stats import Stats
from sgljax_engine.errors import (
    EngineError,
    EngineStateError,
    EngineStepError,
    NonFiniteLogitsError,
    StructuredOutputError,
    forget_locals,
)
from sgljax_engine.io_struct import PauseMode
from sgljax_engine.observability.metrics import EngineState, MemoryReport
from sgljax_engine.observability.trace import Recorder
from sgljax_engine.processing.futures import Answer, resolve
from sgljax_engine.processing.output_processor import OutputProcessor
from sgljax_engine.processing.tokenizer import Tokenizer
from sgljax_engine.runner.runner import ModelRunner
from sgljax_engine.runner.serving_weights import AdapterRegistry, ServingWeights
from sgljax_engine.runner.sleep import SleepManager
from sgljax_engine.runner.warmup import Warmup
from sgljax_engine.scheduler.scheduler import Scheduler
from sgljax_engine.scheduler.speculator import Speculator
from sgljax_engine.types import FinishReason, Request, RequestStatus, SchedulerOutput

logger = logging.getLogger(__name__)


class EngineCore:
    """Scheduler, runner and output processor of an engine. For one thread.

    `outputs.connect` comes before the first request. Any thread may read `sleep_manager.asleep` and
    `serving.version`, and start and stop the `recorder`. `has_no_room`: the last step started none
    of the waiting requests. `steps_left`, for tests, is None for no limit.
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        pool: PagePool,
        runner: ModelRunner,
        warmup: Warmup,
        memory: MemoryReport,
        tokenizer: Tokenizer | None,
        adapters: AdapterRegistry,
        groups: RequestGroups,
        index: int,
        speculator: Speculator | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.pool = pool
        self.runner = runner
        self.warmup = warmup
        self.recorder = Recorder()
        self.stats = Stats(scheduler, pool, self.recorder)
        self.counters = self.stats.counters
        self.outputs = OutputProcessor(tokenizer, self.recorder, self._finished)
        self.groups = groups
        self.index = index
        self.sleep_manager = SleepManager(runner, pool, self.counters)
        self.serving = ServingWeights(runner, self.sleep_manager, adapters)
        self.pauses = PauseState()
        self.has_no_room = False
        self.steps_left: int | None = None
        self._memory = memory
        self._speculator = speculator

    # ------------------------------------------------------------------ one step

    def step(self) -> None:
        """Schedules, runs and publishes one dispatch; `can_step` must hold."""
        if self.steps_left is not None:
            self.steps_left -= 1
        try:
            plan = self.scheduler.schedule()
            self.has_no_room = not plan.started and bool(self.scheduler.waiting)
            self.stats.retracted(plan.retracted)
            if plan.is_empty:
                raise EngineStepError("the scheduler has requests but nothing to run")
        except Exception as error:
            self._start_over("planning a step", error, None)
            return
        try:
            # What the last step produced is sent while the device runs this one.
            pending = self.runner.dispatch(plan, self.outputs.flush, is_timed=self.recorder.is_on)
            result = pending.wait()
            if self.runner.routed_reader is not None:
                self.runner.routed_reader.read_after_step(plan, result)
        except Exception as error:  # fails these requests; the thread lives on
            self._fail_step(plan, error)
            return
        try:
            self.stats.stepped(plan, result)
            changes = self.scheduler.update(plan, result)
            not_finite = [f for f in changes.failures.values() if type(f) is NonFiniteLogitsError]
            if not_finite:
                logger.error("%s (%d such requests in this step)", not_finite[0], len(not_finite))
                self.pool.reset_cache()  # else what a device got wrong once stays in it
            self.outputs.publish(changes)
            self._advance_guides(plan.decode)
        except Exception as error:
            self._start_over("taking the results of a step", error, plan)

    def _advance_guides(self, requests: Iterable[Request]) -> None:
        """Has guides follow the new tokens; ends requests that can generate no more."""
        for request in requests:
            guide = request.guide
            if guide is None or request.finish is not None:
                continue
            try:
                guide.advance(request.output_ids)
            except StructuredOutputError as error:
                failure = StructuredOutputError(f"request {request.rid} failed: {error}")
                self.outputs.fail(request, failure)
                self.end([request], FinishReason("error", message=str(failure)))
                continue
            if guide.is_over:
                request.guide = None

    def _fail_step(self, plan: SchedulerOutput, error: Exception) -> None:
        """Ends the requests that a step touched; others keep going."""
        logger.exception("a device step failed")
        forget_locals(error)
        self.outputs.flush()
        self.counters.num_failed_steps += 1
        # Pages may lack what the step was to write: after this none of them is kept.
        self.pool.reset_cache()
        for request in plan.touched:
            failure = EngineStepError(f"request {request.rid} failed in a device step: {error!r}")
            failure.__cause__ = error
            self.outputs.fail(request, failure)
            self.end([request], FinishReason("error", message=repr(error)))
        self.outputs.flush()
        # A step that failed after it took the donated pages took everybody's keys and values.
        if self.runner.kv_memory.recover():
            self.retract_all()

    def _start_over(self, what: str, error: Exception, plan: SchedulerOutput | None) -> None:
        """Recovers from a failure on the host, after which queues and pages cannot be trusted.

        Ends the requests of the step. Without a plan these are all running requests, or else the
        oldest waiting one. All others are prefilled again.
        """
        logger.exception("%s failed", what)
        forget_locals(error)
        self.counters.num_failed_steps += 1
        known = {id(request) for request in self.scheduler.requests()}
        lost = [request for request in self.outputs.requests() if id(request) not in known]
        touched = list(self.scheduler.running) if plan is None else list(plan.touched)
        failed = [*lost, *(request for request in touched if id(request) in known)]
        if not failed and self.scheduler.waiting:
            failed = [self.scheduler.waiting.oldest]
        over = {id(request) for request in failed}
        self.stats.retracted([r for r in self.scheduler.running if id(r) not in over])
        self.scheduler.start_over(failed, FinishReason("error", message=repr(error)))
        for request in failed:
            if not self.outputs.holds(request):
                continue
            failure = EngineStepError(f"request {request.rid} failed in {what}: {error!r}")
            failure.__cause__ = error
            self.outputs.fail(request, failure)
            try:
                self.outputs.finish(request)
            except Exception:  # what failed before may fail again
                logger.exception("noting that request %s is over failed", request.rid)
                self.outputs.drop(request, failure)
        self.outputs.flush()

    @property
    def can_run(self) -> bool:
        """Whether the engine is awake and has weights."""
        return not self.sleep_manager.asleep and self.serving.problem is None

    @property
    def is_held(self) -> bool:
        """Whether a pause, sleep or lost weights keep all steps from running."""
        return not (self.pauses.allows_steps and self.can_run)

    @property
    def starts_requests(self) -> bool:
        """Whether new requests start as soon as there is room."""
        return self.pauses.mode is None and self.can_run

    @property
    def can_step(self) -> bool:
        """Whether there is work, and it may run."""
        return not self.is_held and self.scheduler.has_work and self.steps_left != 0

    # ------------------------------------------------------------------ requests come and go

    def check_can_serve(self, request: Request) -> None:
        """Finds the request's adapter slot; refuses it if it needs a forbidden compilation."""
        if self.runner.programs.is_sealed:
            self.warmup.check(request)
        request.adapter = self.serving.adapters.find(request.lora)

    def take_in(self, request: Request, answer: Answer) -> None:
        """Queues a checked request; the caller adds its group."""
        self.outputs.add(request, answer)
        self.scheduler.add(request)
        if self._speculator is not None:
            self._speculator.add(request)
        self.counters.num_requests += 1

    def hand_over(self, count: int) -> tuple[list[Request], list[Answer]]:
        """Gives up the newest requests that have not started, for another engine to take."""
        requests = self.scheduler.waiting.take_newest(count)
        self.counters.num_requests -= len(requests)
        if self._speculator is not None:
            for request in requests:
                self._speculator.hand_over(request)
        return requests, [self.outputs.hand_over(request) for request in requests]

    def find(self, name: str) -> list[Request]:
        """The unfinished requests with an id: one request, or the samples of a prompt."""
        found = self.outputs.find(name)
        if found is not None:
            return [found]
        return [request for request in self.scheduler.requests() if request.group == name]

    def end(self, requests: Iterable[Request], reason: FinishReason) -> int:
        """Ends and answers the unfinished ones of these requests; returns their number."""
        ended = [request for request in requests if self.outputs.holds(request)]
        reader = self.runner.routed_reader
        if reason.type != "error" and reader is not None and self.runner.kv_memory.is_allocated:
            reader.read_before_end(ended)
        for request in ended:
            self.scheduler.finish(request, reason)
            self.outputs.finish(request)
        return len(ended)

    def _finished(self, request: Request, failure: EngineError | None, now_s: float) -> None:
        self.groups.finish(request, failure)
        if self._speculator is not None:
            self._speculator.finish(request)
        self.counters.num_nonfinite_requests += isinstance(failure, NonFiniteLogitsError)
        self.stats.finished(request, now_s)

    def fail_all(self, error: EngineError) -> None:
        """Ends all requests with copies of an error."""
        for request in self.scheduler.requests():
            self.outputs.fail(request, type(error)(str(error)))
            self.end([request], FinishReason("error", message=str(error)))

    def retract_all(self, adapter: int | None = None) -> None:
        """Retracts running requests: all, or those of an adapter."""
        for request in [r for r in self.scheduler.running if adapter in (None, r.adapter)]:
            self.scheduler.retract(request)
            self.stats.retracted([request])

    def lose_kv(self) -> None:
        """Retracts all requests and resets the cache, after all keys and values were lost."""
        self.pool.reset_cache()
        self.retract_all()

    # ------------------------------------------------------------------ pauses

    def apply_pause_mode(self, mode: PauseMode, adapter: int | None = None) -> None:
        """Ends, retracts or keeps requests (of one adapter's slot), as a pause or update says."""
        if mode == "abort":
            reason = FinishReason("abort", message="generation was paused, or weights changed")
            requests = self.scheduler.requests()
            self.end([each for each in requests if adapter in (None, each.adapter)], reason)
        elif mode == "retract":
            self.retract_all(adapter)

    def settle(self) -> None:
        if self.scheduler.num_started:
            return
        self.outputs.flush()
        if self.pauses.has_pauses:
            self.runner.kv_memory.wait()
        for drain in self.pauses.pop_all():
            self.drained(drain)
        self.set_admission()

    def drained(self, drain: PendingDrain) -> None:
        """Answers a caller that waited for started requests, of which none is left."""
        if not drain.is_pause:
            self.pauses.is_drained = True
        resolve(drain.future, None)

    def end_drain(self) -> None:
        self.pauses.end_update()
        self.set_admission()

    def refuse_if_held(self) -> None:
        """Refuses the callers that wait for started requests, if these cannot finish."""
        num_started = self.scheduler.num_started
        if num_started and self.is_held:
            holder = f"pause_generation({self.pauses.mode!r})"
            if not self.can_run:
                holder = "sleep" if self.sleep_manager.asleep else "the want of weights"
            self.pauses.refuse(num_started, f"{holder} keeps them from finishing")
        self.set_admission()

    def set_admission(self) -> None:
        """Has the scheduler start new requests, or not, after the pauses changed."""
        self.scheduler.admits_new = not self.pauses.holds_new_requests

    # ------------------------------------------------------------------ state

    def check_awake(self) -> None:
        if self.sleep_manager.asleep:
            raise EngineStateError(
                f"the engine sleeps ({list(self.sleep_manager.asleep)}); wake_up first"
            )
        self.serving.check()

    def check_takes_requests(self) -> None:
        """Raises EngineStateError when requests are refused; in sleep they wait unless told."""
        if self.sleep_manager.refuses_requests:
            self.check_awake()
        if "weights" not in self.sleep_manager.asleep:
            self.serving.check()

    def state(self) -> EngineState:
        size, scheduler, asleep = self.pool.page_size, self.scheduler, self.sleep_manager.asleep
        windows, states = self.pool.windows, self.pool.states
        return EngineState(
            running_batch_size=len(scheduler.running),
            waiting_queue_size=len(scheduler.waiting),
            num_prefilling=sum(r.num_computed < r.kv_len for r in scheduler.running),
            running_rids=tuple(r.rid for r in scheduler.running),
            waiting_rids=tuple(r.rid for r in scheduler.waiting),
            pause_mode=self.pauses.mode,
            asleep=asleep,
            host_bytes=self.sleep_manager.host_bytes,
            has_weights="weights" not in asleep and self.serving.problem is None,
            available_kv_tokens=self.pool.num_available * size,
            cached_kv_tokens=self.pool.num_cached * size,
            total_kv_tokens=self.pool.num_pages * size,
            held_window_tokens=windows.num_held * size if windows is not None else 0,
            free_state_slots=0 if states is None else states.num_available,
            kept_states=0 if states is None else states.num_kept,
            is_kv_allocated=self.runner.kv_memory.is_allocated,
            weight_version=self.serving.version,
            adapters=self.serving.adapters.names,
            new_token_ratio=scheduler.policy.new_token_ratio,
            init_new_token_ratio=scheduler.policy.init_new_token_ratio,
            forward_ct_decode=self.stats.num_decodes,
            num_compiles=self.runner.programs.num_compiles,
            compile_s=self.runner.programs.compile_s,
            memory=self._memory,
            counters=self.stats.totals(),
        )

    def check_integrity(self) -> None:
        self.scheduler.check_integrity()
        self.outputs.check_integrity(self.scheduler.requests())

    def close(self, make_error: Callable[[], EngineError]) -> None:
        """Answers what is finished, refuses the rest with errors of its own, frees all memory."""
        self.outputs.close(make_error)
        for request in self.scheduler.requests():
            request.status = RequestStatus.FINISHED
        self.pauses.close(make_error)
        self.sleep_manager.release()
        self.serving.release()
        self.runner.release()
