"""Answers that callers wait for. Any thread."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
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
