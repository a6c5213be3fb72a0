from __future__ import annotations

import asyncio
import queue
import sys
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from typing import Any, NamedTuple

from sgljax_engine.outputs import RequestOutput
from sgljax_engine.processing.futures import Answer
from sgljax_engine.processing.home import HomeProcess
from sgljax_engine.types import Request


class _Event(NamedTuple):
    """A piece of the output with its index in the call, or the error of its request.

    The piece with a finish reason is the last.
    """

    output_index: int
    output: RequestOutput | None
    error: BaseException | None = None


def _make_answers(count: int, put: Callable[[_Event], None]) -> list[Answer]:
    """Answers that pass every piece, and finally the last one or an error, to `put`.

    `put` is called on the detokenizer thread, and at shutdown on the engine thread.
    """

    def answer(index: int) -> Answer:
        def end(done: Future[RequestOutput]) -> None:
            error = done.exception()
            put(_Event(index, None, error) if error else _Event(index, done.result()))

        future: Future[RequestOutput] = Future()
        future.add_done_callback(end)
        return Answer(future, lambda piece: put(_Event(index, piece)))

    return [answer(index) for index in range(count)]


class _Pieces:
    """State of both iterators: the unfinished requests, and how to end them."""

    def __init__(self, requests: list[Request], abandon: Callable[[list[Request]], None]) -> None:
        self._open = dict(enumerate(requests))
        self._abandon = abandon
        self._home = HomeProcess("stream")

    def _to_item(self, event: _Event) -> dict[str, Any] | None:
        """The dict to return; raises the error of a failed request.

        None if the stream was closed meanwhile, by another thread or task.
        """
        index, output, error = event
        if index not in self._open:
            return None
        if output is None:
            assert error is not None
            try:
                raise error
            finally:
                # An error refers to the frames that it passed. If a frame referred to it, it would
                # keep them and their locals alive until a garbage collection.
                del event, error
        if output.finish is not None:
            self._open.pop(index, None)
        return {"index": index, **output.to_dict()}

    def _end(self) -> None:
        if self._open:
            self._abandon(list(self._open.values()))
            self._open = {}

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # At interpreter exit the engine is gone, and modules may have lost their globals. A caller
        # who was interrupted in `__init__` leaves an empty object.
        if self.__dict__ and not is_finalizing():
            self._end()


class TokenStream(_Pieces, Iterator[dict[str, Any]]):
    """Result of `Engine.generate(stream=True)`. For one thread at a time.

    Each item is a dict like `generate`'s with `index`, the output's index among those of the call.
    Its `text`, `output_ids` and log-probs are those since the output's last item. Text never ends
    inside a UTF-8 character, and adds up to the text of the whole output.
    `meta_info["finish_reason"]` is None except in an output's last item.

    `close`, or dropping the iterator, aborts unfinished requests.
    """

    def __init__(self, requests: list[Request], abandon: Callable[[list[Request]], None]) -> None:
        """Iterates over requests that the caller submits with `make_answers`."""
        super().__init__(requests, abandon)
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()

    def make_answers(self) -> list[Answer]:
        """Answers for the requests. Neither they nor the stream hold a reference to the other."""
        return _make_answers(len(self._open), self._events.put)

    def __next__(self) -> dict[str, Any]:
        if not self._open:
            raise StopIteration
        self._home.check()
        try:
            piece = self._to_item(self._events.get())
        except BaseException:  # the request failed, or an interrupt
            self._end()
            raise
        if piece is None:
            raise StopIteration
        return piece

    def close(self) -> None:
        """Aborts unfinished requests and ends the iteration. Idempotent."""
        self._end()


class AsyncTokenStream(_Pieces, AsyncIterator[dict[str, Any]]):
    """Result of `Engine.async_generate(stream=True)`; items are those of `TokenStream`.

    `aclose`, dropping the iterator, or cancelling a task that waits in it aborts unfinished
    requests.
    """

    def __init__(self, requests: list[Request], abandon: Callable[[list[Request]], None]) -> None:
        """Iterates in the event loop that runs now; arguments are those of `TokenStream`."""
        super().__init__(requests, abandon)
        self._events: asyncio.Queue[_Event] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    def make_answers(self) -> list[Answer]:
        """Answers for the requests, which hand their events to the event loop."""
        loop, events, ref = self._loop, self._events, weakref.ref(self)

        def put(event: _Event) -> None:
            try:
                loop.call_soon_threadsafe(events.put_nowait, event)
            except RuntimeError:  # the loop is closed: no one will ever read
                stream = ref()
                if stream is not None:
                    stream._end()

        return _make_answers(len(self._open), put)

    async def __anext__(self) -> dict[str, Any]:
        if not self._open:
            raise StopAsyncIteration
        self._home.check()
        if asyncio.get_running_loop() is not self._loop:
            raise RuntimeError("the stream was made in another event loop than this one")
        try:
            piece = self._to_item(await self._events.get())
        except BaseException:  # the request failed, or the task was cancelled
            self._end()
            raise
        if piece is None:
            raise StopAsyncIteration
        return piece

    async def aclose(self) -> None:
        """Aborts unfinished requests and ends the iteration. Idempotent."""
        self._end()

    def interrupt(self) -> None:
        """`aclose` for a callback of the event loop; also ends a wait for the next item."""
        self._end()
        self._events.put_nowait(_Event(-1, None))
