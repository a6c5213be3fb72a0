"""The waiting queue: each request is found and removed in constant time."""

from __future__ import annotations

import bisect
import itertools
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator, Sequence

from sgljax_engine.types import Request


class WaitingQueue:
    """Waiting requests. Owned by the scheduler.

    It holds two queues, each in order of arrival. *Returned* requests ran before and were
    retracted; they start before all others, and are never more than the rows of a batch. The others
    have never run in this engine.
    """

    def __init__(self) -> None:
        """Starts empty."""
        self._returned: list[Request] = []
        # Not a dict: finding its first entry skips over all entries removed before it.
        self._new: OrderedDict[str, Request] = OrderedDict()
        self._num_same_prompt: Counter[int] = Counter()

    def __len__(self) -> int:
        """Number of requests in the queue."""
        return len(self._returned) + len(self._new)

    def __iter__(self) -> Iterator[Request]:
        """Returned requests, then the others."""
        yield from self._returned
        yield from self._new.values()

    @property
    def num_returned(self) -> int:
        """Number of requests in the queue that ran before."""
        return len(self._returned)

    @property
    def returned(self) -> Sequence[Request]:
        """Requests in the queue that ran before."""
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
        """Number of requests in the queue that have never run here."""
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
        """Removes a request from either queue."""
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
