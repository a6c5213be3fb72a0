"""The state of a pause, and the callers that wait for started requests. Engine thread only.

A pause of mode "wait", and an update of that mode, are answered once every started request is
finished. They are refused when something keeps those requests from finishing. `EngineCore`
has what pauses do.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple

from sgljax_engine.errors import EngineStateError
from sgljax_engine.io_struct import PauseMode
from sgljax_engine.processing.futures import reject


class PendingDrain(NamedTuple):
    """A caller that waits until no started request is left; `call` names its method."""

    call: str
    future: Future[None]
    is_pause: bool


class PauseState:
    """Whether generation is paused, and who waits for requests to finish.

    `mode` is None while generation is not paused. `is_drained`: an update's drain is over, and its
    swap has not come yet.
    """

    def __init__(self) -> None:
        self.mode: PauseMode | None = None
        self.is_drained = False
        self._pending: list[PendingDrain] = []

    @property
    def allows_steps(self) -> bool:
        return self.mode in (None, "wait")

    @property
    def holds_new_requests(self) -> bool:
        if self.mode is not None or self.is_drained:
            return True
        return bool(self._pending) and not all(each.is_pause for each in self._pending)

    @property
    def has_pauses(self) -> bool:
        return bool(self._pending) and any(each.is_pause for each in self._pending)

    def wait(self, drain: PendingDrain) -> None:
        self._pending.append(drain)

    def pop_all(self) -> list[PendingDrain]:
        """Removes and returns the waiting callers."""
        pending, self._pending = self._pending, []
        return pending

    def end_update(self) -> None:
        self._pending = [each for each in self._pending if each.is_pause]
        self.is_drained = False

    def refuse(self, num_started: int, why: str, *, pauses_only: bool = False) -> None:
        """Answers with an error all callers that wait for requests which cannot finish."""
        pending = self.pop_all()
        self._pending = [each for each in pending if pauses_only and not each.is_pause]
        for each in pending:
            if each.is_pause or not pauses_only:
                message = f"{each.call} waited for {num_started} request(s), but {why}"
                reject(each.future, EngineStateError(message))

    def close(self, make_error: Callable[[], BaseException]) -> None:
        for each in self.pop_all():
            reject(each.future, make_error())
