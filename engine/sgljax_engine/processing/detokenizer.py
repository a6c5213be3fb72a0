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
from sgljax_engine.observability.trace import DETOKENIZER_TRACK, Recorder
from sgljax_engine.outputs import RequestOutput
from sgljax_engine.processing.incremental_text import TextStream
from sgljax_engine.processing.tokenizer import Tokenizer, decode_options
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
        self,
        tokenizer: Tokenizer | None,
        name: str,
        on_end: Callable[[Request, FinishReason], None],
        recorder: Recorder,
    ) -> None:
        """Starts the thread.

        Args:
            tokenizer: None leaves all text empty.
            name: Of the thread.
            on_end: Called on the thread with an unfinished request that was answered, since its
                text has a stop string or cannot be decoded, and why it ends.
            recorder: Notes what is done.
        """
        self._tokenizer = tokenizer
        self._on_end = on_end
        self._recorder = recorder
        self._queue: queue.Queue[_Item | None] = queue.Queue(_MAX_QUEUED)
        self._progress: dict[str, _Progress] = {}
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def put(
        self, request: Request, answer: Answer, now_s: float, error: EngineError | None = None
    ) -> None:
        """Takes news of a request; blocks while the queue is full.

        Args:
            request: It has new tokens, or is finished.
            answer: Where its output goes.
            now_s: When that was, by `time.perf_counter`.
            error: Goes there instead of an output.
        """
        num_tokens = len(request.output_ids)
        self._queue.put(_Item(request, answer, num_tokens, request.finish, error, now_s))

    def stop(self) -> None:
        """Answers what is queued, then ends the thread and waits for it."""
        self._queue.put(None)
        self.thread.join()

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        while self._take():
            pass
        self._progress.clear()

    def _take(self) -> bool:
        """Handles one item; False at the end.

        What it holds is gone when it returns: an answer or an error kept while waiting for the
        next item would keep its caller's frames alive, and the engine with them.
        """
        item = self._queue.get()
        if item is None:
            return False
        began = time.perf_counter()
        try:
            self._handle(item)
        except BaseException as error:  # a user's tokenizer may raise anything, Rust panics too
            self._fail(item, repr(error))
        if item.finish is not None:
            self._progress.pop(item.request.rid, None)
        if self._recorder.is_on:
            args = {"rid": item.request.rid, "tokens": item.num_tokens}
            ended = time.perf_counter()
            self._recorder.slice(DETOKENIZER_TRACK, "detokenize", began, ended, args)
        return True

    def _fail(self, item: _Item, error: str) -> None:
        """Answers a request that cannot be detokenized, and ends it if it still runs."""
        message = f"detokenizing request {item.request.rid} failed: {error}"
        if item.finish is None:
            progress = self._progress.setdefault(item.request.rid, _Progress(None))
            progress.is_answered = True
            self._on_end(item.request, FinishReason("error", message=message))
        reject(item.answer.future, EngineError(message))

    def _handle(self, item: _Item) -> None:
        if item.error is not None:
            reject(item.answer.future, item.error)
        elif item.request.is_watched:
            self._follow(item)
        else:
            assert item.finish is not None
            text = self._decode(item.request, item.finish)
            output = _output(item, slice(0, item.num_tokens), text, item.finish)
            resolve(item.answer.future, output)

    def _decode(self, request: Request, finish: FinishReason) -> str:
        if self._tokenizer is None or not request.params.detokenize:
            return ""
        ids = request.output_ids[: _num_text_tokens(request, finish)]
        return self._tokenizer.decode(ids, decode_options(request.params))

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
            num_text = num_tokens if finish is None else _num_text_tokens(request, finish)
            progress.text.add(request.output_ids[progress.num_added : num_text])
            progress.num_added = num_text
            progress.unsent += progress.text.take() if finish is None else progress.text.finish()
            match = progress.text.match
            if match is not None:
                num_tokens = max(match.num_tokens, progress.num_sent)
                if finish is None:
                    progress.unsent += progress.text.finish()
                    self._on_end(request, FinishReason("stop", matched=match.stop_string))
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
            decode_options(params),
            stop=params.stop,
            include_stop=params.include_stop_str_in_output,
            min_tokens=params.min_new_tokens,
        )


def _num_text_tokens(request: Request, finish: FinishReason) -> int:
    """The output tokens that are text: without the stop token, unless it is to be included."""
    has_stop_token = finish.type == "stop" and not isinstance(finish.matched, str)
    is_left_out = has_stop_token and not request.params.include_stop_str_in_output
    return len(request.output_ids) - is_left_out


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
        time_to_first_token_s=request.time_to_first_token_s,
        num_retractions=request.num_retractions,
        token_weight_versions=request.token_versions[span].tolist(),
    )


def resolve(future: Future[_T], result: _T) -> None:
    """Sets a result unless the caller has cancelled."""
    with contextlib.suppress(InvalidStateError):
        future.set_result(result)


def reject(future: Future[Any], error: BaseException) -> None:
    """Sets an exception unless the caller has cancelled."""
    with contextlib.suppress(InvalidStateError):
        future.set_exception(error)
