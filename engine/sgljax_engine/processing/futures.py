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
    """Receivers of a request's output: the whole or last piece, and the pieces before it."""

    future: Future[RequestOutput]
    on_piece: Piece | None = None


def resolve(future: Future[_T], result: _T) -> None:
    with contextlib.suppress(InvalidStateError):
        future.set_result(result)


def reject(future: Future[Any], error: BaseException) -> None:
    with contextlib.suppress(InvalidStateError):
        future.set_exception(error)
