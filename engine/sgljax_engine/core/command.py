"""What callers ask of the engines, and what an engine thread gets to do for it.

A command is one class in `core.commands`. It says how it goes to the engines, what each does for
it, and how their answers become one. `PerEngineCommand` is for what each engine does by itself,
`core.transaction.GroupCommand` for what all of them do, or none.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, ClassVar, Protocol, Self, TypeVar

from sgljax_engine.core.engine_core import EngineCore
from sgljax_engine.core.request_groups import RequestGroups
from sgljax_engine.errors import EngineError, forget_locals
from sgljax_engine.processing.futures import reject, resolve
from sgljax_engine.types import Request

SHUT_DOWN = "the engine was shut down"
"""What calls are told that come behind the end, or that it interrupts."""

_T = TypeVar("_T")


class Task:
    """What an engine thread does between two dispatches."""

    __slots__ = ()

    @property
    def name(self) -> str:
        """What it is called in recordings."""
        return type(self).__name__

    @property
    def is_part_of_long_job(self) -> bool:
        """Whether a step comes before the next task, if there is work."""
        return False

    def run(self, core: EngineCore) -> None:
        """Does it, on the engine's thread. What it raises is a bug, which ends the engine."""
        raise NotImplementedError

    def refuse(self, make_error: Callable[[], BaseException]) -> None:
        """Tells those who wait, if anybody does, that nobody will do it."""


class Recipients(Protocol):
    """The engines of a group, as a command sees them that is handed out."""

    @property
    def num_engines(self) -> int:
        """How many there are; at least one."""
        ...

    @property
    def groups(self) -> RequestGroups:
        """The calls of all engines."""
        ...

    def give(self, index: int, task: Task) -> None:
        """Queues a task for one engine."""
        ...

    def route(self, requests: Sequence[Request]) -> None:
        """Gives each request an engine."""
        ...


class Command:
    """What callers ask of all engines.

    Attributes:
        future: Gets the answer, or the error.
    """

    __slots__ = ()

    future: Future[Any]

    def hand_out(self, group: Recipients) -> None:
        """Gives each engine that it concerns its task. Not interrupted; holds the group's lock."""
        raise NotImplementedError

    def refuse(self, make_error: Callable[[], BaseException]) -> None:
        """Answers it with an error, when nobody will do it."""
        reject(self.future, make_error())


class PerEngineCommand(Command):
    """A command that each engine does by itself, when it comes to it.

    The caller gets the combined answer when all engines have answered, or the first error.
    """

    __slots__ = ()

    is_part_of_long_job: ClassVar[bool] = False

    def hand_out(self, group: Recipients) -> None:
        """Gives each engine its part."""
        parts = self.parts(group.num_engines)
        gathered = Gathered(self.future, self.combine, len(parts))
        for index, part in enumerate(parts):
            group.give(index, Part(part, gathered.future(index)))

    def parts(self, num_engines: int) -> Sequence[Self]:
        """What each engine does; the same, unless a command says otherwise."""
        return [self] * num_engines

    def run(self, core: EngineCore) -> Any:
        """The engine's answer. What it raises is the caller's."""
        raise NotImplementedError

    def start(self, core: EngineCore, future: Future[Any]) -> None:
        """Answers a future, now or later."""
        try:
            answer(future, functools.partial(self.run, core))
        finally:
            del self, future  # see `answer`

    def combine(self, answers: Sequence[Any]) -> Any:
        """The caller's answer; the first engine's, unless a command says otherwise."""
        return answers[0]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Part(Task):
    """One engine's part of a command.

    Attributes:
        command: What it does.
        future: Gets its answer.
    """

    command: PerEngineCommand
    future: Future[Any]

    @property
    def name(self) -> str:
        """The command's."""
        return type(self.command).__name__

    @property
    def is_part_of_long_job(self) -> bool:
        """The command's."""
        return self.command.is_part_of_long_job

    def run(self, core: EngineCore) -> None:
        """Answers its future, now or later."""
        try:
            self.command.start(core, self.future)
        finally:
            del self  # see `answer`

    def refuse(self, make_error: Callable[[], BaseException]) -> None:
        """Answers it with an error."""
        reject(self.future, make_error())


class Ask(Protocol):
    """How threads beside the engines have these do something."""

    def __call__(self, make: Callable[[Future[_T]], Command], index: int | None = None) -> _T:
        """Has all engines, or one, do a command, and waits for the answer."""
        ...


def answer(future: Future[Any], act: Callable[[], Any]) -> None:
    """Hands a caller a result, or the error: they asked for it.

    An error refers to this frame, and through it to those of its callers. None of them may refer to
    the command: its future refers to the error, and it may hold weights.
    """
    try:
        result = act()
    except BaseException as error:  # a user's hook may raise anything
        forget_locals(error)
        reject(future, error)
    else:
        resolve(future, result)
    finally:
        del future, act


class Gathered:
    """Answers a caller when all engines have answered: with all answers, or the first error.

    Any thread.
    """

    def __init__(
        self, caller: Future[Any], combine: Callable[[Sequence[Any]], Any], count: int
    ) -> None:
        """Waits for the engines.

        Args:
            caller: Gets the answer.
            combine: Makes it of the engines' answers.
            count: Number of engines.
        """
        self._caller: Future[Any] | None = caller
        self._combine: Callable[[Sequence[Any]], Any] | None = combine
        self._lock = threading.Lock()
        self._answers: list[Any] = [None] * count
        self._num_missing = count
        self._error: BaseException | None = None

    def future(self, index: int) -> Future[Any]:
        """For the part of one engine."""
        future: Future[Any] = Future()
        future.add_done_callback(lambda done: self._answered(index, done))
        return future

    def _answered(self, index: int, done: Future[Any]) -> None:
        error = done.exception()
        with self._lock:
            if error is None:
                self._answers[index] = done.result()
            self._error = self._error or error
            self._num_missing -= 1
            if self._num_missing:
                return
            caller, combine = self._caller, self._combine
            answers, error = self._answers, self._error
            self._caller, self._combine, self._answers, self._error = None, None, [], None
        assert caller is not None
        assert combine is not None
        try:
            if error is not None:
                reject(caller, error)
                return
            try:
                resolve(caller, combine(answers))
            except EngineError as contradiction:
                reject(caller, contradiction)
        finally:
            del caller, combine, answers, error, done  # an error refers to this frame
