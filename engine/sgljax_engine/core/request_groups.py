"""Which requests were submitted together. Engine thread only; no JAX.

A caller who submitted several requests gets nothing before all of them are finished. So those that
are finished belong into a checkpoint until the last one is.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable

from sgljax_engine.types import Request, RequestStatus


@dataclasses.dataclass(slots=True)
class _Call:
    requests: list[Request]
    num_unfinished: int
    errors: dict[str, str]


class RequestGroups:
    """Calls that have not got all their answers."""

    def __init__(self) -> None:
        """There are none."""
        self._calls: dict[int, _Call] = {}
        self._names: Counter[str] = Counter()
        self._num_calls = 0

    def has_name(self, name: str) -> bool:
        """Whether a request, or the prompt of one, has this id."""
        return name in self._names

    def add(self, requests: Iterable[Request], errors: dict[str, str] | None = None) -> None:
        """Requests of one call were taken. Some may be finished already, with errors by id."""
        known = list(requests)
        unfinished = [r for r in known if r.status is not RequestStatus.FINISHED]
        if not unfinished:
            return
        for request in known:
            request.call = self._num_calls
        self._names.update(name for r in known for name in {r.rid, r.group})
        self._calls[self._num_calls] = _Call(known, len(unfinished), errors or {})
        self._num_calls += 1

    def finish(self, request: Request, error: Exception | None) -> None:
        """A request is finished, and its caller gets an error if there is one.

        The detokenizer tells its callers of errors by itself; they are known by their reason.
        """
        call = self._calls[request.call]
        call.num_unfinished -= 1
        if error is not None:
            call.errors[request.rid] = str(error)
        elif request.finish is not None and request.finish.type == "error":
            call.errors[request.rid] = request.finish.message
        if not call.num_unfinished:
            del self._calls[request.call]
            self._names -= Counter(name for r in call.requests for name in {r.rid, r.group})

    def finished(self) -> list[tuple[Request, str | None]]:
        """The finished requests of unfinished calls, and what they failed with."""
        return [
            (request, call.errors.get(request.rid))
            for call in self._calls.values()
            for request in call.requests
            if request.status is RequestStatus.FINISHED
        ]
