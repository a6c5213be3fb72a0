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
"""Exit code of a command that Ctrl-C ended: 128 + SIGINT."""

_current: Interrupts | None = None


class Interrupts:
    """Handles SIGINT inside its `with` block on the main thread; elsewhere it does nothing.

    The first Ctrl-C raises KeyboardInterrupt in the main thread, or calls the given function inside
    `on_interrupt`. The second ends the process at once with `EXIT_INTERRUPTED`. An interrupted
    handler that `stays` outlives the block, so that another Ctrl-C can abandon threads that the
    interpreter waits for at exit.
    """

    def __init__(self, *, stays: bool = False) -> None:
        self._stays = stays
        self._abort: Callable[[], Any] | None = None
        self._count = 0
        self._before: Any = None
        self._is_installed = False

    @property
    def is_interrupted(self) -> bool:
        return self._count > 0

    def __enter__(self) -> Interrupts:
        """Installs the handler, unless SIGINT is ignored, as for a background job."""
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
        """Restores the previous handler, unless this one stays."""
        global _current
        if self._is_installed and not (self._stays and self.is_interrupted):
            signal.signal(signal.SIGINT, self._before)
            _current = None

    @contextlib.contextmanager
    def on_interrupt(self, abort: Callable[[], Any]) -> Iterator[None]:
        """Inside the block the first Ctrl-C calls `abort` on a new thread, and raises nothing."""
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
    """Interrupts of the running command; outside of one, an object that no Ctrl-C reaches."""
    return _current or Interrupts()
