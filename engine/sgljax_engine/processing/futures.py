"""Answers that callers wait for. Any thread."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from typing import Any, NamedTuple, TypeVar

from sgljax_engine.outputs import RequestOutput

_T = TypeVar("_T")

Piece = Callable[[RequestOutput], None]
"""Takes all pieces of a streamed request except the last; on the detokenizer thread."""


class Answer(NamedTuple):
    """The receivers of a request's output.

    Attributes:
        future: Gets the whole output of a request, or the last piece of a streamed one.
        on_piece: Gets the pieces before it; None if the request is not streamed.
    """

    future: Future[RequestOutput]
    on_piece: Piece | None = None


def resolve(future: Future[_T], result: _T) -> None:
    """Sets a result unless the caller has cancelled."""
    with contextlib.suppress(InvalidStateError):
        future.set_result(result)


def reject(future: Future[Any], error: BaseException) -> None:
    """Sets an exception unless the caller has cancelled."""
    with contextlib.suppress(InvalidStateError):
        future.set_exception(error)


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
