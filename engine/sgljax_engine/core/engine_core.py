"""What the engine thread does with requests, weights and the cache. Engine thread only."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from sgljax_engine.cache.pool import PagePool
from sgljax_engine.core import commands as cmd
from sgljax_engine.core.adapters import AdapterRegistry
from sgljax_engine.core.request_groups import RequestGroups
from sgljax_engine.core.sleep import SleepManager
from sgljax_engine.core.stats import DispatchTimes, Stats
from sgljax_engine.errors import (
    CompileForbiddenError,
    EngineError,
    EngineStateError,
    EngineStepError,
    InvalidRequestError,
    WeightsLostError,
    WeightSyncError,
    forget_locals,
)
from sgljax_engine.io_struct import SLEEP_TAGS, FlushCacheReqOutput, PauseMode, SleepTag
from sgljax_engine.observability.metrics import EngineState, MemoryReport
from sgljax_engine.observability.trace import ENGINE_TRACK, Recorder
from sgljax_engine.processing.detokenizer import Answer, Detokenizer, reject
from sgljax_engine.processing.output_processor import OutputProcessor
from sgljax_engine.runner.host_arrays import to_device
from sgljax_engine.runner.runner import ModelRunner
from sgljax_engine.scheduler.scheduler import Scheduler
from sgljax_engine.types import (
    FinishReason,
    PromptLogprobs,
    Request,
    RequestStatus,
    SchedulerOutput,
    StepOutput,
)
from sgljax_engine.weights.adapters import slots_of
from sgljax_engine.weights.digest import WeightsDigest

logger = logging.getLogger(__name__)


class EngineCore:
    """Scheduler, runner and the answers that callers wait for.

    Attributes:
        weight_version: Of the weights that serve. Any thread may read it.
        scheduler, pool, runner, sleep_manager, detokenizer, outputs, groups: The parts. Any
            thread may read `sleep_manager.asleep`.
        counters, stats: Totals; and who keeps them.
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        pool: PagePool,
        runner: ModelRunner,
        memory: MemoryReport,
        detokenizer: Detokenizer,
        recorder: Recorder,
        adapters: AdapterRegistry,
    ) -> None:
        """Starts idle.

        Args:
            scheduler: Fresh, over `pool`.
            pool: The pages.
            runner: Holds weights and pages.
            memory: What weights and pages take.
            detokenizer: Answers requests.
            recorder: Notes what is done.
            adapters: Those that the weights hold.
        """
        self.weight_version = 0
        self.adapters = adapters
        self.scheduler = scheduler
        self.pool = pool
        self.runner = runner
        self.sleep_manager = SleepManager(runner, pool)
        self.stats = Stats(scheduler, pool, recorder)
        self.counters = self.stats.counters
        self._memory = memory
        self.detokenizer = detokenizer
        self.outputs = OutputProcessor(detokenizer)
        self.groups = RequestGroups()
        self._weights_problem: str | None = None
        self._digest: tuple[int, WeightsDigest] | None = None
        self._num_decodes = 0

    # ------------------------------------------------------------------ requests come and go

    def add(self, requests: list[Request], answers: list[Answer]) -> None:
        """Queues requests together: all of them, unless an id is taken or there are no weights."""
        names = dict.fromkeys(name for request in requests for name in (request.group, request.rid))
        taken = [name for name in names if self.groups.has_name(name)]
        if not taken and len({request.rid for request in requests}) < len(requests):
            taken = list(names)  # an id that looks like one of another prompt's samples
        accepted: list[Request] = []
        for request, answer in zip(requests, answers, strict=True):
            try:
                if taken:  # an error each: raised on two threads, one would mix up their frames
                    raise InvalidRequestError(f"rid {taken[0]!r} is the id of another request")
                self.check_takes_requests()
                self.runner.check_warm(request)
                request.adapter = self.adapters.find(request.lora)
            except (CompileForbiddenError, EngineStateError, InvalidRequestError) as error:
                reject(answer.future, error)
                continue
            accepted.append(request)
            self.outputs.add(request, answer)
            self.scheduler.add(request)
            self.counters.num_requests += 1
        self.groups.add(accepted)

    def find(self, name: str) -> list[Request]:
        """The unfinished requests of an id: of one request, or of a prompt's samples."""
        found = self.scheduler.find(name)
        if found is not None:
            return [found]
        return [request for request in self.scheduler.requests() if request.group == name]

    def end(self, requests: Iterable[Request], reason: FinishReason) -> int:
        """Ends those of these requests that are unfinished and answers them; returns how many."""
        ended = [r for r in requests if self.scheduler.find(r.rid) is r]
        for request in ended:
            self.scheduler.finish(request, reason)
            self._deliver(request)
        return len(ended)

    def fail_all(self, error: EngineError) -> None:
        """Ends all requests with copies of an error."""
        for request in self.scheduler.requests():
            self.outputs.fail(request, type(error)(str(error)))
            self.end([request], FinishReason("error", message=str(error)))

    def retract_all(self, adapter: int | None = None) -> None:
        """Sends running requests, all or an adapter's, back to the queue, without their pages."""
        for request in [r for r in self.scheduler.running if adapter in (None, r.adapter)]:
            self.scheduler.retract(request)
            self.stats.retracted([request])

    def apply_pause_mode(self, mode: PauseMode, adapter: int | None = None) -> None:
        """Does to the requests what a pause, or an update, of this mode does.

        Args:
            mode: Of the pause or update.
            adapter: Slot of an adapter whose requests alone are meant; None for all.
        """
        if mode == "abort":
            reason = FinishReason("abort", message="generation was paused, or weights changed")
            self.end([r for r in self.scheduler.requests() if adapter in (None, r.adapter)], reason)
        elif mode == "retract":
            self.retract_all(adapter)

    # ------------------------------------------------------------------ state

    def state(self, pause_mode: PauseMode | None) -> EngineState:
        """One consistent look."""
        size, scheduler = self.pool.page_size, self.scheduler
        return EngineState(
            running_batch_size=len(scheduler.running),
            waiting_queue_size=len(scheduler.waiting),
            num_prefilling=sum(r.num_computed < r.kv_len for r in scheduler.running),
            running_rids=tuple(r.rid for r in scheduler.running),
            waiting_rids=tuple(r.rid for r in scheduler.waiting),
            pause_mode=pause_mode,
            asleep=self.sleep_manager.asleep,
            host_bytes=self.sleep_manager.host_bytes,
            has_weights="weights" not in self.sleep_manager.asleep
            and self._weights_problem is None,
            available_kv_tokens=self.pool.num_available * size,
            cached_kv_tokens=self.pool.num_cached * size,
            total_kv_tokens=self.pool.num_pages * size,
            is_kv_allocated=self.runner.is_kv_allocated,
            weight_version=self.weight_version,
            adapters=self.adapters.names,
            new_token_ratio=scheduler.policy.new_token_ratio,
            forward_ct_decode=self._num_decodes,
            num_compiles=self.runner.programs.num_compiles,
            compile_s=self.runner.programs.compile_s,
            memory=self._memory,
            counters=self.stats.totals(),
        )

    def flush_cache(self) -> FlushCacheReqOutput:
        """Empties the prefix cache and resets scheduling, unless requests hold pages."""
        num_running = len(self.scheduler.running)
        if num_running:
            return FlushCacheReqOutput(
                success=False,
                error_msg=f"{num_running} running request(s) hold KV pages; "
                "pause_generation(mode='retract') or 'abort' first",
            )
        flushed = self.pool.num_cached * self.pool.page_size
        self.pool.reset_cache()
        self.scheduler.reset_policy()
        self._num_decodes = 0
        return FlushCacheReqOutput(success=True, flushed_items=flushed)

    def release_kv(self) -> int:
        """Gives the memory of the KV cache back; returns its bytes."""
        num_running = len(self.scheduler.running)
        if num_running:
            raise EngineStateError(
                f"the KV cache cannot be released: {num_running} running request(s) hold pages; "
                "pause_generation(mode='retract') or 'abort' first"
            )
        self.pool.reset_cache()
        return self.runner.release_kv()

    def sleep(self, command: cmd.Sleep) -> int:
        """Gives the devices' memory back; returns its bytes. What fails changes nothing."""
        if self.sleep_manager.asleep == SLEEP_TAGS:
            logger.warning("sleep: the engine sleeps already; nothing was changed")
            return 0
        started = time.perf_counter()
        keeps_all = command.preserve_state
        if command.level == 2 and not keeps_all and self.adapters.names:
            raise EngineStateError(
                "sleep(level=2) would give up the adapters "
                f"{', '.join(map(repr, self.adapters.names))} with the weights: unload them "
                "before, or sleep with level=1"
            )
        self.runner.wait()
        kept = self.sleep_manager.keep(weights=keeps_all or command.level == 1, pages=keeps_all)
        if not keeps_all and "kv_cache" not in self.sleep_manager.asleep:
            self.retract_all()
            self.pool.reset_cache()
        if self._digest is not None and not self._digest[1].is_made:
            self._digest = None  # it would keep the weights
        num_bytes = self.sleep_manager.sleep(kept, refuses_requests=command.refuse_requests)
        self.counters.num_sleeps += 1
        self.counters.sleep_s += time.perf_counter() - started
        self.stats.recorder.begin("asleep", {"level": command.level})
        return num_bytes

    def wake_up(self, tags: Sequence[SleepTag]) -> int:
        """Takes the memory of those tags that sleep; returns its bytes. What fails sleeps on."""
        asleep: list[SleepTag] = [tag for tag in self.sleep_manager.asleep if tag in tags]
        if not asleep:
            logger.warning("wake_up: %s is awake; nothing was changed", list(tags))
            return 0
        started = time.perf_counter()
        num_bytes = self.sleep_manager.wake_up(asleep)
        if not self.runner.weights and "weights" not in self.sleep_manager.asleep:
            # Not if a failed update lost them before.
            self._weights_problem = self._weights_problem or "sleep(level=2) gave them up"
            logger.warning("wake_up: the engine has no weights until update_weights succeeds")
        self.counters.wake_s += time.perf_counter() - started
        if not self.sleep_manager.asleep:
            self.stats.recorder.end("asleep")
        return num_bytes

    @property
    def holds_weights(self) -> bool:
        """Whether there are weights, on the devices or on the host."""
        return bool(self.runner.weights) or self.sleep_manager.keeps_weights

    @property
    def can_run(self) -> bool:
        """Whether weights and pages are there, or can be."""
        return not self.sleep_manager.asleep and self._weights_problem is None

    def warmup(self, command: cmd.Warmup) -> int:
        """Compiles and runs all buckets; returns how many were new."""
        try:
            return self.runner.warmup(
                include_score=command.include_score,
                include_table=command.include_table,
                progress=command.progress,
            )
        except BaseException:
            if self.runner.recover_kv():  # a program that failed had taken the pages
                self.lose_kv()
            raise

    def lose_kv(self) -> None:
        """Everybody's keys and values are gone."""
        self.pool.reset_cache()
        self.retract_all()

    # ------------------------------------------------------------------ weights

    def swap_weights(self, command: cmd.SwapWeights | cmd.SwapAdapter) -> int:
        """Serves other weights, or another adapter, from the next dispatch on; returns the version.

        Whatever fails leaves weights and requests as they were, but for a donating update. Weights
        that sleep are awake afterwards.
        """
        num_running = len(self.scheduler.running)
        if command.flush_cache and command.mode == "in_place" and num_running:
            raise EngineStateError(
                f"flush_cache=True with mode='in_place': {num_running} running request(s) would "
                "go on with keys and values of the old weights"
            )
        started = time.perf_counter()
        try:
            if isinstance(command, cmd.SwapAdapter):
                self._swap_adapter(command)
            else:
                self.runner.swap_weights(self._with_adapters(command.build(self.runner.weights)))
        except WeightsLostError as error:
            if self.sleep_manager.keeps_weights:  # on the host, where nothing was taken apart
                raise WeightSyncError(str(error)) from error
            self._weights_problem = str(error)
            self.runner.swap_weights({})
            self.adapters.clear()
            self.fail_all(EngineStateError(self._weights_problem))
            raise
        self.sleep_manager.weights_came()
        if not self.sleep_manager.asleep:
            self.stats.recorder.end("asleep")
        self.weight_version += 1
        self._digest = None
        self._weights_problem = None
        self._forget_computed(command)
        self.counters.num_weight_updates += 1
        ended = time.perf_counter()
        self.counters.update_s += ended - started
        if self.stats.recorder.is_on:
            args = {"weight_version": self.weight_version, "mode": command.mode}
            self.stats.recorder.slice(ENGINE_TRACK, "swap weights", started, ended, args)
        return self.weight_version

    def _forget_computed(self, command: cmd.SwapWeights | cmd.SwapAdapter) -> None:
        """Nothing that other weights, or another adapter, computed is ever matched again.

        Pages of requests that run on are theirs alone from now on, since the cache takes no page
        from before its reset.
        """
        # "wait" found nobody to wait for, or no weights to wait under.
        mode: PauseMode = "retract" if command.mode == "wait" else command.mode
        if isinstance(command, cmd.SwapAdapter):
            slot = self.adapters.find(command.name)
            self.pool.reset_cache(slot)
        else:
            slot = None
            self.pool.reset_cache()
        self.apply_pause_mode(mode, slot)
        for request in self.scheduler.waiting:
            if not request.output_ids and slot in (None, request.adapter):
                request.prompt_logprobs = None  # scored when it starts again

    def _swap_adapter(self, command: cmd.SwapAdapter) -> None:
        """Puts an adapter into its slot; weights that sleep on the host are woken for it."""
        if not self.holds_weights:
            raise EngineStateError(
                "the engine has no weights to load an adapter beside: update_weights first"
            )
        slot = self.adapters.reserve(command.name)
        made = command.build(self._serving_slots(), slot)
        if not self.runner.weights:
            self.wake_up(["weights"])
        self.runner.swap_weights(self.runner.weights | made)
        self.adapters.add(command.name, slot)

    def differing_adapter(
        self, name: str, build: Callable[[cmd.Weights, int], cmd.Weights]
    ) -> list[str]:
        """Names of projections whose A or B is not what `build` makes for an adapter's slot."""
        serving = slots_of(self.runner.weights)
        made = build(serving, self.adapters.find(name))
        differing = [each for each, x in made.items() if not bool((x == serving[each]).all())]
        return sorted({each.rsplit(".", 1)[0] for each in differing})

    def _with_adapters(self, weights: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """New weights with the adapters that serve, wherever those are."""
        return dict(weights) | (self._serving_slots() or self.runner.empty_slots())

    def _serving_slots(self) -> dict[str, jax.Array]:
        """The adapters' A and B on the devices, where weights that sleep have them on the host."""
        return slots_of(self.runner.weights) or to_device(slots_of(self.sleep_manager.kept_weights))

    def unload_adapter(self, name: str) -> None:
        """Gives an adapter's slot back.

        Raises:
            InvalidRequestError: for an adapter that is not loaded.
            EngineStateError: while requests use it.
        """
        slot = self.adapters.find(name)
        users = [request for request in self.scheduler.requests() if request.adapter == slot]
        if users:
            raise EngineStateError(
                f"adapter {name!r} cannot be unloaded: {len(users)} unfinished request(s) use it, "
                f"{users[0].rid!r} among them"
            )
        self.pool.reset_cache(slot)
        self.adapters.remove(name)

    @property
    def weights_digest(self) -> WeightsDigest:
        """Of the weights that serve: one object for each version that is known."""
        if self._digest is None or self._digest[0] != self.weight_version:
            if not self.holds_weights:
                return WeightsDigest(None)
            asleep = self.sleep_manager.kept_weights
            digest = WeightsDigest(self.runner.checksum_weights(asleep))
            self._digest = (self.weight_version, digest)
        return self._digest[1]

    def raise_weight_version(self, version: int) -> None:
        """Calls the weights that serve by a higher version, if it is higher."""
        if version > self.weight_version:
            if self._digest is not None and self._digest[0] == self.weight_version:
                self._digest = (version, self._digest[1])
            self.weight_version = version

    def check_awake(self) -> None:
        """Raises EngineStateError while the engine sleeps, and when it has lost its weights."""
        if self.sleep_manager.asleep:
            raise EngineStateError(
                f"the engine sleeps ({list(self.sleep_manager.asleep)}); wake_up first"
            )
        self._check_weights()

    def check_takes_requests(self) -> None:
        """Raises EngineStateError when requests are refused.

        Requests that come while the engine sleeps wait, unless `sleep` was told otherwise.
        """
        if self.sleep_manager.refuses_requests:
            self.check_awake()
        if "weights" not in self.sleep_manager.asleep:
            self._check_weights()

    def _check_weights(self) -> None:
        if self._weights_problem is not None:
            raise EngineStateError(
                f"the engine has no weights until update_weights succeeds: {self._weights_problem}"
            )

    # ------------------------------------------------------------------ one dispatch

    def step(self) -> None:
        """Schedules, dispatches and notes one step; there must be work."""
        output = self.scheduler.schedule()
        self.stats.retracted(output.retracted)
        if output.is_empty:
            raise EngineStepError("the scheduler has requests but nothing to run")
        try:
            step, times = self._dispatch(output)
        except Exception as error:  # fails these requests; the thread lives on
            self._fail_step(output, error)
            return
        for request in _touched(output):
            request.num_cache_misses += step.num_cache_misses
        self.stats.stepped(output, step, times)
        self._num_decodes += bool(output.decode)
        for request in self.scheduler.update(output, step):
            self._deliver(request)
        for request in output.started:
            failure = self.outputs.failure(request)
            if failure is not None:
                self.end([request], FinishReason("error", message=str(failure)))
        for request in output.decode:
            if request.is_watched:
                self.outputs.has_tokens(request)

    def _dispatch(self, output: SchedulerOutput) -> tuple[StepOutput, DispatchTimes]:
        compiles = self.runner.programs.num_compiles
        started = time.perf_counter()
        if any(request.logprob_options.start_len >= 0 for request in output.started):
            self.outputs.hand_over()  # scoring waits for the device, prompt by prompt
            self._score_prompts(output.started)
        scored = time.perf_counter()
        if output.prefill:
            self.runner.prefill(output.prefill)
        if output.copies:
            self.runner.copy_pages(output.copies)
        if self.stats.recorder.is_on and output.decode:
            self.runner.check_kv()  # else the prefill's time on the device would be the decode's
        prefilled = time.perf_counter()
        pending = self.runner.decode(output) if output.decode else None
        self.outputs.hand_over()
        if pending is None:
            # Prefills that queue up on the device could not be paused.
            self.runner.check_kv()
        rows = [] if pending is None else pending.wait()
        decoded = time.perf_counter()
        compiles = self.runner.programs.num_compiles - compiles
        dispatch_s = None if compiles else decoded - scored
        step = StepOutput(rows, self.weight_version, compiles, dispatch_s)
        return step, DispatchTimes(started, scored, prefilled, decoded)

    def _score_prompts(self, started: list[Request]) -> None:
        """Prompt log-probs for those that ask, each prompt once. A failure is theirs alone."""
        done: dict[Any, PromptLogprobs] = {}
        for request in started:
            if request.logprob_options.start_len < 0 or request.prompt_logprobs is not None:
                continue
            key = (tuple(request.prompt_ids), request.logprob_options)
            try:
                if key not in done:
                    done[key] = self.runner.score_prompt(request)
                request.prompt_logprobs = done[key]
            except Exception as error:  # no pages were donated: the step can go on
                logger.exception("scoring a prompt failed")
                forget_locals(error)
                failure = EngineStepError(f"scoring the prompt of {request.rid} failed: {error!r}")
                failure.__cause__ = error
                self.outputs.fail(request, failure)

    def _deliver(self, request: Request) -> None:
        now_s = time.perf_counter()
        self.groups.finish(request, self.outputs.failure(request))
        self.counters.num_finished += 1
        self.counters.e2e_latency_s += now_s - request.arrival_s
        self.counters.num_aborted += request.finish is not None and request.finish.type == "abort"
        self.outputs.finished(request, now_s)

    def _fail_step(self, output: SchedulerOutput, error: Exception) -> None:
        """Ends the requests that the step touched; others keep going."""
        logger.exception("a device step failed")
        forget_locals(error)
        self.outputs.hand_over()  # what was produced before, while the requests are not ended
        self.counters.num_failed_steps += 1
        # Pages may lack what the step was to write: after this none of them is kept.
        self.pool.reset_cache()
        for request in _touched(output):
            failure = EngineStepError(f"request {request.rid} failed in a device step: {error!r}")
            failure.__cause__ = error
            self.outputs.fail(request, failure)
            self.end([request], FinishReason("error", message=repr(error)))
        self.outputs.hand_over()
        # A step that failed after it took the donated pages took everybody's keys and values.
        if self.runner.recover_kv():
            self.retract_all()

    # ------------------------------------------------------------------ the end

    def close(self, make_error: Callable[[], EngineError]) -> None:
        """Answers what is finished, refuses the rest with errors of its own, frees all memory."""
        self.outputs.close(make_error)
        for request in self.scheduler.requests():
            request.status = RequestStatus.FINISHED
        self.sleep_manager.release()
        self._digest = None
        self.runner.release()


def _touched(output: SchedulerOutput) -> list[Request]:
    """The requests that a dispatch works on, each once."""
    touched = [*output.decode, *(chunk.request for chunk in output.prefill), *output.started]
    return list({request.rid: request for request in touched}.values())
