"""The state of a pause, and what waits until no started request is left. Engine thread only.

A pause of mode "wait", and an update of that mode, are answered once every started request is
finished. They are refused when something keeps those requests from finishing.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from sgljax_engine.core import commands as cmd
from sgljax_engine.errors import EngineStateError
from sgljax_engine.io_struct import PauseMode
from sgljax_engine.processing.futures import reject


class PauseState:
    """Whether generation is paused, and who waits for requests to finish.

    Attributes:
        mode: Of the pause; None while generation goes on.
        waiting_drain: The drain that waits; None without.
        is_drained: Whether a drain is over, and its swap has not come yet.
    """

    def __init__(self) -> None:
        """Generation goes on."""
        self.mode: PauseMode | None = None
        self.waiting_drain: cmd.Drain | None = None
        self.is_drained = False
        self._waiting_pauses: list[Future[None]] = []

    @property
    def allows_steps(self) -> bool:
        """Whether started requests may go on."""
        return self.mode in (None, "wait")

    def wait(self, pause: Future[None]) -> None:
        """A pause is answered when no started request is left."""
        self._waiting_pauses.append(pause)

    @property
    def holds_new_requests(self) -> bool:
        """Whether requests that have not started wait for a call."""
        return self.mode is not None or self.waiting_drain is not None or self.is_drained

    def take_drain(self) -> cmd.Drain | None:
        """The drain that waits, which does not wait any more."""
        drain, self.waiting_drain = self.waiting_drain, None
        return drain

    def take_pauses(self) -> list[Future[None]]:
        """The pauses that wait, which do not wait any more."""
        pauses, self._waiting_pauses = self._waiting_pauses, []
        return pauses

    def refuse_pauses(self, num_started: int, why: str) -> None:
        """Answers waiting pauses whose requests will not finish under them."""
        waited = f"waited for {num_started} request(s), but {why}"
        for future in self.take_pauses():
            reject(future, EngineStateError(f"pause_generation('wait') {waited}"))

    def refuse_drain(self, num_started: int, why: str) -> None:
        """Answers a drain whose requests cannot finish."""
        drain = self.take_drain()
        if drain is not None:
            waited = f"waited for {num_started} request(s), but {why}"
            reject(drain.future, EngineStateError(f"{drain.name}(mode='wait') {waited}"))

    def close(self, make_error: Callable[[], BaseException]) -> None:
        """Refuses all that waits."""
        for future in self.take_pauses():
            reject(future, make_error())
        drain = self.take_drain()
        if drain is not None:
            drain.refuse(make_error)
