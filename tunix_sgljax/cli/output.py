from __future__ import annotations

import sys


def say(text: str) -> None:
    """Writes a line to stderr, where it does not mix with results."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def emit(text: str, end: str = "\n") -> None:
    """Writes a result to stdout, at once."""
    sys.stdout.write(text + end)
    sys.stdout.flush()
