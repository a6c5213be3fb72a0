"""Which requests were submitted together. Any thread; no JAX.

The engines of a group share one object, since a call's requests may go to several engines.

A caller who submits several requests gets no output before all of them are finished. So a
checkpoint holds finished requests too, until the last request of their group is finished.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence

from sgljax_engine.types import Request, RequestStatus


@dataclasses.dataclass(slots=True)
class _Group:
    """One call: its requests by id, ids without an answer, and errors of the others."""

    requests: dict[str, Request]
    unanswered: set[str]
    errors: dict[str, str]


class RequestGroups:
    """Requests by call, for calls that are not wholly answered.

    Attributes:
        on_finished: Called for each request that is finished, or withdrawn.
        lock: The one lock of the engines' group. It is reentrant: a garbage collection may end a
            stream, and so submit on the same thread. With a second lock two threads could wait for
            each other.
    """

    def __init__(self) -> None:
        """Starts without groups."""
        self.on_finished: Callable[[Request], None] = lambda request: None
        self.lock = threading.RLock()
        self._groups: dict[int, _Group] = {}
        self._names: dict[str, int] = {}
        self._num_groups = 0

    def add(
        self, calls: Sequence[Sequence[Request]], errors: Mapping[str, str] | None = None
    ) -> list[str]:
        """Adds the requests of several calls: all of them, or none.

        Args:
            calls: Some of their requests may be finished already.
            errors: Errors of finished requests, by id.

        Returns:
            Ids of these requests and their prompts that are in use, each once. If there are any,
            nothing was added.
        """
        with self.lock:
            taken = self._taken_names(request for call in calls for request in call)
            for call in () if taken else calls:
                self._add(list(call), errors or {})
            return taken

    def _taken_names(self, requests: Iterable[Request]) -> list[str]:
        known = list(requests)
        names = dict.fromkeys(name for request in known for name in (request.group, request.rid))
        taken = [name for name in names if name in self._names]
        if not taken and len({request.rid for request in known}) < len(known):
            taken = [known[0].group]  # an id that looks like one of another prompt's samples
        return taken

    def _add(self, requests: list[Request], errors: Mapping[str, str]) -> None:
        unfinished = {r.rid for r in requests if r.status is not RequestStatus.FINISHED}
        if not unfinished:
            return
        for request in requests:
            request.call = self._num_groups
            self._take_names(request)
        own = {r.rid: errors[r.rid] for r in requests if r.rid in errors}
        known = {request.rid: request for request in requests}
        self._groups[self._num_groups] = _Group(known, unfinished, own)
        self._num_groups += 1

    def withdraw(self, request: Request) -> None:
        """Forgets a request that was refused after it was added."""
        with self.lock:
            group = self._find(request)
            if group is not None:
                del group.requests[request.rid]
                self._free_names(request)
                self._answered(group, request)
        self.on_finished(request)

    def finish(self, request: Request, error: Exception | None) -> None:
        """Notes that a request is finished, and the error that its caller gets, if any.

        If the output processor failed a request, its finish reason has the error.
        """
        with self.lock:
            group = self._find(request)
            if group is not None:
                if error is not None:
                    group.errors[request.rid] = str(error)
                elif request.finish is not None and request.finish.type == "error":
                    group.errors[request.rid] = request.finish.message
                self._answered(group, request)
        self.on_finished(request)

    def answered(self, requests: Iterable[Request]) -> None:
        """Frees the ids of requests whose engines have been told to end them.

        Does nothing for those that are finished or were never added.
        """
        with self.lock:
            for request in requests:
                group = self._find(request)
                if group is not None:
                    self._answered(group, request)

    def _find(self, request: Request) -> _Group | None:
        """The call of this request object; None once the whole call is answered."""
        group = self._groups.get(request.call)
        return group if group and group.requests.get(request.rid) is request else None

    def _answered(self, group: _Group, request: Request) -> None:
        """Marks a request as answered; in constant time, since it is done for each request."""
        group.unanswered.discard(request.rid)
        if not group.unanswered and self._groups.pop(request.call, None):
            for each in group.requests.values():
                self._free_names(each)

    def _take_names(self, request: Request) -> None:
        for name in {request.rid, request.group}:
            self._names[name] = self._names.get(name, 0) + 1

    def _free_names(self, request: Request) -> None:
        for name in {request.rid, request.group}:
            self._names[name] -= 1
            if not self._names[name]:
                del self._names[name]

    def finished(self, engine: int) -> list[tuple[Request, str | None]]:
        """An engine's finished requests of unfinished calls, and what they failed with."""
        with self.lock:
            return [
                (request, group.errors.get(request.rid))
                for group in self._groups.values()
                for request in group.requests.values()
                if request.status is RequestStatus.FINISHED and request.engine == engine
            ]
