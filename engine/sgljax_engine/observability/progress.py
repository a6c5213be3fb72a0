"""What an engine tells of long work, and a look at its work that costs it nothing. Host only."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Protocol


class ProgressListener(Protocol):
    """Is told how far loading and warm-up are.

    `started` and `finished` come in pairs, also when the task fails. `advanced` may come from
    several threads at once, and is never called for a token or a dispatch. What a listener raises
    fails the task. Tasks: "read weights"
    (bytes of a folder), "place weights" (tensors), "compile programs".
    """

    def started(self, task: str, total: int, unit: str) -> None:
        """A task of `total` units begins."""
        ...

    def advanced(self, task: str, count: int) -> None:
        """So many units more are done."""
        ...

    def finished(self, task: str) -> None:
        """The task is over, done or failed."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EngineProgress:
    """A look at an engine that does not wait for it; numbers may be a dispatch apart.

    Attributes:
        num_running: Requests that hold KV pages.
        num_waiting: Requests that wait for room, or for generation to continue.
        num_finished: Requests that ended since the engine started; totals, as those below.
        num_output_tokens: Tokens generated.
        num_prefill_tokens: Tokens prefilled.
        num_cached_tokens: Tokens taken from the prefix cache instead.
        weight_version: Of the weights that serve.
    """

    num_running: int
    num_waiting: int
    num_finished: int
    num_output_tokens: int
    num_prefill_tokens: int
    num_cached_tokens: int
    weight_version: int


@contextlib.contextmanager
def reporting(
    listener: ProgressListener | None, task: str, total: int, unit: str
) -> Iterator[Callable[[int], None]]:
    """Around a task: gives what tells the listener, if there is one, that units are done."""
    if listener is None:
        yield lambda count: None
        return
    listener.started(task, total, unit)
    try:
        yield lambda count: listener.advanced(task, count)
    finally:
        listener.finished(task)
