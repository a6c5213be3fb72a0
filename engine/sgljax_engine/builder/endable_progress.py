"""Ends what takes long, loading and warm-up, once nobody waits for it."""

from __future__ import annotations

from sgljax_engine.errors import EngineShutdownError
from sgljax_engine.observability.progress import ProgressListener
from sgljax_engine.processing.home import check_not_ending


class EndableProgress:
    """A listener of progress that passes it on, and fails the task when it is to end. Any thread.

    A task reports after each tensor and each program: one that is in work is finished.
    """

    def __init__(self, listener: ProgressListener | None) -> None:
        self.listener = listener
        self._reason: str | None = None

    def end(self, reason: str) -> None:
        """Has tasks fail at their next report, those of later calls too."""
        self._reason = reason

    def started(self, task: str, total: int, unit: str) -> None:
        self._check()
        if self.listener is not None:
            self.listener.started(task, total, unit)

    def advanced(self, task: str, count: int) -> None:
        self._check()
        if self.listener is not None:
            self.listener.advanced(task, count)

    def finished(self, task: str) -> None:
        if self.listener is not None:
            self.listener.finished(task)

    def _check(self) -> None:
        check_not_ending()
        if self._reason is not None:
            raise EngineShutdownError(self._reason)
