"""Which requests were submitted together. Engine thread only; no JAX.

A caller who submits several requests gets no output before all of them are finished. So a
checkpoint holds finished requests too, until the last request of their group is finished.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable

from sgljax_engine.types import Request, RequestStatus


@dataclasses.dataclass(slots=True)
class _Group:
    requests: list[Request]
    num_unfinished: int
    errors: dict[str, str]


class RequestGroups:
    """Groups of requests that are not all answered."""

    def __init__(self) -> None:
        """Starts without groups."""
        self._groups: dict[int, _Group] = {}
        self._names: Counter[str] = Counter()
        self._num_groups = 0

    def taken_names(self, requests: Iterable[Request]) -> list[str]:
        """Ids of these requests, and of their prompts, that others here have; each once."""
        names = dict.fromkeys(name for request in requests for name in (request.group, request.rid))
        return [name for name in names if name in self._names]

    def add(self, requests: Iterable[Request], errors: dict[str, str] | None = None) -> None:
        """Adds the requests of one call. Some may be finished already, with errors by id."""
        known = list(requests)
        unfinished = [r for r in known if r.status is not RequestStatus.FINISHED]
        if not unfinished:
            return
        for request in known:
            request.call = self._num_groups
        self._names.update(name for r in known for name in {r.rid, r.group})
        self._groups[self._num_groups] = _Group(known, len(unfinished), errors or {})
        self._num_groups += 1

    def finish(self, request: Request, error: Exception | None) -> None:
        """Notes that a request is finished, and the error that its caller gets, if any.

        A request that the output processor failed has its error in the finish reason.
        """
        group = self._groups[request.call]
        group.num_unfinished -= 1
        if error is not None:
            group.errors[request.rid] = str(error)
        elif request.finish is not None and request.finish.type == "error":
            group.errors[request.rid] = request.finish.message
        if not group.num_unfinished:
            del self._groups[request.call]
            self._names -= Counter(name for r in group.requests for name in {r.rid, r.group})

    def finished(self) -> list[tuple[Request, str | None]]:
        """The finished requests of unfinished calls, and what they failed with."""
        return [
            (request, group.errors.get(request.rid))
            for group in self._groups.values()
            for request in group.requests
            if request.status is RequestStatus.FINISHED
        ]
