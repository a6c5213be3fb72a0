"""Hands out commands of callers to the engines of a group, in order of arrival."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import queue
import threading
from collections.abc import Callable, Sequence

from sgljax_engine.core.calls import RequestGroups, Router
from sgljax_engine.core.command import Command, Task
from sgljax_engine.core.engine_core import EngineCore
from sgljax_engine.core.loop import EngineLoop
from sgljax_engine.errors import EngineShutdownError
from sgljax_engine.types import Request

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Distribute(Task):
    """Hand a command out, on the thread of the only engine."""

    hand_out: HandOut
    command: Command | None

    def run(self, core: EngineCore) -> None:
        del core
        self.hand_out.distribute(self.command)

    def refuse(self, make_error: Callable[[], BaseException]) -> None:
        if self.command is not None:
            self.command.refuse(make_error)


class HandOut:
    """Hands out commands in order of arrival, each to all engines that it concerns.

    It is the commands' `Recipients`. A caller may be interrupted between any two steps, and a
    garbage collection may run a finalizer there that submits or shuts down. So a caller takes only
    one indivisible step, `put`; a thread does the rest, and nobody interrupts it. Otherwise one
    engine could wait for another that was never told.

    A single engine's thread hands out its commands itself: a thread in between takes time. Pause
    and continue of an idle engine take 275 us with one and 180 without (2 cores, November 2026).
    """

    def __init__(
        self,
        loops: Sequence[EngineLoop],
        groups: RequestGroups,
        router: Router,
        *,
        stop_engines: Callable[[str | None], None],
        name: str,
    ) -> None:
        self.num_engines = len(loops)
        self.groups = groups
        self._loops = loops
        self._router = router
        self._stop_engines = stop_engines
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._only = loops[0] if len(loops) == 1 else None
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        if self._only is not None:
            self.thread = self._only.thread
        else:
            self.thread.start()

    def put(self, command: Command) -> None:
        """Queues a command. Any thread, under the group's lock and after `check_open`."""
        if self._only is not None:
            self._only.put(Distribute(self, command))
        else:
            self._commands.put(command)

    def stop(self) -> None:
        """Ends the engines after the commands that came before. Any thread; idempotent."""
        if self._only is None:
            self._commands.put(None)
            return
        with contextlib.suppress(EngineShutdownError):
            self._only.submit(Distribute(self, None))

    # ------------------------------------------------------------------ for commands

    def enqueue(self, index: int, task: Task) -> None:
        """Queues a task for one engine; the only engine does it next, before what came since."""
        if self._only is not None:
            self._only.do_next(task)
        else:
            self._loops[index].submit(task)

    def route(self, requests: Sequence[Request]) -> None:
        for request, engine in zip(requests, self._router.route(requests), strict=True):
            request.engine = engine

    # ------------------------------------------------------------------ the thread

    def distribute(self, command: Command | None) -> None:
        """Gives a command to all engines that it concerns, or ends them; on the thread."""
        if command is None:
            self._stop_engines(None)
            return
        with self.groups.lock:
            try:
                for loop in self._loops:  # all or none, since they are stopped under the lock
                    loop.check_open()
                command.hand_out(self)
            except EngineShutdownError as error:
                reason = str(error)
            except BaseException as error:  # a bug: never leave a caller waiting
                logger.exception("handing out a command failed")
                reason = f"handing out a command failed: {error!r}"
                self._stop_engines(reason)
            else:
                return
            command.refuse(lambda: EngineShutdownError(reason))

    def _run(self) -> None:
        while self._do_one():
            pass
        while not self._commands.empty():
            self._do_one()

    def _do_one(self) -> bool:
        """Hands out one command; False at the end. Keeps no reference to it."""
        command = self._commands.get()
        try:
            self.distribute(command)
            return command is not None
        finally:
            del command
