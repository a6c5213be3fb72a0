"""The order in which waiting requests start, where there are more of them than rows.

It has no effect on samples: seeds depend on a request and a position alone. It decides when the
last request ends. If the longest one starts last, all other rows wait for it.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Protocol

from sgljax_engine.config import SchedulerConfig
from sgljax_engine.scheduler.lengths import AnswerLengths, expected_remaining
from sgljax_engine.scheduler.waiting import WaitingQueue
from sgljax_engine.types import Request

_MAX_BATCHES_LATER = 16
"""How much later than with first come, first served a request may start, in full batches."""


class StartOrder(Protocol):
    """Ranks the waiting requests. Engine thread only."""

    def first(
        self, waiting: WaitingQueue, running: Sequence[Request], num_arrivals: int, count: int
    ) -> list[Request]:
        """The requests to start next, in order: retracted ones before all others.

        Args:
            waiting: The queue, which stays as it is.
            running: The requests that run.
            num_arrivals: Number of requests that ever arrived.
            count: Most requests to return.
        """
        ...


class FirstCome:
    """In order of arrival."""

    def first(
        self, waiting: WaitingQueue, running: Sequence[Request], num_arrivals: int, count: int
    ) -> list[Request]:
        """The oldest requests."""
        return list(itertools.islice(waiting, count))


class LongestFirst:
    """The requests with the most expected tokens first.

    One sample of each prompt of which nothing is known comes before: it tells how long the others
    take. So do samples of different prompts that are expected to be equally long.

    Nobody waits for ever: when a request's start is `max_later` places later than in order of
    arrival, it is next. Of requests that are so late there is never more than one, since each start
    makes at most one more late.
    """

    def __init__(self, lengths: AnswerLengths, max_later: int) -> None:
        """Ranks by lengths that others add.

        Args:
            lengths: Of finished answers.
            max_later: Most places by which a request starts later than in order of arrival.
        """
        self._lengths = lengths
        self._max_later = max_later

    def first(
        self, waiting: WaitingQueue, running: Sequence[Request], num_arrivals: int, count: int
    ) -> list[Request]:
        """Retracted requests, then the one that is late, then the longest."""
        chosen = list(waiting.returned[:count])
        count = min(count - len(chosen), waiting.num_new)
        if count <= 0:
            return chosen
        ranked = iter(self._longest(waiting, running, count))
        by_arrival = iter(waiting.new)
        taken: set[str] = set()
        oldest = next(by_arrival)
        num_gone = num_arrivals - waiting.num_new
        for place in range(num_gone, num_gone + count):
            oldest = _next_left(oldest, by_arrival, taken)
            is_late = place - oldest.arrival >= self._max_later
            pick = oldest if is_late else _next_left(next(ranked), ranked, taken)
            taken.add(pick.rid)
            chosen.append(pick)
        return chosen

    def _longest(
        self, waiting: WaitingQueue, running: Sequence[Request], count: int
    ) -> list[Request]:
        """The `count` new requests with the most expected tokens."""
        siblings: defaultdict[int, list[int]] = defaultdict(list)
        for request in running:
            siblings[request.prompt_key].append(len(request.output_ids))
        prompts = {request.prompt_key for request in waiting.new}
        expected = {key: self._lengths.expected(key, siblings.get(key, ())) for key in prompts}
        unknown = {key for key in prompts if not self._lengths.is_known(key)}
        num_before = Counter({key: len(siblings.get(key, ())) for key in prompts})
        ranks: list[tuple[bool, float, int, int, Request]] = []
        for request in waiting.new:
            key, num_tokens = request.prompt_key, len(request.output_ids)
            is_probe = key in unknown and not num_before[key]
            left = expected_remaining(expected[key], num_tokens, request.num_remaining)
            # Arrivals differ, so that requests are never compared.
            ranks.append((not is_probe, -left, num_before[key], request.arrival, request))
            num_before[key] += 1
        return [rank[-1] for rank in heapq.nsmallest(count, ranks)]


def _next_left(request: Request, others: Iterator[Request], taken: set[str]) -> Request:
    """The request, or the first of the others that is not taken."""
    while request.rid in taken:
        request = next(others)
    return request


def make_start_order(config: SchedulerConfig, lengths: AnswerLengths) -> StartOrder:
    """The order that `config.schedule_policy` names.

    Args:
        config: Of the scheduler.
        lengths: Of finished answers.
    """
    if config.schedule_policy == "fcfs":
        return FirstCome()
    return LongestFirst(lengths, _MAX_BATCHES_LATER * config.max_running_requests)
