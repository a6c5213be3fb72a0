"""Iterators over the pieces of streamed requests, for threads and for asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import queue
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from typing import Any

from sgljax_engine.detokenizer import Answer
from sgljax_engine.outputs import RequestOutput
from sgljax_engine.types import Request

_Event = tuple[int, RequestOutput | Future[RequestOutput]]
"""Index of the request, and a piece of its output or its finished future."""


def make_answers(count: int, put: Callable[[_Event], None]) -> list[Answer]:
    """Answers that hand every piece, and the finished future at the end, to `put`.

    `put` is called on the detokenizer's thread, at shutdown on the engine's.
    """

    def answer(index: int) -> Answer:
        future: Future[RequestOutput] = Future()
        future.add_done_callback(lambda done: put((index, done)))
        return Answer(future, lambda piece: put((index, piece)))

    return [answer(index) for index in range(count)]


class _Pieces:
    """What both iterators know: which requests go on, and how to end them."""

    def __init__(self, requests: list[Request], abandon: Callable[[list[Request]], None]) -> None:
        self._open = dict(enumerate(requests))
        self._abandon = abandon

    def _take(self, event: _Event) -> dict[str, Any]:
        """The dict to hand out; raises what the request failed with, and ends the others."""
        index, news = event
        if isinstance(news, Future):
            del self._open[index]
            try:
                news = news.result()
            except BaseException:
                self._end()
                raise
        return {"index": index, **news.to_dict()}

    def _end(self) -> None:
        if self._open:
            self._abandon(list(self._open.values()))
            self._open = {}

    def __del__(self) -> None:
        self._end()


class TokenStream(_Pieces, Iterator[dict[str, Any]]):
    """What `Engine.generate(stream=True)` returns. For one thread at a time.

    Each item is a dict like `generate`'s with `index`, the place of the output among those of the
    call, and what is new: `text` and `output_ids` (and log-probs) since the output's last item.
    Text never ends inside a UTF-8 character, and adds up to the text of the whole output.
    `meta_info["finish_reason"]` is None but in an output's last item.

    `close`, or dropping the iterator, aborts what is unfinished.
    """

    def __init__(self, requests: list[Request], abandon: Callable[[list[Request]], None]) -> None:
        """Makes `answers` for the requests; they are to be submitted with them."""
        super().__init__(requests, abandon)
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self.answers = make_answers(len(requests), self._events.put)

    def __next__(self) -> dict[str, Any]:
        """Waits for the next item."""
        if not self._open:
            raise StopIteration
        try:
            event = self._events.get()
        except BaseException:  # an interrupt
            self._end()
            raise
        return self._take(event)

    def close(self) -> None:
        """Aborts what is unfinished; there are no more items. Idempotent."""
        self._end()


class AsyncTokenStream(_Pieces, AsyncIterator[dict[str, Any]]):
    """What `Engine.async_generate(stream=True)` returns; items as those of `TokenStream`.

    `aclose`, dropping the iterator, or cancelling a task that waits in it aborts what is
    unfinished.
    """

    def __init__(self, requests: list[Request], abandon: Callable[[list[Request]], None]) -> None:
        """Makes `answers` for the requests. Needs a running event loop, the one to iterate in."""
        super().__init__(requests, abandon)
        self._events: asyncio.Queue[_Event] = asyncio.Queue()
        loop, events = asyncio.get_running_loop(), self._events

        def put(event: _Event) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(events.put_nowait, event)

        self.answers = make_answers(len(requests), put)

    async def __anext__(self) -> dict[str, Any]:
        """Waits for the next item."""
        if not self._open:
            raise StopAsyncIteration
        try:
            event = await self._events.get()
        except BaseException:
            self._end()
            raise
        return self._take(event)

    async def aclose(self) -> None:
        """Aborts what is unfinished; there are no more items. Idempotent."""
        self._end()
