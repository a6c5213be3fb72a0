"""The continuous-batching scheduler: pure host code, driven by the engine thread alone.

`schedule()` decides one dispatch; `update()` books what it produced. Between the two the device
runs. Requests join and leave the running batch at every call.

Policy: first come, first served. When KV pages run out, the youngest running requests are
retracted: they give up their pages and wait, at their old place in the queue, to be prefilled
again, prompt and output so far together. The oldest request always keeps its pages, so every
request that fits the pool alone finishes in the end.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable

from sgljax_engine.cache.allocator import PageAllocator
from sgljax_engine.config import SchedulerConfig
from sgljax_engine.errors import EngineError
from sgljax_engine.scheduler.policy import AdmissionPolicy
from sgljax_engine.types import (
    FinishReason,
    PrefillChunk,
    Request,
    RequestStatus,
    SchedulerOutput,
    StepOutput,
)


class Scheduler:
    """Queues, running batch and page ownership.

    Invariant (see `check_integrity`): each page is free or belongs to exactly one running
    request; waiting requests own none.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        allocator: PageAllocator,
        *,
        page_size: int,
        token_block: int,
        max_prefill_tokens: int,
    ) -> None:
        """Starts empty.

        Args:
            config: Limits of the batch.
            allocator: The pool; this scheduler is its only user.
            page_size: Tokens in a page.
            token_block: Prefill programs work on blocks of this many tokens of one request, so
                a chunk costs its length rounded up to the block.
            max_prefill_tokens: The token budget of one dispatch, a multiple of `token_block`.
        """
        self._config = config
        self._allocator = allocator
        self._page_size = page_size
        self._token_block = token_block
        self._max_prefill_tokens = max_prefill_tokens
        self._num_arrivals = 0
        self.policy = AdmissionPolicy(config)
        # Both sorted by arrival, oldest first.
        self.waiting: list[Request] = []
        self.running: list[Request] = []

    # ------------------------------------------------------------------ queue changes

    def add(self, request: Request) -> None:
        """Puts a new request at the end of the waiting queue."""
        request.arrival = self._num_arrivals
        self._num_arrivals += 1
        self.waiting.append(request)

    def finish(self, request: Request, reason: FinishReason) -> None:
        """Takes a request out, wherever it is, and frees its pages."""
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
            self._release_pages(request)
        elif request.status is RequestStatus.WAITING:
            self.waiting.remove(request)
        else:
            raise EngineError(f"request {request.rid} finished twice")
        request.status = RequestStatus.FINISHED
        request.finish = reason

    def retract(self, request: Request) -> None:
        """Moves a running request back to its place in the waiting queue, without its pages."""
        self.running.remove(request)
        self._release_pages(request)
        request.status = RequestStatus.WAITING
        request.num_retractions += 1
        bisect.insort(self.waiting, request, key=_arrival)

    def requests(self) -> list[Request]:
        """All unfinished requests, running ones first."""
        return self.running + self.waiting

    @property
    def has_work(self) -> bool:
        """True while any request is unfinished."""
        return bool(self.waiting or self.running)

    # ------------------------------------------------------------------ one dispatch

    def schedule(self) -> SchedulerOutput:
        """Decides the next dispatch and allocates the pages that it writes to."""
        decodable = [r for r in self.running if r.num_computed == r.kv_len]
        num_steps, retracted = self._reserve_decode_pages(decodable)
        chunks, budget = self._continue_prefill(self._max_prefill_tokens)
        # A retraction in this very call says that pages are short: admit nobody.
        if not retracted:
            self._admit(chunks, budget, num_steps)

        computed = {chunk.request.rid: chunk.start + chunk.num_tokens for chunk in chunks}
        decode = [r for r in self.running if computed.get(r.rid, r.num_computed) == r.kv_len]
        return SchedulerOutput(
            prefill=chunks,
            decode=decode,
            step_limits=[self._step_limit(r) for r in decode],
            num_steps=num_steps,
            retracted=retracted,
            yield_on_finish=bool(self.waiting),
        )

    def update(self, output: SchedulerOutput, step: StepOutput) -> list[Request]:
        """Books a dispatch's results; returns the requests that it finished."""
        for chunk in output.prefill:
            chunk.request.num_computed = chunk.start + chunk.num_tokens
        finished = []
        for request, row in zip(output.decode, step.rows, strict=True):
            request.output_ids.extend(row.token_ids)
            request.logprobs.extend(row.logprobs)
            request.scaled_logprobs.extend(row.scaled_logprobs)
            request.num_computed += len(row.token_ids)
            if row.stopped:
                self.finish(request, FinishReason("stop", matched=request.output_ids[-1]))
            elif request.num_remaining == 0:
                self.finish(request, FinishReason("length"))
            if request.finish is not None:
                finished.append(request)
        if output.decode:
            self.policy.on_decode()
        return finished

    # ------------------------------------------------------------------ pages

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self._page_size)

    def _missing_pages(self, request: Request, num_steps: int) -> int:
        steps = min(num_steps, request.num_remaining)
        return max(self.pages_for(request.kv_len + steps) - len(request.pages), 0)

    def _step_limit(self, request: Request) -> int:
        room = len(request.pages) * self._page_size - request.kv_len
        return min(room, request.num_remaining)

    def _reserve_decode_pages(self, decodable: list[Request]) -> tuple[int, list[Request]]:
        """Gives decoding rows pages for as many steps as fit, retracting the youngest for one."""
        num_steps = self._config.decode_steps
        retracted: list[Request] = []
        while True:
            missing = [self._missing_pages(r, num_steps) for r in decodable]
            if sum(missing) <= self._allocator.num_free:
                break
            if num_steps > 1:
                num_steps //= 2
                continue
            victim = self.running[-1]
            self.policy.on_retract(self.running)
            self.retract(victim)
            retracted.append(victim)
            decodable = [r for r in decodable if r is not victim]
        for request, count in zip(decodable, missing, strict=True):
            request.pages.extend(self._allocator.allocate(count))
        return num_steps, retracted

    def _continue_prefill(self, budget: int) -> tuple[list[PrefillChunk], int]:
        """Next chunks of running requests whose prompt did not fit one dispatch."""
        chunks: list[PrefillChunk] = []
        for request in self.running:
            if request.num_computed < request.kv_len and budget > 0:
                budget = self._add_chunk(chunks, request, budget)
        return chunks, budget

    def _add_chunk(self, chunks: list[PrefillChunk], request: Request, budget: int) -> int:
        num_tokens = min(request.kv_len - request.num_computed, budget)
        chunks.append(PrefillChunk(request, request.num_computed, num_tokens))
        return budget - -(-num_tokens // self._token_block) * self._token_block

    def _admit(self, chunks: list[PrefillChunk], budget: int, num_steps: int) -> None:
        """Starts waiting requests while batch, token budget and pages allow."""
        if not self.waiting or len(self.running) >= self._config.max_running_requests:
            return
        reserved = sum(self._expected_pages(r) for r in self.running)
        num_admitted = 0
        for request in self.waiting:
            needs_prefill = request.kv_len > 0
            if len(self.running) >= self._config.max_running_requests:
                break
            if needs_prefill and budget <= 0:
                break
            expected = self._expected_pages(request)
            now = self._missing_pages(request, num_steps)
            if self.running and max(now, expected) + reserved > self._allocator.num_free:
                break
            # Alone in the batch a request always starts: the engine refused it unless it fits.
            request.pages.extend(self._allocator.allocate(now))
            request.status = RequestStatus.RUNNING
            reserved += max(expected - now, 0)
            self.running.append(request)
            num_admitted += 1
            if needs_prefill:
                budget = self._add_chunk(chunks, request, budget)
        del self.waiting[:num_admitted]
        self.running.sort(key=_arrival)

    def _expected_pages(self, request: Request) -> int:
        """Pages beyond those it owns that the request is expected to need."""
        tokens = request.kv_len + self.policy.expected_tokens(request)
        return max(self.pages_for(tokens) - len(request.pages), 0)

    def _release_pages(self, request: Request) -> None:
        self._allocator.free(request.pages)
        request.pages = []
        request.num_computed = 0

    # ------------------------------------------------------------------ integrity

    def check_integrity(self) -> None:
        """Raises EngineError when queues, statuses and pages contradict one another."""
        self._allocator.check_integrity()
        owned = [page for request in self.running for page in request.pages]
        if len(set(owned)) != len(owned):
            raise EngineError("a KV page belongs to two requests")
        if len(owned) != self._allocator.num_used:
            raise EngineError(f"{len(owned)} KV pages owned, {self._allocator.num_used} in use")
        for request in self.waiting:
            if request.pages or request.num_computed:
                raise EngineError(f"waiting request {request.rid} owns KV pages")
        for queue, status in (
            (self.waiting, RequestStatus.WAITING),
            (self.running, RequestStatus.RUNNING),
        ):
            _check_queue(queue, status)


def _arrival(request: Request) -> int:
    return request.arrival


def _check_queue(queue: Iterable[Request], status: RequestStatus) -> None:
    last = -1
    for request in queue:
        if request.status is not status:
            raise EngineError(f"request {request.rid} is {request.status}, queued as {status}")
        if request.arrival <= last:
            raise EngineError(f"request {request.rid} is out of order in the {status.value} queue")
        last = request.arrival
