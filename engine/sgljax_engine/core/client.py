"""The callers' side of the engine threads: hands over commands and requests, and waits.

Any thread. No object here keeps an answer: an error refers to the frames that it passed, and one
that a frame refers to would keep all of them, and what their callers hold, until a collection.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from sgljax_engine.core import commands as cmd
from sgljax_engine.core.group import Asked, EngineGroup
from sgljax_engine.errors import EngineShutdownError
from sgljax_engine.outputs import RequestOutput
from sgljax_engine.processing.futures import Answer
from sgljax_engine.processing.streams import AsyncTokenStream, TokenStream
from sgljax_engine.types import Request

_T = TypeVar("_T")


class EngineClient:
    """Submits to a group of engines. Whoever stops waiting for requests aborts them.

    Their threads end when its client is gone: when the engine is, and all streams that it opened.
    """

    def __init__(self, group: EngineGroup) -> None:
        """Talks to a group that runs."""
        self._group = group
        finalizer = weakref.finalize(self, group.request_stop)
        finalizer.atexit = False  # the group stops itself at exit

    def ask(self, make: Callable[[Future[_T]], Asked]) -> _T:
        """Has the engine thread or a worker do something, and waits for its answer."""
        try:
            return self._group.ask(make)
        finally:
            del make

    async def async_ask(self, make: Callable[[Future[_T]], Asked]) -> _T:
        """`ask` for asyncio. Cancelling the task does not take back what was asked."""
        future: Future[_T] = Future()
        asked = make(future)
        self._group.check_may_wait(asked)
        self._group.submit(asked)
        del asked
        try:
            return await asyncio.wrap_future(future)
        finally:
            del future, make

    def generate(self, requests: list[Request]) -> list[RequestOutput]:
        """Submits requests and waits for all outputs."""
        futures = self._submit(requests)
        try:
            return list(map(Future.result, futures))
        except BaseException:
            self.abandon(requests)
            raise
        finally:
            futures.clear()

    async def async_generate(self, requests: list[Request]) -> list[RequestOutput]:
        """`generate` for asyncio."""
        futures = self._submit(requests)
        try:
            return await asyncio.gather(*(asyncio.wrap_future(f) for f in futures))
        except BaseException:
            self.abandon(requests)
            raise
        finally:
            futures.clear()

    def stream(self, requests: list[Request]) -> TokenStream:
        """Submits requests and returns the iterator over their pieces."""
        pieces = TokenStream(requests, self.abandon)
        self._submit(requests, pieces.make_answers())
        return pieces

    def async_stream(self, requests: list[Request]) -> AsyncTokenStream:
        """`stream` for the running event loop."""
        pieces = AsyncTokenStream(requests, self.abandon)
        self._submit(requests, pieces.make_answers())
        return pieces

    def abandon(self, requests: list[Request]) -> None:
        """Aborts requests that nobody waits for; does not wait for it."""
        with contextlib.suppress(EngineShutdownError):
            self._group.submit(cmd.AbandonRequests(requests, Future()))

    def _submit(
        self, requests: list[Request], answers: list[Answer] | None = None
    ) -> list[Future[RequestOutput]]:
        answers = answers or [Answer(Future()) for _ in requests]
        command = cmd.AddRequests(requests, answers)
        self._group.check_may_wait(command)
        self._group.submit(command)
        return [answer.future for answer in answers]
