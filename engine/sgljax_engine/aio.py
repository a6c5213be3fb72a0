"""The callers' side of the engine threads: hands over commands and requests, and waits.

Any thread. From a method that says what to ask, `asks` makes the one that waits for the answer, and
`for_asyncio` its asynchronous form.

No object here keeps an answer. An error refers to the frames that it passed; if a frame referred to
the error, all of them would live until a garbage collection.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import queue
import weakref
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from sgljax_engine.checkpoint.structures import EngineCheckpoint
from sgljax_engine.core import commands as cmd
from sgljax_engine.core.command import done_queue
from sgljax_engine.core.commands.checkpoint import make_restoration
from sgljax_engine.core.group import Asked, EngineGroup
from sgljax_engine.errors import EngineShutdownError
from sgljax_engine.outputs import RequestOutput, join_pieces
from sgljax_engine.processing.futures import Answer
from sgljax_engine.processing.input_processor import RequestFactory
from sgljax_engine.processing.streams import AsyncTokenStream, TokenStream
from sgljax_engine.types import Request

_P = ParamSpec("_P")
_T = TypeVar("_T")

Asks = Callable[[Future[_T]], Asked]
"""What a method asks the engine's threads for: a command or a job, made with its future.

Callers of the method get the answer, of type T.
"""


class Callers:
    """Submits to a group of engines. A caller who stops waiting for requests aborts them.

    A caller may be interrupted anywhere: then its requests are aborted, submitted or not.

    The group's threads end when this object is gone, after the engine and all its streams.
    """

    def __init__(self, group: EngineGroup) -> None:
        """Submits to a running group."""
        self._group = group
        finalizer = weakref.finalize(self, group.request_stop)
        finalizer.atexit = False  # `processing.home` stops the group

    def ask(self, make: Asks[_T]) -> _T:
        try:
            return self._group.ask(make)
        finally:
            del make

    async def async_ask(self, make: Asks[_T]) -> _T:
        future: Future[_T] = Future()
        answer = asyncio.wrap_future(future)
        try:
            asked = make(future)
            self._group.check_may_wait(asked)
            self._group.submit(asked)
            del asked
            return await answer
        finally:
            del future, make, answer

    def generate(self, requests: list[Request]) -> list[RequestOutput]:
        answers, futures = _answers(requests)
        done = done_queue(futures)
        try:
            self._submit(requests, answers)
            return list(_results(futures, done))
        except BaseException:
            self.abandon(requests)
            raise
        finally:
            futures.clear()
            del answers  # not cleared: the command that has the list may wait still

    async def async_generate(self, requests: list[Request]) -> list[RequestOutput]:
        return await self._wait_for(requests, *_answers(requests))

    async def async_watch(
        self, requests: list[Request], on_piece: Callable[[int, RequestOutput], None]
    ) -> list[RequestOutput]:
        """`async_generate` of streaming requests; each piece but the last goes to `on_piece`."""
        pieces: list[list[RequestOutput]] = [[] for _ in requests]

        def keep(index: int, piece: RequestOutput) -> None:
            pieces[index].append(piece)
            on_piece(index, piece)

        futures: list[Future[RequestOutput]] = [Future() for _ in requests]
        answers = [
            Answer(future, functools.partial(keep, index)) for index, future in enumerate(futures)
        ]
        ends = await self._wait_for(requests, answers, futures)
        return [join_pieces([*some, end]) for some, end in zip(pieces, ends, strict=True)]

    async def _wait_for(
        self,
        requests: list[Request],
        answers: list[Answer],
        futures: list[Future[RequestOutput]],
    ) -> list[RequestOutput]:
        waits = list(map(asyncio.wrap_future, futures))
        try:
            self._submit(requests, answers)
            return await asyncio.gather(*waits)
        except BaseException:
            self.abandon(requests)
            raise
        finally:
            futures.clear()
            waits.clear()
            del answers

    def stream(self, requests: list[Request]) -> TokenStream:
        pieces = TokenStream(requests, self.abandon)
        self._submit_or_abandon(requests, pieces.make_answers)
        return pieces

    def async_stream(self, requests: list[Request]) -> AsyncTokenStream:
        pieces = AsyncTokenStream(requests, self.abandon)
        self._submit_or_abandon(requests, pieces.make_answers)
        return pieces

    def restore(
        self, checkpoint: EngineCheckpoint, requests: RequestFactory, answers: Mapping[str, Answer]
    ) -> None:
        """Has the engines take in the requests of a checkpoint; all, or none."""
        restoration = make_restoration(checkpoint, requests, answers)
        try:
            self.ask(functools.partial(cmd.Restore, restoration))
        except BaseException:
            self.abandon(restoration.unfinished)  # an interrupted caller has no futures
            raise

    def abandon(self, requests: list[Request]) -> None:
        """Aborts requests that nobody waits for, without waiting."""
        with contextlib.suppress(EngineShutdownError):
            self._group.submit(cmd.AbandonRequests(requests, Future()))

    def _submit_or_abandon(
        self, requests: list[Request], make_answers: Callable[[], list[Answer]]
    ) -> None:
        try:
            self._submit(requests, make_answers())
        except BaseException:
            self.abandon(requests)
            raise

    def _submit(self, requests: list[Request], answers: list[Answer]) -> None:
        command = cmd.AddRequests(requests, answers)
        self._group.check_may_wait(command)
        self._group.submit(command)


def _answers(requests: list[Request]) -> tuple[list[Answer], list[Future[RequestOutput]]]:
    answers = [Answer(Future()) for _ in requests]
    return answers, [answer.future for answer in answers]


def _results(
    futures: Sequence[Future[RequestOutput]], done: queue.SimpleQueue[int]
) -> Iterator[RequestOutput]:
    """The results in order, each waited for; raises the error of the first that failed."""
    over: set[int] = set()
    for index in range(len(futures)):
        while index not in over:
            over.add(done.get())
        yield futures[index].result()


class _Asking(Protocol):
    """An object whose methods ask."""

    @property
    def _calls(self) -> Callers: ...


_A = TypeVar("_A", bound=_Asking)


def asks(make: Callable[Concatenate[_A, _P], Asks[_T]]) -> Callable[Concatenate[_A, _P], _T]:
    """The method that asks for what `make` says, and waits for the answer."""

    @functools.wraps(make)
    def ask(self: _A, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        return self._calls.ask(make(self, *args, **kwargs))

    answer = make.__annotations__["return"].removeprefix("Asks[").removesuffix("]")
    signature = inspect.signature(make).replace(return_annotation=answer)
    ask.__signature__ = signature  # pyright: ignore[reportAttributeAccessIssue]
    return ask


def for_asyncio(
    method: Callable[Concatenate[_A, _P], _T],
) -> Callable[Concatenate[_A, _P], Coroutine[Any, Any, _T]]:
    """A method of `asks` for asyncio. Cancelling the task does not undo the call."""
    make: Callable[Concatenate[_A, _P], Asks[_T]] = method.__wrapped__  # pyright: ignore[reportFunctionMemberAccess]

    @functools.wraps(method)
    async def async_ask(self: _A, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        return await self._calls.async_ask(make(self, *args, **kwargs))

    async_ask.__doc__ = f"`{method.__name__}` for asyncio."
    async_ask.__name__ = f"async_{method.__name__}"
    async_ask.__qualname__ = f"Engine.{async_ask.__name__}"
    return async_ask
