"""The continuous-batching scheduler: pure host code, driven by the engine thread alone.

`schedule()` plans one dispatch; `update()` takes what it produced. Between the two the device
runs. Requests join and leave the running batch at every call.

`config.schedule_policy` says in which order requests start, see `scheduler.waiting`. When KV
pages run out, the youngest running requests are retracted: their pages are given to the cache, or
freed, and they return to the queue, where they are next. Later their prompt and output so far are
prefilled again, but for what the cache still has. The oldest running request always keeps its
pages, so every request that fits the pool alone finishes in the end.

Pages with the same tokens are computed once and shared. A prefill's pages can be shared as soon as
it is planned: chunks run in planned order, and of chunks that run together each layer writes all
keys before any token reads them. So the chunks must not be sorted. A prompt in chunks takes the
whole budget of each dispatch until its last chunk. So requests with the same beginning wait for it,
and then find its pages.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Iterable, Mapping, Sequence

from sgljax_engine.cache.pool import PagePool
from sgljax_engine.cache.radix import PrefixHandle
from sgljax_engine.config import SchedulerConfig
from sgljax_engine.errors import EngineError, NonFiniteLogitsError
from sgljax_engine.scheduler.lengths import AnswerLengths
from sgljax_engine.scheduler.policy import AdmissionPolicy, DispatchPacer
from sgljax_engine.scheduler.speculator import Speculator
from sgljax_engine.scheduler.waiting import WaitingQueue, make_start_order
from sgljax_engine.speculation.plan import TOKENS_PER_STEP
from sgljax_engine.types import (
    NO_STATE,
    FinishReason,
    PageCopy,
    PrefillChunk,
    Request,
    RequestStatus,
    SchedulerOutput,
    StepChanges,
    StepOutput,
)

_ROWS_PER_ADMISSION = 16
"""Rows of a dispatch for each one that may end early: dispatches cost time, and so do idle rows."""

_GUIDED_STEPS = 4
"""Most steps of a dispatch in which a row follows a grammar. Such a row takes one step: the others
hold it up, and dispatches of fewer steps cost these more."""


@dataclasses.dataclass(slots=True)
class _Prefill:
    """The prefill of a dispatch while it is planned.

    `budget` is the remaining tokens; `num_tokens` were taken, in whole blocks. `ends` has the
    number of computed tokens that each request gets to.
    """

    budget: int
    num_tokens: int = 0
    chunks: list[PrefillChunk] = dataclasses.field(default_factory=list)
    copies: list[PageCopy] = dataclasses.field(default_factory=list)
    early_copies: list[PageCopy] = dataclasses.field(default_factory=list)
    ends: dict[str, int] = dataclasses.field(default_factory=dict)


class Scheduler:
    """Queues, running batch and what each request does next; only user of the pages in `pool`.

    Invariant (see `check_integrity`): exactly the running requests have pages. They are in order of
    arrival, oldest first. Unless `admits_new`, only started requests go on, retracted ones
    included.

    A chunk costs its length rounded up to whole blocks of `token_block`; `prefill_sizes` waste no
    padding.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        pool: PagePool,
        *,
        token_block: int,
        max_prefill_tokens: int,
        prefill_sizes: Sequence[int],
        speculator: Speculator | None = None,
        lengths: AnswerLengths | None = None,
    ) -> None:
        self._config = config
        self._pool = pool
        self._token_block = token_block
        self._max_prefill_tokens = max_prefill_tokens
        self._num_arrivals = 0
        self._speculator = speculator
        self._lengths = AnswerLengths() if lengths is None else lengths
        self._start_order = make_start_order(config, self._lengths)
        self.admits_new = True
        self.policy = AdmissionPolicy(config)
        self.pacer = DispatchPacer(config, prefill_sizes)
        self.waiting = WaitingQueue()
        self.running: list[Request] = []

    # ------------------------------------------------------------------ queue changes

    def add(self, request: Request) -> None:
        request.arrival = self._num_arrivals
        self._num_arrivals += 1
        self.waiting.append(request)

    def finish(self, request: Request, reason: FinishReason) -> None:
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
            self._pool.release(request)
        elif request.status is RequestStatus.WAITING:
            self.waiting.remove(request)
            self._pool.forget_prefix(request)
        else:
            raise EngineError(f"request {request.rid} finished twice")
        request.status = RequestStatus.FINISHED
        request.finish = reason
        if reason.type in ("stop", "length") and not request.only_prefills:
            self._lengths.add(request.prompt_key, len(request.output_ids))

    def retract(self, request: Request) -> None:
        """Moves a running request back to the waiting queue, without its pages."""
        self.running.remove(request)
        self._pool.release(request)
        request.status = RequestStatus.WAITING
        request.routed = None  # other weights may choose others
        request.num_retractions += 1
        self.waiting.put_back(request)

    def start_over(self, failed: Iterable[Request], reason: FinishReason) -> None:
        """Frees all pages and rebuilds the queues, after a failure that left them in doubt."""
        over = {id(request) for request in failed}
        left = [request for request in self.requests() if id(request) not in over]
        num_running = sum(1 for request in self.running if id(request) not in over)
        num_started = num_running + sum(1 for r in self.waiting.returned if id(r) not in over)
        self._pool.start_over()
        self.running, self.waiting = [], WaitingQueue()
        for request in failed:
            _take_pages(request)
            request.status, request.finish = RequestStatus.FINISHED, reason
        for index, request in enumerate(left):
            _take_pages(request)
            request.num_retractions += index < num_running
            request.status = RequestStatus.WAITING
            if index < num_started:
                self.waiting.put_back(request)
            else:
                self.waiting.append(request)

    def requests(self) -> list[Request]:
        """All unfinished requests, running ones first."""
        return [*self.running, *self.waiting]

    @property
    def max_running_requests(self) -> int:
        return self._config.max_running_requests

    @property
    def num_started(self) -> int:
        return len(self.running) + self.waiting.num_returned

    @property
    def has_work(self) -> bool:
        return bool(self.running or self._num_startable)

    @property
    def _num_startable(self) -> int:
        """Number of waiting requests that may start."""
        return len(self.waiting) if self.admits_new else self.waiting.num_returned

    def _max_finished(self, num_rows: int) -> int | None:
        """Number of rows that may finish before a dispatch ends early for waiting requests."""
        if not self._num_startable:
            return None
        return max(1, min(num_rows // _ROWS_PER_ADMISSION, self._num_startable))

    def reset_policy(self) -> None:
        self.policy = AdmissionPolicy(self._config)

    # ------------------------------------------------------------------ one dispatch

    def schedule(self) -> SchedulerOutput:
        """Plans the next dispatch, and allocates the pages that it writes to."""
        decodable = [r for r in self.running if r.num_computed == r.kv_len]
        num_steps, retracted = self._reserve_decode_pages(decodable)
        plan = _Prefill(self._prefill_budget())
        self._continue_prefill(plan)
        # A retraction in this very call says that pages are short: admit nobody.
        started = [] if retracted else self._admit(plan, num_steps)

        decode = [r for r in self.running if plan.ends.get(r.rid, r.num_computed) == r.kv_len]
        num_steps = min(num_steps, self._most_steps(len(decode), decode, plan.num_tokens))
        drafts = None
        if self._has_prefill_left(plan) or _begins_stream(decode):
            num_steps = 1
        elif self._speculator is not None:
            drafts = self._speculator.plan(decode, num_steps)
        limits = [min(self._room(r), r.num_remaining) for r in decode]
        num_tokens = num_steps
        if drafts is not None:
            num_steps = drafts.max_steps
            num_tokens = self._most_tokens(num_steps)
            limits = [min(limit, num_tokens) for limit in limits]
        for request, limit in zip(decode, limits, strict=True):
            self._pool.open_window(request, request.kv_len + min(num_tokens, limit))
        return SchedulerOutput(
            prefill=plan.chunks,
            copies=plan.copies,
            decode=decode,
            step_limits=limits,
            num_steps=num_steps,
            drafts=drafts,
            prefill_tokens=plan.num_tokens,
            retracted=retracted,
            started=started,
            max_finished=self._max_finished(len(decode)),
            window_pages=None if self._pool.windows is None else self._pool.windows.by_page,
            early_copies=plan.early_copies,
            states=None if self._pool.states is None else self._pool.states.take_copies(),
        )

    def update(self, plan: SchedulerOutput, result: StepOutput) -> StepChanges:
        """Takes the results of a dispatch; finishes requests that stopped, failed or are full."""
        self._pool.settle()
        for chunk in plan.prefill:
            chunk.request.num_computed = chunk.start + chunk.num_tokens
        failures = dict(result.failures)
        for request, row in zip(plan.decode, result.rows, strict=True):
            request.output_ids.extend(row.token_ids)
            request.logprobs.extend(row.logprobs)
            request.scaled_logprobs.extend(row.scaled_logprobs)
            request.processed_logprobs.extend(row.processed_logprobs)
            request.extra_logprobs.extend(row.extra_logprobs)
            request.sampling_masks.extend(row.sampling_masks)
            request.token_versions.extend([result.weight_version] * len(row.token_ids))
            request.num_computed += len(row.token_ids)
            if not row.is_finite:
                failures.setdefault(request.rid, _not_finite(request, result.weight_version))
            elif row.stopped:
                self.finish(request, FinishReason("stop", matched=request.output_ids[-1]))
            elif request.num_remaining == 0:
                self.finish(request, FinishReason("length"))
        for request in self.running:
            self._pool.close_window(request)
        finished = [request for request in plan.decode if request.finish is not None]
        finished += self._finish_failed(plan.touched, failures)
        if plan.decode:
            self.policy.on_decode()
        self.pacer.on_dispatch(plan, result)
        if self._speculator is not None:
            self._speculator.learn(plan, result)
        return StepChanges(finished, plan.decode, failures)

    def _finish_failed(
        self, touched: Iterable[Request], failures: Mapping[str, EngineError]
    ) -> list[Request]:
        """Finishes and returns failed requests that the dispatch has not finished."""
        failed = [r for r in touched if r.rid in failures and r.finish is None]
        for request in failed:
            self.finish(request, FinishReason("error", message=str(failures[request.rid])))
        return failed

    def _most_steps(
        self, num_rows: int, requests: Iterable[Request], prefill_tokens: int = 0
    ) -> int:
        """Most decode steps of a dispatch with this many rows, these requests included."""
        num_steps = self.pacer.num_steps(num_rows, prefill_tokens)
        for request in requests:
            if request.is_watched:
                num_steps = min(num_steps, self._config.stream_interval)
            if request.guide is not None:
                num_steps = min(num_steps, _GUIDED_STEPS)
        return num_steps

    @property
    def _num_rows(self) -> int:
        """Rows that the next dispatch decodes, if no request joins running ones."""
        return len(self.running) or min(len(self.waiting), self._config.max_running_requests)

    def _prefill_budget(self) -> int:
        return min(self.pacer.num_prefill_tokens(self._num_rows), self._max_prefill_tokens)

    # ------------------------------------------------------------------ pages

    def _missing_pages(self, request: Request, num_steps: int) -> int:
        lacking = min(num_steps, request.num_remaining) - self._room(request)
        return self._pool.pages_for(lacking) if lacking > 0 else 0

    def _room(self, request: Request) -> int:
        """Tokens that the request's pages can still take."""
        return len(request.pages) * self._pool.page_size - request.kv_len

    def _most_tokens(self, num_steps: int) -> int:
        most = num_steps * TOKENS_PER_STEP
        # Window pages are counted for steps of one token.
        return most if self._pool.windows is None else min(most, self._config.decode_steps)

    def _reserve_decode_pages(self, decodable: list[Request]) -> tuple[int, list[Request]]:
        """Gives decoding rows pages for as many steps as fit; retracts requests if none fits."""
        num_steps = self._most_steps(self._num_rows, self.running)
        retracted: list[Request] = []
        per_step = 1
        if self._speculator is not None and self._speculator.may_draft(decodable):
            per_step = self._speculator.tokens_per_step
        while True:
            num_tokens = num_steps
            if num_steps > 1:
                num_tokens = min(num_steps * per_step, self._most_tokens(num_steps))
            missing = [self._missing_pages(r, num_tokens) for r in decodable]
            if sum(missing) <= self._pool.num_available:
                break
            if per_step > 1:  # with fewer tokens a dispatch just ends earlier
                per_step = 1
                continue
            if num_steps > 1:
                num_steps //= 2
                continue
            victim = self.running[-1]
            self.policy.on_retract(self.running)
            self.retract(victim)
            retracted.append(victim)
            decodable = [r for r in decodable if r is not victim]
        for request, count in zip(decodable, missing, strict=True):
            self._pool.grow(request, count)
        return num_steps, retracted

    # ------------------------------------------------------------------ prefill

    def _continue_prefill(self, plan: _Prefill) -> None:
        """Next chunks of running requests whose prompt did not fit one dispatch."""
        for request in self.running:
            if request.num_computed < request.kv_len and plan.budget > 0:
                self._add_chunk(plan, request)

    def _has_prefill_left(self, plan: _Prefill) -> bool:
        """Whether the budget or a kept state ends this prefill, so that more rows decode soon."""
        has_place = self._num_startable and len(self.running) < self._config.max_running_requests
        unfinished = (r for r in self.running if plan.ends.get(r.rid, r.num_computed) < r.kv_len)
        return any(unfinished) or bool(plan.budget <= 0 and has_place)

    def _add_chunk(self, plan: _Prefill, request: Request) -> None:
        start, branch = request.num_computed, self._pool.branch(request)
        num_tokens = min((branch or request.kv_len) - start, plan.budget)
        num_shared = self._pool.num_shared(request)
        chunk = PrefillChunk(request, start, num_tokens, tuple(request.pages), num_shared)
        plan.chunks.append(chunk)
        cost = -(-num_tokens // self._token_block) * self._token_block
        plan.budget -= cost
        plan.num_tokens += cost
        end = plan.ends[request.rid] = start + num_tokens
        self._pool.open_window(request, end)
        is_awaited = end == request.kv_len and self.waiting.has_same_prompt(request)
        with_tail = is_awaited or self._pool.keeps_state(request, end)
        copies = self._pool.share(request, end, with_tail=with_tail, is_awaited=is_awaited)
        plan.copies.extend(copies)

    # ------------------------------------------------------------------ admission

    def _admit(self, plan: _Prefill, num_steps: int) -> list[Request]:
        """Starts waiting requests while batch, token budget and pages allow."""
        if not self._num_startable or len(self.running) >= self._config.max_running_requests:
            return []
        reserved = sum(self._expected_pages(r, len(r.pages)) for r in self.running)
        window_room = self._pool.window_room(self.running)
        started: list[Request] = []
        num_free = self._config.max_running_requests - len(self.running)
        num_wanted = min(num_free, self._num_startable)
        for request in self._start_order.first(
            self.waiting, self.running, self._num_arrivals, num_wanted
        ):
            prefix = self._pool.find_prefix(request)
            if not request.num_retractions and self._pool.awaits_state(request, prefix):
                continue
            expected = self._expected_pages(request, prefix.num_pages)
            now = self._pages_to_start(request, prefix, num_steps)
            available = self._pool.num_available
            has_room = max(now, expected) + reserved <= available
            if has_room or not self.running:  # else whatever it shares does not help
                available = self._pool.available_beside(prefix)
                if self._pool.has_tail(prefix) and now > available:
                    # The tail does not fit beside the request: compute those tokens instead.
                    prefix = self._pool.without_tail(request, prefix)
                    expected = self._expected_pages(request, prefix.num_pages)
                    now = self._pages_to_start(request, prefix, num_steps)
                    available = self._pool.available_beside(prefix)
                has_room = max(now, expected) + reserved <= available
            needs_prefill = self._pool.num_ready(prefix) < request.kv_len
            window_room -= self._pool.window_need(request)
            has_room &= window_room >= 0 and self._pool.has_free_state
            # Alone in the batch a request always starts: the engine refused it unless it fits.
            if (needs_prefill and plan.budget <= 0) or (self.running and not has_room):
                self._pool.touch_prefix(request, prefix)
                break
            copies = plan.early_copies if needs_prefill else plan.copies
            copies.extend(self._pool.start(request, prefix, now))
            self.waiting.remove(request)
            request.status = RequestStatus.RUNNING
            reserved += max(expected - now, 0)
            self.running.append(request)
            started.append(request)
            if needs_prefill:
                self._add_chunk(plan, request)
        self.running.sort(key=_arrival)
        return started

    def _pages_to_start(self, request: Request, prefix: PrefixHandle, num_steps: int) -> int:
        steps = min(num_steps, request.num_remaining)
        return self._pool.pages_for(request.kv_len + steps) - prefix.num_pages

    def _expected_pages(self, request: Request, num_pages: int) -> int:
        """Pages beyond the `num_pages` it has that the request is expected to need."""
        tokens = request.kv_len + self.policy.expected_tokens(request)
        return max(self._pool.pages_for(tokens) - num_pages, 0)

    # ------------------------------------------------------------------ integrity

    def check_integrity(self) -> None:
        self._pool.check_integrity(self.running)
        for request in self.waiting:
            if request.pages or request.num_computed:
                raise EngineError(f"waiting request {request.rid} owns KV pages")
        for queue, status in (
            (self.waiting.returned, RequestStatus.WAITING),
            (self.waiting.new, RequestStatus.WAITING),
            (self.running, RequestStatus.RUNNING),
        ):
            _check_queue(queue, status)


def _arrival(request: Request) -> int:
    return request.arrival


def _take_pages(request: Request) -> None:
    request.pages, request.num_computed, request.routed = array("i"), 0, None
    request.state_slot = NO_STATE


def _not_finite(request: Request, weight_version: int) -> NonFiniteLogitsError:
    return NonFiniteLogitsError(
        f"request {request.rid} failed at output token {len(request.output_ids)}: its logits are "
        f"NaN or infinite with weight version {weight_version}"
    )


def _begins_stream(decode: Iterable[Request]) -> bool:
    """Whether one of these requests streams, and waits for its first token."""
    return any(request.is_streaming and not request.output_ids for request in decode)


def _check_queue(queue: Iterable[Request], status: RequestStatus) -> None:
    last = -1
    for request in queue:
        if request.status is not status:
            raise EngineError(f"request {request.rid} is {request.status}, queued as {status}")
        if request.arrival <= last:
            raise EngineError(f"request {request.rid} is out of order in the {status.value} queue")
        last = request.arrival
