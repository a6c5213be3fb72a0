"""Progress of long tasks, and a snapshot that costs the engine nothing. Host only."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Protocol


class ProgressListener(Protocol):
    """Receives the progress of loading and warm-up.

    `started` and `finished` come in pairs, also when the task fails. `advanced` may come from
    several threads at once, and is never called for a token or a dispatch. An exception of a
    listener fails the task. Tasks: "read weights" (bytes of a folder), "place weights" (tensors),
    "compile programs".
    """

    def started(self, task: str, total: int, unit: str) -> None:
        """A task of `total` units begins."""
        ...

    def advanced(self, task: str, count: int) -> None:
        """`count` more units are done."""
        ...

    def finished(self, task: str) -> None:
        """The task is over, done or failed."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EngineProgress:
    """A snapshot of an engine without waiting for it; numbers may be a dispatch apart.

    Attributes:
        num_running: Requests that hold KV pages.
        num_waiting: Requests that wait for room, or for generation to continue.
        num_finished: Requests that ended since the engine started; a total, like those below.
        num_output_tokens: Tokens generated.
        num_prefill_tokens: Tokens prefilled.
        num_cached_tokens: Tokens taken from the prefix cache instead.
        weight_version: Version of the serving weights.
        halted_s: Seconds since generation was paused, put to sleep, or lost its weights; None while
            requests may start.
    """

    num_running: int
    num_waiting: int
    num_finished: int
    num_output_tokens: int
    num_prefill_tokens: int
    num_cached_tokens: int
    weight_version: int
    halted_s: float | None


@contextlib.contextmanager
def reporting(
    listener: ProgressListener | None, task: str, total: int, unit: str
) -> Iterator[Callable[[int], None]]:
    """Wraps a task; yields a function that reports finished units to the listener, if any."""
    if listener is None:
        yield lambda count: None
        return
    listener.started(task, total, unit)
    try:
        yield lambda count: listener.advanced(task, count)
    finally:
        listener.finished(task)
