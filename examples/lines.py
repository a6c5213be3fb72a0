"""Lines for long programs, which say in a silence that they go on."""

from __future__ import annotations

import threading
import time
from typing import Self

QUIET_S = 8.0
"""Seconds without a line after which one says that the program still runs."""


class Lines:
    """Prints lines; in a silence one that says how long it has lasted.

    A context manager. Call it from any thread.
    """

    def __init__(self, quiet_s: float = QUIET_S) -> None:
        """Prints nothing yet."""
        self._quiet_s, self._since = quiet_s, time.monotonic()
        self._said, self._is_over = threading.Condition(), False
        self._thread = threading.Thread(target=self._run, name="lines", daemon=True)

    def __call__(self, line: str) -> None:
        """Prints a line."""
        with self._said:
            self._since = time.monotonic()
            print(line, flush=True)
            self._said.notify()

    def __enter__(self) -> Self:
        """Watches for silences."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the watching."""
        with self._said:
            self._is_over = True
            self._said.notify()
        self._thread.join()

    def _run(self) -> None:
        with self._said:
            while not self._is_over:
                if not self._said.wait(self._quiet_s):
                    print(f"  ... {time.monotonic() - self._since:.0f} s", flush=True)
