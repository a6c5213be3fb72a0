"""The thread that turns finished requests into text, off the engine thread's path."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from concurrent.futures import Future, InvalidStateError
from typing import Any, NamedTuple, TypeVar

from sgljax_engine.errors import EngineError
from sgljax_engine.tokenizer import Tokenizer
from sgljax_engine.types import FinishReason, Request, RequestOutput

_MAX_QUEUED = 4096
_T = TypeVar("_T")


class _Item(NamedTuple):
    request: Request
    future: Future[RequestOutput]
    finished_s: float


class Detokenizer:
    """Answers the futures of finished requests. `put` and `stop` are for the engine thread."""

    def __init__(self, tokenizer: Tokenizer | None, name: str) -> None:
        """Starts the thread; without a tokenizer all text is empty."""
        self._tokenizer = tokenizer
        self._queue: queue.Queue[_Item | None] = queue.Queue(_MAX_QUEUED)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, request: Request, future: Future[RequestOutput]) -> None:
        """Takes a finished request; blocks while the queue is full."""
        self._queue.put(_Item(request, future, time.perf_counter()))

    def stop(self) -> None:
        """Answers what is queued, then ends the thread and waits for it."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                resolve(item.future, self._output(item))
            except BaseException as error:  # a user's tokenizer may raise anything, Rust panics too
                failure = EngineError(f"detokenizing request {item.request.rid} failed: {error!r}")
                reject(item.future, failure)

    def _output(self, item: _Item) -> RequestOutput:
        request = item.request
        assert request.finish is not None
        return RequestOutput(
            rid=request.rid,
            text=self._text(request.output_ids, request.finish),
            output_ids=request.output_ids,
            logprobs=request.logprobs,
            scaled_logprobs=request.scaled_logprobs,
            finish=request.finish,
            num_prompt_tokens=len(request.prompt_ids),
            num_cached_tokens=request.num_cached,
            num_cache_misses=request.num_cache_misses,
            e2e_latency_s=item.finished_s - request.arrival_s,
            num_retractions=request.num_retractions,
            weight_version=request.weight_version,
        )

    def _text(self, ids: list[int], finish: FinishReason) -> str:
        if self._tokenizer is None:
            return ""
        return self._tokenizer.decode(ids[:-1] if finish.type == "stop" else ids)


def resolve(future: Future[_T], result: _T) -> None:
    """Sets a result unless the caller has cancelled."""
    with contextlib.suppress(InvalidStateError):
        future.set_result(result)


def reject(future: Future[Any], error: BaseException) -> None:
    """Sets an exception unless the caller has cancelled."""
    with contextlib.suppress(InvalidStateError):
        future.set_exception(error)
