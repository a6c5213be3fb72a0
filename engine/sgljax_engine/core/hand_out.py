"""The thread that hands the commands of a group out to its engines, one after another."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from sgljax_engine.core import commands as cmd


class HandOut:
    """Commands in the order in which they came, each to all engines that it concerns.

    A caller may be interrupted between any two steps, and a garbage collection may run a finalizer
    there that submits or shuts down. So callers take one step that cannot be divided, `put`, and
    everything else is this thread's, which nobody interrupts. Otherwise one engine could wait for
    another that was never told.

    Attributes:
        thread: Started at once.
    """

    def __init__(
        self, distribute: Callable[[cmd.Command], None], on_stop: Callable[[], None], name: str
    ) -> None:
        """Starts the thread.

        Args:
            distribute: Hands out one command; must not fail.
            on_stop: Called on the thread when `stop` is due: refuses all commands from then on.
            name: Of the thread.
        """
        self._distribute = distribute
        self._on_stop = on_stop
        self._commands: queue.SimpleQueue[cmd.Command | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def put(self, command: cmd.Command) -> None:
        """Queues a command. Any thread."""
        self._commands.put(command)

    def stop(self) -> None:
        """Ends the thread behind the commands that came before. Any thread; idempotent."""
        self._commands.put(None)

    def _run(self) -> None:
        while self._take():
            pass
        self._on_stop()
        while not self._commands.empty():
            self._take()

    def _take(self) -> bool:
        """Hands out one command; False for the end. Keeps nothing of it when it returns."""
        command = self._commands.get()
        if command is None:
            return False
        try:
            self._distribute(command)
        finally:
            del command
        return True
