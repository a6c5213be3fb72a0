"""Counts what the engine thread does and records it on request. Engine thread only."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable

from sgljax_engine.cache.pool import PagePool
from sgljax_engine.io_struct import PauseMode
from sgljax_engine.observability.metrics import EngineCounters
from sgljax_engine.observability.trace import ENGINE_TRACK, RecordedSample, Recorder
from sgljax_engine.scheduler.scheduler import Scheduler
from sgljax_engine.types import Request, SchedulerOutput, StepOutput, StepTimes


class Stats:
    """Totals, in which a pause that still lasts is missing, and the recorder.

    `num_decodes` counts decode dispatches since the cache was flushed.
    """

    def __init__(self, scheduler: Scheduler, pool: PagePool, recorder: Recorder) -> None:
        self.counters = EngineCounters()
        self.recorder = recorder
        self._scheduler = scheduler
        self._pool = pool
        self._paused_s: float | None = None
        self.num_decodes = 0

    def totals(self) -> EngineCounters:
        """A copy of the counters, a pause that still lasts included."""
        totals = copy.copy(self.counters)
        if self._paused_s is not None:
            totals.pause_s += time.perf_counter() - self._paused_s
        return totals

    def stepped(self, output: SchedulerOutput, step: StepOutput) -> None:
        counters, times = self.counters, step.times
        assert times is not None
        if step.num_cache_misses:
            for request in output.touched:
                request.num_cache_misses += step.num_cache_misses
        self._stamp_first_tokens(output, step)
        self.num_decodes += bool(output.decode)
        num_prefilled = sum(chunk.num_tokens for chunk in output.prefill)
        num_tokens = sum(len(row.token_ids) for row in step.rows)
        counters.prefill_s += times.prefilled_s - times.started_s
        counters.decode_s += times.decoded_s - times.prefilled_s
        counters.num_dispatches += 1
        counters.num_decode_rows += len(output.decode)
        counters.max_decode_batch = max(counters.max_decode_batch, len(output.decode))
        self._count_rows(len(output.decode), times.decoded_s - times.started_s)
        counters.num_prefill_tokens += num_prefilled
        counters.num_cached_tokens += sum(
            request.num_cached for request in output.started if request.num_retractions == 0
        )
        counters.num_page_copies += len(output.copies)
        counters.num_output_tokens += num_tokens
        if step.num_draft_steps is not None:
            self._count_drafts(step, num_tokens)
        pool = self._pool
        counters.used_kv_tokens += (pool.num_pages - pool.num_available) * pool.page_size
        if self.recorder.is_on:
            self._record(output, step, times, num_prefilled, num_tokens)

    def _count_rows(self, num_rows: int, seconds: float) -> None:
        num_idle = max(self._scheduler.max_running_requests - num_rows, 0)
        self.counters.row_s += num_rows * seconds
        self.counters.idle_row_s += num_idle * seconds
        if num_idle and not self._scheduler.waiting:
            self.counters.tail_s += seconds

    def _count_drafts(self, step: StepOutput, num_tokens: int) -> None:
        counters = self.counters
        counters.num_verify_steps += step.num_steps
        counters.num_verified_tokens += num_tokens
        for row in step.rows:
            if row.drafts is None:
                continue
            # A pass gives a token of the model's own, but for one that a right draft ends.
            sources = row.drafts.sources
            counters.num_verify_rows += sources.count(0) + (row.stopped and sources[-1] > 0)
            history, siblings, own = row.drafts.num_drafted
            counters.num_drafted_history += history
            counters.num_drafted_siblings += siblings
            counters.num_drafted_ngram += own
            history, siblings, own = row.drafts.num_right
            counters.num_accepted_history += history
            counters.num_accepted_siblings += siblings
            counters.num_accepted_ngram += own

    def finished(self, request: Request, now_s: float) -> None:
        """Counts a finished request; the time is one of `time.perf_counter`."""
        self.counters.num_finished += 1
        self.counters.e2e_latency_s += now_s - request.arrival_s
        self.counters.num_aborted += request.finish is not None and request.finish.type == "abort"

    def retracted(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self.counters.num_retractions += 1
            if self.recorder.is_on:
                args = {"rid": request.rid, "tokens": request.num_tokens}
                self.recorder.instant(ENGINE_TRACK, "retract", args)

    def swapped(self, started_s: float, weight_version: int, mode: PauseMode) -> None:
        ended_s = time.perf_counter()
        self.counters.num_weight_updates += 1
        self.counters.update_s += ended_s - started_s
        if self.recorder.is_on:
            args = {"weight_version": weight_version, "mode": mode}
            self.recorder.slice(ENGINE_TRACK, "swap weights", started_s, ended_s, args)

    def paused(self, mode: PauseMode) -> None:
        if self._paused_s is None:
            self.counters.num_pauses += 1
            self._paused_s = time.perf_counter()
            self.recorder.begin("pause", {"mode": mode})

    def continued(self) -> None:
        if self._paused_s is not None:
            self.counters.pause_s += time.perf_counter() - self._paused_s
            self._paused_s = None
            self.recorder.end("pause")

    def _stamp_first_tokens(self, output: SchedulerOutput, step: StepOutput) -> None:
        now = time.perf_counter()
        for request, row in zip(output.decode, step.rows, strict=True):
            if request.first_token_s is None and row.token_ids:
                request.first_token_s = now
                self.counters.num_first_tokens += 1
                self.counters.time_to_first_token_s += now - request.arrival_s

    def _record(
        self,
        output: SchedulerOutput,
        step: StepOutput,
        times: StepTimes,
        num_prefilled: int,
        num_tokens: int,
    ) -> None:
        slice_, scheduler = self.recorder.slice, self._scheduler
        if times.scored_s - times.started_s > 1e-5:  # else nobody asked for prompt log-probs
            slice_(ENGINE_TRACK, "score prompts", times.started_s, times.scored_s, {})
        prefilled_s = times.prefilled_s if output.decode else times.decoded_s
        if output.prefill or output.copies:
            args = {"rows": len(output.prefill), "tokens": num_prefilled}
            args["page_copies"] = len(output.copies)
            slice_(ENGINE_TRACK, "prefill", times.scored_s, prefilled_s, args)
        if output.decode:
            args = {"rows": len(output.decode), "steps": output.num_steps, "tokens": num_tokens}
            args["weight_version"] = step.weight_version
            if step.num_draft_steps is not None:
                found = [row.drafts for row in step.rows if row.drafts is not None]
                args["steps"] = step.num_steps
                args["drafted"] = sum(sum(each.num_drafted) for each in found)
                args["accepted"] = sum(sum(each.num_right) for each in found)
            slice_(ENGINE_TRACK, "decode", prefilled_s, times.decoded_s, args)
        self.recorder.sample(
            RecordedSample(
                times.decoded_s,
                len(scheduler.running),
                len(scheduler.waiting),
                self._pool.num_available * self._pool.page_size,
                step.weight_version,
                self.counters.num_output_tokens,
            )
        )
