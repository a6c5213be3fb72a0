"""How the engines of a group do one thing: all of them, or none.

Each engine thread prepares, which may fail and changes nothing that serves. The threads wait for
one another; the last to come does what is needed only once. Then all commit, or all roll back,
those that could not prepare included. A single engine is a group of one, whose thread waits for
nobody.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any

from sgljax_engine.core.command import Command, Recipients, Task
from sgljax_engine.core.engine_core import EngineCore
from sgljax_engine.errors import forget_locals
from sgljax_engine.processing.futures import reject, resolve


class GroupCommand(Command):
    """A command that all engines do, or none.

    All exceptions of `prepare` and `together` go to the caller. One of `commit` or `rollback` ends
    a group of several engines, since these may differ afterwards.
    """

    __slots__ = ()

    def hand_out(self, group: Recipients) -> None:
        transaction = Transaction(self, group.num_engines)
        for index in range(group.num_engines):
            group.enqueue(index, TakePart(transaction, index))

    def prepare(self, core: EngineCore) -> Any:
        """Prepares for the other methods, on each engine's thread; changes nothing that serves."""

    def together(self, cores: Sequence[EngineCore], prepared: Sequence[Any]) -> Sequence[Any]:
        """The values that the engines commit. Called once, on any thread, while all wait."""
        del cores
        return prepared

    def commit(self, core: EngineCore, prepared: Any) -> Any:
        """Commits, on each engine's thread; returns the engine's answer. Must not fail."""

    def rollback(self, core: EngineCore, prepared: Any, error: BaseException) -> None:
        """Undoes `prepare`, on every engine's thread, in place of `commit`. Must not fail.

        An engine that could not prepare gets None for `prepared`.
        """

    def combine(self, answers: Sequence[Any]) -> Any:
        """The caller's answer; the first engine's, unless a command says otherwise."""
        return answers[0]


class Transaction:
    """One command, for all engine threads of a group."""

    def __init__(self, command: GroupCommand, num_engines: int) -> None:
        self.name = type(command).__name__
        self._command: GroupCommand | None = command
        self._condition = threading.Condition()
        self._missing = set(range(num_engines))
        self._cores: list[EngineCore | None] = [None] * num_engines
        self._prepared: list[Any] = [None] * num_engines
        self._answers: list[Any] = [None] * num_engines
        self._is_decided = False
        self._num_unfinished = num_engines
        self._error: BaseException | None = None  # fixed once it is decided
        self._failure: BaseException | None = None  # of a commit or rollback

    def take_part(self, index: int, core: EngineCore) -> None:
        """Does an engine's part, on its thread; waits for the others in between.

        Also raises the error that ends the group.
        """
        command, error = self._command, None
        assert command is not None
        prepared = None
        try:
            prepared = command.prepare(core)
        except BaseException as failure:  # a user's hook may raise anything
            error = failure
        try:
            self._arrive(index, core, prepared, error)
            try:
                if self._error is None:
                    self._answers[index] = command.commit(core, self._prepared[index])
                else:
                    command.rollback(core, prepared, self._error)
            except BaseException as failure:
                with self._condition:
                    self._failure = self._failure or failure
                if len(self._cores) > 1 or not isinstance(failure, Exception):
                    raise
        finally:
            del command, error, prepared  # an error refers to this frame
            self._leave()

    def refuse(self, index: int, make_error: Callable[[], BaseException]) -> None:
        """Notes that an engine's thread will not come; does nothing if it came. Does not wait."""
        with self._condition:
            if index not in self._missing:
                return
            self._error = self._error or make_error()
            self._came(index)
        self._leave()

    def _arrive(
        self, index: int, core: EngineCore, prepared: Any, error: BaseException | None
    ) -> None:
        with self._condition:
            self._cores[index], self._prepared[index] = core, prepared
            self._error = self._error or error
            self._came(index)
            self._condition.wait_for(lambda: self._is_decided)

    def _came(self, index: int) -> None:
        """Counts a thread; the last one does what is needed only once."""
        self._missing.remove(index)
        if self._missing:
            return
        if self._error is None:
            assert self._command is not None
            try:
                cores = [core for core in self._cores if core is not None]
                self._prepared = list(self._command.together(cores, self._prepared))
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
            command, answers = self._command, self._answers
            assert command is not None
            future, combine = command.future, command.combine
            error = self._error or self._failure
            self._command, self._error, self._failure = None, None, None
            self._cores, self._prepared, self._answers = [], [], []
        try:
            if error is None:
                resolve(future, combine(answers))
            else:
                del combine
                forget_locals(error)
                reject(future, error)
        finally:
            # An error refers to this frame, which must not refer to it.
            del command, future, error, answers


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class TakePart(Task):
    """Take part in a transaction."""

    transaction: Transaction
    index: int

    @property
    def name(self) -> str:
        return self.transaction.name

    def run(self, core: EngineCore) -> None:
        self.transaction.take_part(self.index, core)

    def refuse(self, make_error: Callable[[], BaseException]) -> None:
        self.transaction.refuse(self.index, make_error)
