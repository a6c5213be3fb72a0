"""Ctrl-C: the first ends a command cleanly, the second ends the process at once."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from tunix_sgljax.cli.output import say

EXIT_INTERRUPTED = 130
"""What a shell expects of a command that Ctrl-C ended: 128 + SIGINT."""

_current: Interrupts | None = None


class Interrupts:
    """Handles SIGINT while it is entered, on the main thread; elsewhere it changes nothing.

    The first Ctrl-C raises KeyboardInterrupt in the main thread, or, within `on_interrupt`, calls
    what that was given. The second ends the process with `EXIT_INTERRUPTED`, whatever it does.
    """

    def __init__(self) -> None:
        self._abort: Callable[[], Any] | None = None
        self._count = 0
        self._before: Any = None
        self._is_installed = False

    @property
    def is_interrupted(self) -> bool:
        """Whether Ctrl-C came."""
        return self._count > 0

    def __enter__(self) -> Interrupts:
        """Installs the handler, unless SIGINT is ignored, as it is for a job in the background."""
        global _current
        if (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN
        ):
            self._before = signal.signal(signal.SIGINT, self._handle)
            self._is_installed = True
            _current = self
        return self

    def __exit__(self, *exc: object) -> None:
        """Puts the handler back that was there before."""
        global _current
        if self._is_installed:
            signal.signal(signal.SIGINT, self._before)
            _current = None

    @contextlib.contextmanager
    def on_interrupt(self, abort: Callable[[], Any]) -> Iterator[None]:
        """Within it the first Ctrl-C calls `abort`, on a thread of its own, and raises nothing."""
        self._abort = abort
        try:
            yield
        finally:
            self._abort = None

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self._count += 1
        if self._count > 1:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):
                    stream.flush()
            os._exit(EXIT_INTERRUPTED)
        if self._abort is None:
            raise KeyboardInterrupt
        say("\nstopping; Ctrl-C again ends at once")
        # The main thread may hold any lock now, so it must not wait for one here.
        threading.Thread(target=self._abort, name="interrupt", daemon=True).start()


def current() -> Interrupts:
    """Those of the command that runs; outside of one, some that no Ctrl-C reaches."""
    return _current or Interrupts()
