"""Commands of callers to the engines, and the tasks that engine threads get for them.

A command is one class in `core.commands`. It says how it is handed out, what each engine does for
it, and how the answers are combined. A `PerEngineCommand` is done by each engine by itself, a
`core.transaction.GroupCommand` by all engines or by none.
"""

from __future__ import annotations

import dataclasses
import functools
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, Self, TypeVar

from sgljax_engine.core.calls import RequestGroups
from sgljax_engine.core.engine_core import EngineCore
from sgljax_engine.errors import EngineError, forget_locals
from sgljax_engine.processing.futures import reject, resolve
from sgljax_engine.types import Request

SHUT_DOWN = "the engine was shut down"
"""Message to calls that come after the end of the engine, or that the end interrupts."""

_T = TypeVar("_T")


class Task:
    """Work that an engine thread does between two dispatches."""

    __slots__ = ()

    @property
    def name(self) -> str:
        """Name of the task in recordings."""
        return type(self).__name__

    def run(self, core: EngineCore) -> None:
        """Does the task, on the engine's thread. An exception is a bug, and ends the engine."""
        raise NotImplementedError

    def refuse(self, make_error: Callable[[], BaseException]) -> None:
        """Tells the waiting callers, if there are any, that the task will not be done."""


class Recipients(Protocol):
    """The engines of a group, as a command sees them when it is handed out."""

    @property
    def num_engines(self) -> int:
        """Number of engines; at least one."""
        ...

    @property
    def groups(self) -> RequestGroups:
        """The calls of all engines."""
        ...

    def enqueue(self, index: int, task: Task) -> None:
        """Queues a task for one engine."""
        ...

    def route(self, requests: Sequence[Request]) -> None:
        """Gives each request an engine."""
        ...


class Command:
    """A request of a caller to all engines; `future` gets the answer, or the error."""

    __slots__ = ()

    future: Future[Any]

    def hand_out(self, group: Recipients) -> None:
        """Gives each engine that it concerns a task. Not interrupted; holds the group's lock."""
        raise NotImplementedError

    def refuse(self, make_error: Callable[[], BaseException]) -> None:
        """Answers the command with an error, when no engine will do it."""
        reject(self.future, make_error())


class PerEngineCommand(Command):
    """A command that each engine does by itself, without waiting for the others.

    The caller gets the combined answer when all engines have answered, or the first error.
    """

    __slots__ = ()

    def hand_out(self, group: Recipients) -> None:
        parts = self.parts(group.num_engines)
        if len(parts) == 1 and type(self).combine is PerEngineCommand.combine:
            group.enqueue(0, Part(parts[0], self.future))
            return
        gathered = Gathered(self.future, self.combine, len(parts))
        for index, part in enumerate(parts):
            group.enqueue(index, Part(part, gathered.future(index)))

    def parts(self, num_engines: int) -> Sequence[Self]:
        """The part of each engine; the same for all, unless a command says otherwise."""
        return [self] * num_engines

    def run(self, core: EngineCore) -> Any:
        """The engine's answer. Exceptions go to the caller."""
        raise NotImplementedError

    def start(self, core: EngineCore, future: Future[Any]) -> None:
        """Runs the command for a future, which gets the answer now or later."""
        try:
            answer(future, functools.partial(self.run, core))
        finally:
            del self, future  # see `answer`

    def combine(self, answers: Sequence[Any]) -> Any:
        """The caller's answer; the first engine's, unless a command says otherwise."""
        return answers[0]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Part(Task):
    """One engine's part of a command."""

    command: PerEngineCommand
    future: Future[Any]

    @property
    def name(self) -> str:
        return type(self.command).__name__

    def run(self, core: EngineCore) -> None:
        try:
            self.command.start(core, self.future)
        finally:
            del self  # see `answer`

    def refuse(self, make_error: Callable[[], BaseException]) -> None:
        reject(self.future, make_error())


class Ask(Protocol):
    """How other threads have the engines do a command."""

    def __call__(self, make: Callable[[Future[_T]], Command]) -> _T:
        """Has all engines do a command, and waits for the answer."""
        ...


def answer(future: Future[Any], act: Callable[[], Any]) -> None:
    """Gives a caller the result of `act`, or its error.

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
        self._caller: Future[Any] | None = caller
        self._combine: Callable[[Sequence[Any]], Any] | None = combine
        self._lock = threading.Lock()
        self._answers: list[Any] = [None] * count
        self._num_missing = count
        self._error: BaseException | None = None

    def future(self, index: int) -> Future[Any]:
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


def done_queue(futures: Sequence[Future[Any]]) -> queue.SimpleQueue[int]:
    """A queue that gets the index of each future once it is done.

    Make it before anybody else has the futures. A caller that waits for it, and not for a future,
    may be interrupted at any moment. A future's own lock would stay taken if the interrupt came
    right after its acquisition, and the thread that answers would hang.
    """
    done: queue.SimpleQueue[int] = queue.SimpleQueue()
    for index, future in enumerate(futures):
        future.add_done_callback(_putter(done, index))
    return done


def _putter(done: queue.SimpleQueue[int], index: int) -> Callable[[Future[Any]], None]:
    def put(future: Future[Any]) -> None:
        del future  # in the queue it would be part of a cycle
        done.put(index)

    return put
