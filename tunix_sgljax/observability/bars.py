"""The interface of progress bars, and where they can be drawn."""

from __future__ import annotations

import sys
from typing import Protocol


class Bars(Protocol):
    """Draws one bar per task."""

    def started(self, task: str, total: int, unit: str) -> None:
        """A task of `total` units begins."""
        ...

    def advanced_to(self, task: str, count: int) -> None:
        """`count` units are done in total."""
        ...

    def finished(self, task: str) -> None:
        """The task is over."""
        ...


def is_interactive() -> bool:
    """Whether stderr is a terminal, or this is IPython: then Tunix draws its own training bar."""
    ipython = sys.modules.get("IPython")
    if ipython is not None and ipython.get_ipython() is not None:
        return True
    return sys.stderr is not None and sys.stderr.isatty()
