"""Interrupted callers: a KeyboardInterrupt at a chosen place, or from a real signal."""

from __future__ import annotations

import concurrent.futures
import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import sgljax_engine
from tests import yields

_FILES = (
    str(Path(sgljax_engine.__file__).parent),
    str(Path(concurrent.futures.__file__).parent),
    threading.__file__,
)


_SOON_S = 1e-5
_AGAIN_S = 5.0
"""Longer than what clears up behind an interrupted call takes."""


class Interrupt:
    """Raises KeyboardInterrupt on this thread at the place with an index.

    A place is where CPython looks for signals in straight code: where a function begins, and behind
    each call of a built-in one. Those in the engine's files and in those of futures count.

    Attributes:
        place: Index of the place.
        num_places: How many were passed; the interrupt came if these are more than `place`.
    """

    def __init__(self, place: int) -> None:
        self.place = place
        self.num_places = 0

    @property
    def came(self) -> bool:
        return self.num_places > self.place

    def __enter__(self) -> Interrupt:
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _profile(self, frame: FrameType, event: str, arg: Any) -> None:
        del arg
        is_place = event in ("call", "c_return")
        if is_place and frame.f_code.co_filename.startswith(_FILES):
            self.num_places += 1
            if self.came:
                sys.setprofile(None)  # only one comes, so that what clears up is left alone
                raise KeyboardInterrupt


def interrupt_everywhere(call: Callable[[], Any], check: Callable[[], None], step: int = 1) -> int:
    """Interrupts a call at one place after another, until it is over before.

    Args:
        call: Called on this thread.
        check: Called after each interrupted one.
        step: Places from one to the next.

    Returns:
        The number of interrupts.
    """
    for place in range(0, 10**6, step):
        with contextlib.suppress(KeyboardInterrupt), Interrupt(place) as interrupt:
            call()
        sys.setprofile(None)
        if not interrupt.came:
            return place // step
        check()
    raise AssertionError("it is never over")


@contextlib.contextmanager
def real_interrupts() -> Iterator[Callable[[float], None]]:
    """Gives a function that has a signal interrupt the main thread after so many seconds.

    One that comes just before CPython begins to wait does not end the wait, and one that comes in a
    finalizer is lost; so another one comes later. One that comes in a step of `tests.yields` that
    is indivisible with locks of C waits for its end.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        del number
        while frame is not None:
            if frame.f_code in yields.INDIVISIBLE:
                signal.setitimer(signal.ITIMER_REAL, _SOON_S, _AGAIN_S)
                return
            frame = frame.f_back
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN_S) and None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
