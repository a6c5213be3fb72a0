"""The thread that turns tokens into text and answers, off the engine thread's path.

Requests that nobody watches come here once, when they are finished. Streamed ones and those with
stop strings come after every dispatch that gave them tokens. A stop string is found here: the
request is answered at once, cut behind the token that completed the string, and the engine thread
is told to end it; what the engine generated meanwhile is dropped.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import Any, NamedTuple, TypeVar

from sgljax_engine.errors import EngineError
from sgljax_engine.outputs import RequestOutput
from sgljax_engine.text import TextStream
from sgljax_engine.tokenizer import DecodeOptions, Tokenizer
from sgljax_engine.types import FinishReason, Request

_MAX_QUEUED = 4096
_T = TypeVar("_T")

Piece = Callable[[RequestOutput], None]
"""Takes the pieces of a streamed request, the last one excepted; on the detokenizer's thread."""


class Answer(NamedTuple):
    """Where a request's output goes.

    Attributes:
        future: Gets the whole output of a request, or the last piece of a streamed one.
        on_piece: Gets the pieces before it; None if the request is not streamed.
    """

    future: Future[RequestOutput]
    on_piece: Piece | None = None


class _Item(NamedTuple):
    request: Request
    answer: Answer
    num_tokens: int
    finish: FinishReason | None
    error: EngineError | None
    now_s: float


class _Progress:
    """What was sent of a watched request so far."""

    def __init__(self, text: TextStream | None) -> None:
        self.text = text
        self.unsent = ""
        self.num_added = 0
        self.num_sent = 0
        self.is_answered = False


class Detokenizer:
    """Answers requests. All methods are for the engine thread.

    Attributes:
        thread: Its thread.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, name: str, on_stop: Callable[[Request, str], None]
    ) -> None:
        """Starts the thread.

        Args:
            tokenizer: None leaves all text empty.
            name: Of the thread.
            on_stop: Called on the thread with a request and the stop string found in its text.
        """
        self._tokenizer = tokenizer
        self._on_stop = on_stop
        self._queue: queue.Queue[_Item | None] = queue.Queue(_MAX_QUEUED)
        self._progress: dict[str, _Progress] = {}
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def put(self, request: Request, answer: Answer, error: EngineError | None = None) -> None:
        """Takes news of a request; blocks while the queue is full.

        Args:
            request: It has new tokens, or is finished.
            answer: Where its output goes.
            error: Goes there instead of an output.
        """
        num_tokens = len(request.output_ids)
        now = time.perf_counter()
        self._queue.put(_Item(request, answer, num_tokens, request.finish, error, now))

    def stop(self) -> None:
        """Answers what is queued, then ends the thread and waits for it."""
        self._queue.put(None)
        self.thread.join()

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                self._handle(item)
            except BaseException as error:  # a user's tokenizer may raise anything, Rust panics too
                failure = EngineError(f"detokenizing request {item.request.rid} failed: {error!r}")
                reject(item.answer.future, failure)
                if item.request.rid in self._progress:
                    self._progress[item.request.rid].is_answered = True
            if item.finish is not None:
                self._progress.pop(item.request.rid, None)

    def _handle(self, item: _Item) -> None:
        if item.error is not None:
            reject(item.answer.future, item.error)
        elif is_watched(item.request):
            self._follow(item)
        else:
            assert item.finish is not None
            text = self._decode(item.request, item.finish)
            output = _output(item, slice(0, item.num_tokens), text, item.finish)
            resolve(item.answer.future, output)

    def _decode(self, request: Request, finish: FinishReason) -> str:
        if self._tokenizer is None or not request.params.detokenize:
            return ""
        return self._tokenizer.decode(_text_ids(request, finish), _decode_options(request))

    def _follow(self, item: _Item) -> None:
        """Sends a piece of a watched request, or its end."""
        request, finish = item.request, item.finish
        progress = self._progress.get(request.rid)
        if progress is None:
            progress = self._progress[request.rid] = _Progress(self._text_stream(request))
        if progress.is_answered:
            return
        num_tokens = item.num_tokens
        if progress.text is not None:
            ids = request.output_ids[:num_tokens] if finish is None else _text_ids(request, finish)
            progress.text.add(ids[progress.num_added :])
            progress.num_added = len(ids)
            progress.unsent += progress.text.take() if finish is None else progress.text.finish()
            match = progress.text.match
            if match is not None:
                num_tokens = max(match.num_tokens, progress.num_sent)
                if finish is None:
                    progress.unsent += progress.text.finish()
                    self._on_stop(request, match.stop_string)
                finish = FinishReason("stop", matched=match.stop_string)
        self._send(item, progress, num_tokens, finish)

    def _send(
        self, item: _Item, progress: _Progress, num_tokens: int, finish: FinishReason | None
    ) -> None:
        span = slice(progress.num_sent, num_tokens)
        if finish is not None:
            progress.is_answered = True
            resolve(item.answer.future, _output(item, span, progress.unsent, finish))
        elif item.answer.on_piece is not None:
            item.answer.on_piece(_output(item, span, progress.unsent, None))
            progress.num_sent, progress.unsent = num_tokens, ""

    def _text_stream(self, request: Request) -> TextStream | None:
        params = request.params
        if self._tokenizer is None or not params.detokenize:
            return None
        return TextStream(
            self._tokenizer,
            _decode_options(request),
            stop=params.stop,
            include_stop=params.include_stop_str_in_output,
            min_tokens=params.min_new_tokens,
        )


def is_watched(request: Request) -> bool:
    """Whether the request's text is needed before it is finished."""
    return request.is_streaming or bool(request.params.stop)


def _decode_options(request: Request) -> DecodeOptions:
    params = request.params
    return DecodeOptions(params.skip_special_tokens, params.spaces_between_special_tokens)


def _text_ids(request: Request, finish: FinishReason) -> list[int]:
    """The output tokens that are text: without the stop token, unless it is to be included."""
    if finish.type == "stop" and not request.params.include_stop_str_in_output:
        return request.output_ids[:-1]
    return request.output_ids


def _output(item: _Item, span: slice, text: str, finish: FinishReason | None) -> RequestOutput:
    """The output tokens of a span, with their text."""
    request = item.request
    return RequestOutput(
        rid=request.rid,
        text=text,
        output_ids=request.output_ids[span],
        logprobs=request.logprobs[span],
        processed_logprobs=request.processed_logprobs[span],
        scaled_logprobs=request.scaled_logprobs[span],
        extra_logprobs=request.extra_logprobs[span],
        prompt_logprobs=request.prompt_logprobs if span.start == 0 else None,
        logprob_options=request.logprob_options,
        prompt_ids=request.prompt_ids,
        finish=finish,
        num_cached_tokens=request.num_cached,
        num_completion_tokens=span.stop,
        num_cache_misses=request.num_cache_misses,
        e2e_latency_s=item.now_s - request.arrival_s,
        num_retractions=request.num_retractions,
        weight_version=request.weight_version,
    )


def resolve(future: Future[_T], result: _T) -> None:
    """Sets a result unless the caller has cancelled."""
    with contextlib.suppress(InvalidStateError):
        future.set_result(result)


def reject(future: Future[Any], error: BaseException) -> None:
    """Sets an exception unless the caller has cancelled."""
    with contextlib.suppress(InvalidStateError):
        future.set_exception(error)
