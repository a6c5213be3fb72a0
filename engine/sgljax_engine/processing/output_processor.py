"""Who waits for which request, and what the detokenizer is told of it. Engine thread only.

What a dispatch produced is handed over when the next dispatch is on its way, so that the device
does not wait for that; but before anything else ends a request, since news of a request that is
still running must not be read as its end.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from sgljax_engine.errors import EngineError
from sgljax_engine.processing.detokenizer import Answer, Detokenizer, reject
from sgljax_engine.types import Request


class _News(NamedTuple):
    """A request that is finished, or has new tokens that somebody watches."""

    request: Request
    answer: Answer
    now_s: float
    failure: EngineError | None = None


class OutputProcessor:
    """The answers of unfinished requests."""

    def __init__(self, detokenizer: Detokenizer) -> None:
        """Nobody waits.

        Args:
            detokenizer: Sends the answers.
        """
        self._detokenizer = detokenizer
        self._waiting: dict[str, Answer] = {}
        self._failures: dict[str, EngineError] = {}
        self._news: list[_News] = []

    def add(self, request: Request, answer: Answer) -> None:
        """Takes a new request's answer."""
        self._waiting[request.rid] = answer

    def fail(self, request: Request, error: EngineError) -> None:
        """Lets a request, once it is finished, be answered with an error."""
        self._failures[request.rid] = error

    def failure(self, request: Request) -> EngineError | None:
        """What `fail` was told of a request that is not answered."""
        return self._failures.get(request.rid)

    def has_tokens(self, request: Request) -> None:
        """A watched request got tokens; does nothing if it is finished."""
        if request.rid in self._waiting:
            self._news.append(_News(request, self._waiting[request.rid], time.perf_counter()))

    def finished(self, request: Request, now_s: float) -> None:
        """A request is finished: it will be answered, with an error if it failed."""
        failure = self._failures.pop(request.rid, None)
        self._news.append(_News(request, self._waiting.pop(request.rid), now_s, failure))

    def answer_finished(
        self, request: Request, answer: Answer, failure: EngineError | None
    ) -> None:
        """Answers a request that was finished when it came."""
        self._news.append(_News(request, answer, time.perf_counter(), failure))

    def hand_over(self) -> None:
        """Gives the detokenizer all news."""
        news, self._news = self._news, []
        for item in news:
            self._detokenizer.put(item.request, item.answer, item.now_s, item.failure)

    def close(self, make_error: Callable[[], EngineError]) -> None:
        """Sends what is finished, ends the detokenizer, refuses the rest.

        Args:
            make_error: Makes the error of each unfinished request: raised on two threads, one
                would mix up their tracebacks and keep both their frames alive.
        """
        self.hand_over()
        self._detokenizer.stop()
        for answer in self._waiting.values():
            reject(answer.future, make_error())
        self._waiting.clear()
