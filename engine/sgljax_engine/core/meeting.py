"""How the engines of a group do one thing: all of them, or none.

Each engine thread prepares, which may fail and changes nothing that serves. The threads wait for
one another; the last to come does once what is done once for all. Then all commit, or every one
rolls back, those that could not prepare included. A single engine is a group of one, whose thread
waits for nobody.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from sgljax_engine.core import commands as cmd
from sgljax_engine.errors import forget_locals
from sgljax_engine.processing.futures import reject, resolve

if TYPE_CHECKING:
    from sgljax_engine.core.engine_core import EngineCore


def _nothing(core: EngineCore, command: Any, prepared: Any) -> None:
    """Neither answers nor undoes anything."""


def _no_undo(core: EngineCore, command: Any, prepared: Any, error: BaseException) -> None:
    """Nothing was prepared that needs undoing."""


class Steps(NamedTuple):
    """The parts of a command that a group does together.

    What `prepare` and `together` raise, of whatever type, is the caller's. What `commit` and
    `rollback` raise ends a group of several engines, since these may differ afterwards.

    Attributes:
        prepare: (core, command) -> what the other parts get. On each engine's thread.
        together: (command, cores, prepared) -> the same of each engine. Once, on any of the
            threads, while all wait.
        commit: (core, command, prepared) -> the engine's answer. On each engine's thread; must not
            fail.
        rollback: (core, command, prepared, error), instead of `commit`, on every engine's thread.
            An engine that could not prepare gets None for `prepared`. Must not fail.
        combine: The answers of all engines -> the caller's. None takes the first engine's.
    """

    prepare: Callable[[EngineCore, Any], Any] = lambda core, command: None
    together: Callable[[Any, Sequence[EngineCore], Sequence[Any]], Sequence[Any]] | None = None
    commit: Callable[[EngineCore, Any, Any], Any] = _nothing
    rollback: Callable[[EngineCore, Any, Any, BaseException], None] = _no_undo
    combine: Callable[[Sequence[Any]], Any] | None = None


class Meeting:
    """One command, for all engine threads of a group.

    Attributes:
        name: Of the command.
    """

    def __init__(self, command: cmd.Question, steps: Steps, num_engines: int) -> None:
        """Waits for the threads.

        Args:
            command: What they do; its future gets the combined answer, or the first error.
            steps: How.
            num_engines: How many threads come.
        """
        self.name = type(command).__name__
        self._command: cmd.Question | None = command
        self._steps = steps
        self._condition = threading.Condition()
        self._missing = set(range(num_engines))
        self._cores: list[EngineCore | None] = [None] * num_engines
        self._prepared: list[Any] = [None] * num_engines
        self._answers: list[Any] = [None] * num_engines
        self._is_decided = False
        self._num_unfinished = num_engines
        self._error: BaseException | None = None  # fixed once it is decided
        self._failure: BaseException | None = None  # of a commit or rollback

    def attend(self, place: int, core: EngineCore) -> None:
        """Does an engine's part, on its thread; waits for the others in between.

        What ends the group is raised here too.
        """
        command, error = self._command, None
        assert command is not None
        prepared = None
        try:
            prepared = self._steps.prepare(core, command)
        except BaseException as failure:  # a user's hook may raise anything
            error = failure
        try:
            self._arrive(place, core, prepared, error)
            try:
                if self._error is None:
                    self._answers[place] = self._steps.commit(core, command, self._prepared[place])
                else:
                    self._steps.rollback(core, command, prepared, self._error)
            except BaseException as failure:
                with self._condition:
                    self._failure = self._failure or failure
                if len(self._cores) > 1 or not isinstance(failure, Exception):
                    raise
        finally:
            del command, error, prepared  # an error refers to this frame
            self._leave()

    def refuse(self, place: int, make_error: Callable[[], BaseException]) -> None:
        """An engine's thread will not come; waits for nobody. Nothing if it came."""
        with self._condition:
            if place not in self._missing:
                return
            self._error = self._error or make_error()
            self._came(place)
        self._leave()

    def _arrive(
        self, place: int, core: EngineCore, prepared: Any, error: BaseException | None
    ) -> None:
        with self._condition:
            self._cores[place], self._prepared[place] = core, prepared
            self._error = self._error or error
            self._came(place)
            self._condition.wait_for(lambda: self._is_decided)

    def _came(self, place: int) -> None:
        """Counts a thread; the last does what is done once."""
        self._missing.remove(place)
        if self._missing:
            return
        if self._error is None and self._steps.together is not None:
            try:
                cores = [core for core in self._cores if core is not None]
                done = self._steps.together(self._command, cores, self._prepared)
                self._prepared = list(done)
            except BaseException as failure:
                self._error = failure
        self._is_decided = True
        self._condition.notify_all()

    def _leave(self) -> None:
        """Counts a thread that is done; the last answers the caller, and lets go of everything."""
        with self._condition:
            self._num_unfinished -= 1
            if self._num_unfinished:
                return
            assert self._command is not None
            future, combine, answers = self._command.future, self._steps.combine, self._answers
            error = self._error or self._failure
            self._command, self._error, self._failure = None, None, None
            self._cores, self._prepared, self._answers = [], [], []
        try:
            if error is None:
                resolve(future, answers[0] if combine is None else combine(answers))
            else:
                forget_locals(error)
                reject(future, error)
        finally:
            del future, error, answers  # an error refers to this frame, which must not refer to it
