"""The waiting queue, and the order in which its requests start where they are more than rows.

The order has no effect on samples: seeds depend on a request and a position alone. It decides when
the last request ends. If the longest one starts last, all other rows wait for it.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Collection, Iterator, Sequence
from typing import Protocol

from sgljax_engine.config import SchedulerConfig
from sgljax_engine.scheduler.lengths import AnswerLengths, expected_remaining
from sgljax_engine.types import Request

_MAX_BATCHES_LATER = 16
"""How much later than with first come, first served a request may start, in full batches."""


class WaitingQueue:
    """Waiting requests, each found and removed in constant time. Owned by the scheduler.

    It holds two queues, each in order of arrival. *Returned* requests ran before and were
    retracted; they start before all others, and are never more than the rows of a batch. The others
    have never run in this engine.
    """

    def __init__(self) -> None:
        self._returned: list[Request] = []
        # Not a dict: finding its first entry skips over all entries removed before it.
        self._new: OrderedDict[str, Request] = OrderedDict()
        self._num_same_prompt: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._returned) + len(self._new)

    def __iter__(self) -> Iterator[Request]:
        """Returned requests, then the others."""
        yield from self._returned
        yield from self._new.values()

    @property
    def num_returned(self) -> int:
        return len(self._returned)

    @property
    def returned(self) -> Sequence[Request]:
        return self._returned

    @property
    def oldest(self) -> Request:
        """The oldest returned request, else the oldest of the others; there must be one."""
        return self._returned[0] if self._returned else next(iter(self._new.values()))

    @property
    def new(self) -> Collection[Request]:
        """Requests in the queue that have never run here, in order of arrival."""
        return self._new.values()

    @property
    def num_new(self) -> int:
        return len(self._new)

    def take_newest(self, count: int) -> list[Request]:
        """Removes the last requests that have never run here; oldest first."""
        taken = list(itertools.islice(reversed(self._new.values()), count))[::-1]
        for request in taken:
            self.remove(request)
        return taken

    def append(self, request: Request) -> None:
        """Adds a request that has never run here at the end."""
        self._new[request.rid] = request
        if not request.output_ids:
            self._num_same_prompt[request.prompt_key] += 1

    def put_back(self, request: Request) -> None:
        """Puts a retracted request back at its old position."""
        bisect.insort(self._returned, request, key=_arrival)
        if not request.output_ids:
            self._num_same_prompt[request.prompt_key] += 1

    def remove(self, request: Request) -> None:
        if self._new.pop(request.rid, None) is None:
            self._returned.remove(request)
        if not request.output_ids:
            self._num_same_prompt[request.prompt_key] -= 1
            if not self._num_same_prompt[request.prompt_key]:
                del self._num_same_prompt[request.prompt_key]

    def has_same_prompt(self, request: Request) -> bool:
        """Whether another request waits to prefill the same tokens."""
        return not request.output_ids and request.prompt_key in self._num_same_prompt


def _arrival(request: Request) -> int:
    return request.arrival


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
    def first(
        self, waiting: WaitingQueue, running: Sequence[Request], num_arrivals: int, count: int
    ) -> list[Request]:
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
    """The order that `config.schedule_policy` names."""
    if config.schedule_policy == "fcfs":
        return FirstCome()
    return LongestFirst(lengths, _MAX_BATCHES_LATER * config.max_running_requests)
