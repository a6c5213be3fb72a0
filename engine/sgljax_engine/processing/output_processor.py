"""The callers that wait for requests, and the outputs that they are sent.

The engine thread publishes the results of a step, and flushes them while the next dispatch runs, so
that the device does not wait for detokenization. The detokenizer thread turns tokens into text and
answers. Watched requests, which stream or have stop strings, reach it after every dispatch that
gave them tokens; others only when they are finished.

That thread also finds stop strings. It answers the request at once, up to the token that completed
the string, and tells the engine thread to end it. Tokens that the engine generated meanwhile are
dropped.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from sgljax_engine.errors import EngineError
from sgljax_engine.observability.trace import DETOKENIZER_TRACK, Recorder
from sgljax_engine.outputs import RequestOutput
from sgljax_engine.processing.detokenizer import Detokenizer, num_text_tokens
from sgljax_engine.processing.futures import Answer, reject, resolve
from sgljax_engine.processing.incremental_text import TextStream
from sgljax_engine.processing.tokenizer import Tokenizer
from sgljax_engine.types import FinishReason, Request, StepChanges

_MAX_QUEUED = 4096

OnEnd = Callable[[Request, FinishReason], None]
"""Called with an unfinished request that was answered, and the reason to end it."""


@dataclasses.dataclass(slots=True, eq=False)
class _Sent:
    """The sent part of a watched request. Only for the detokenizer thread.

    `unsent` is text for the next piece; `num_added` counts tokens in the text, `num_tokens` in the
    pieces.
    """

    text: TextStream | None
    unsent: str = ""
    num_added: int = 0
    num_tokens: int = 0


@dataclasses.dataclass(slots=True, eq=False)
class _Record:
    """A request that a caller waits for; the engine thread changes it, and has `failure`.

    `sent` is None before the first piece of a watched request; it and `is_answered`, after which
    nothing more is sent, are the detokenizer thread's.
    """

    request: Request
    answer: Answer
    failure: EngineError | None = None
    sent: _Sent | None = None
    is_answered: bool = False


class _News(NamedTuple):
    """News of a request that is finished, or is watched and has new tokens.

    `routed` is `Request.routed` at that moment, since a retraction removes it from the request.
    """

    record: _Record
    num_tokens: int
    finish: FinishReason | None
    failure: EngineError | None
    now_s: float
    routed: np.ndarray | None


class OutputProcessor:
    """Answers requests. All methods are for the engine thread; `connect` comes first."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        recorder: Recorder,
        on_finished: Callable[[Request, EngineError | None, float], None],
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._recorder = recorder
        self._on_finished = on_finished
        self._on_end: OnEnd | None = None
        self._records: dict[str, _Record] = {}
        self._news: list[_News] = []
        self._queue: queue.Queue[_News | None] = queue.Queue(_MAX_QUEUED)
        self.thread: threading.Thread | None = None

    def connect(self, on_end: OnEnd, thread_name: str | None) -> None:
        """Sets `on_end`, and starts the detokenizer thread. Call it before the first request.

        `on_end` is called on that thread when a text has a stop string or cannot be decoded. It
        must not end the request at once, since a dispatch may be running. Without a name there is
        no thread, and `flush` does its work.
        """
        self._on_end = on_end
        if thread_name is not None:
            self.thread = threading.Thread(target=self._run, name=thread_name, daemon=True)
            self.thread.start()

    # ------------------------------------------------------------------ the registry

    def add(self, request: Request, answer: Answer) -> None:
        self._records[request.rid] = _Record(request, answer)

    def hand_over(self, request: Request) -> Answer:
        """Gives up a request that has not started; another engine answers it."""
        return self._records.pop(request.rid).answer

    def find(self, rid: str) -> Request | None:
        record = self._records.get(rid)
        return None if record is None else record.request

    def holds(self, request: Request) -> bool:
        return self.find(request.rid) is request

    def check_integrity(self, unfinished: Iterable[Request]) -> None:
        if {request.rid: request for request in unfinished} != {
            rid: record.request for rid, record in self._records.items()
        }:
            raise EngineError("the queues have other requests than those that somebody waits for")

    def fail(self, request: Request, error: EngineError) -> None:
        self._records[request.rid].failure = error

    def requests(self) -> list[Request]:
        return [record.request for record in self._records.values()]

    def publish(self, changes: StepChanges) -> None:
        """Takes the results of a step; `flush` sends them."""
        for rid, failure in changes.failures.items():
            self._records[rid].failure = failure
        for request in changes.finished:
            self.finish(request)
        for request in changes.progressed:
            record = self._records.get(request.rid)
            if record is not None and request.is_watched and not request.only_prefills:
                num_tokens, now_s = len(request.output_ids), time.perf_counter()
                self._news.append(_News(record, num_tokens, None, None, now_s, request.routed))

    def finish(self, request: Request) -> None:
        """Removes a finished request; it will be answered, with an error if it failed."""
        record, now_s = self._records[request.rid], time.perf_counter()
        self._on_finished(request, record.failure, now_s)
        # Last: `close` answers what is still here, whatever fails before.
        del self._records[request.rid]
        self._add_end(record, now_s)

    def drop(self, request: Request, error: EngineError) -> None:
        """Answers a request with an error and forgets it, after `finish` failed."""
        record = self._records.pop(request.rid, None)
        if record is not None:
            reject(record.answer.future, error)

    def answer_finished(
        self, request: Request, answer: Answer, failure: EngineError | None
    ) -> None:
        self._add_end(_Record(request, answer, failure), time.perf_counter())

    def _add_end(self, record: _Record, now_s: float) -> None:
        request, finish = record.request, record.request.finish
        num_tokens, failure = len(request.output_ids), record.failure
        if request.only_prefills:
            num_tokens = 0
            if finish is not None and finish.type == "stop":  # the token that is not reported
                finish = FinishReason("length")
        self._news.append(_News(record, num_tokens, finish, failure, now_s, request.routed))

    def flush(self) -> None:
        """Hands all news to the detokenizer thread; blocks while its queue is full."""
        news, self._news = self._news, []
        for each in news:
            if self.thread is None:
                self._handle_or_end(each)
            else:
                self._queue.put(each)

    def close(self, make_error: Callable[[], EngineError]) -> None:
        """Sends finished requests, ends the detokenizer thread, and refuses all others.

        Each gets an error of its own: one that is raised on two threads would mix up their
        tracebacks and keep both their frames alive.
        """
        self.flush()
        if self.thread is not None:
            self._queue.put(None)
            self.thread.join()
        for record in self._records.values():
            reject(record.answer.future, make_error())
        self._records.clear()

    # ------------------------------------------------------------------ the detokenizer thread

    def _run(self) -> None:
        while self._handle_or_end(self._queue.get()):
            pass

    def _handle_or_end(self, news: _News | None) -> bool:
        """Handles one item; False at the end.

        It keeps no reference: an answer or error kept while waiting for the next item would keep
        its caller's frames alive, and the engine with them.
        """
        if news is None:
            return False
        started = time.perf_counter()
        try:
            self._handle(news)
        except BaseException as error:  # a user's tokenizer may raise anything, Rust panics too
            self._fail(news, repr(error))
        if self._recorder.is_on:
            args = {"rid": news.record.request.rid, "tokens": news.num_tokens}
            ended = time.perf_counter()
            self._recorder.slice(DETOKENIZER_TRACK, "detokenize", started, ended, args)
        return True

    def _fail(self, news: _News, error: str) -> None:
        """Answers a request that cannot be detokenized, and ends it if it still runs."""
        record = news.record
        message = f"detokenizing request {record.request.rid} failed: {error}"
        record.is_answered = True
        if news.finish is None:
            self._end(record.request, FinishReason("error", message=message))
        reject(record.answer.future, EngineError(message))

    def _end(self, request: Request, reason: FinishReason) -> None:
        assert self._on_end is not None, "connect() comes first"
        self._on_end(request, reason)

    def _handle(self, news: _News) -> None:
        record = news.record
        if news.failure is not None:
            reject(record.answer.future, news.failure)
        elif record.request.is_watched:
            if not record.is_answered:
                self._follow(news)
        else:
            assert news.finish is not None
            text = self._detokenizer.text(record.request, news.finish)
            output = _output(news, slice(0, news.num_tokens), text, news.finish)
            resolve(record.answer.future, output)

    def _follow(self, news: _News) -> None:
        """Sends a piece of a watched request, or its end."""
        record, request, finish = news.record, news.record.request, news.finish
        if record.sent is None:
            record.sent = _Sent(self._detokenizer.stream(request))
        sent, num_tokens = record.sent, news.num_tokens
        if sent.text is not None:
            num_text = num_tokens if finish is None else num_text_tokens(request, finish)
            sent.text.add(request.output_ids[sent.num_added : num_text])
            sent.num_added = num_text
            sent.unsent += sent.text.take() if finish is None else sent.text.finish()
            match = sent.text.match
            if match is not None:
                num_tokens = max(match.num_tokens, sent.num_tokens)
                if finish is None:
                    sent.unsent += sent.text.finish()
                    self._end(request, FinishReason("stop", matched=match.stop_string))
                finish = FinishReason("stop", matched=match.stop_string)
        self._send(news, sent, num_tokens, finish)

    def _send(self, news: _News, sent: _Sent, num_tokens: int, finish: FinishReason | None) -> None:
        record, span = news.record, slice(sent.num_tokens, num_tokens)
        if finish is not None:
            record.is_answered = True
            resolve(record.answer.future, _output(news, span, sent.unsent, finish))
        elif record.answer.on_piece is not None:
            record.answer.on_piece(_output(news, span, sent.unsent, None))
            sent.num_tokens, sent.unsent = num_tokens, ""


def _output(news: _News, span: slice, text: str, finish: FinishReason | None) -> RequestOutput:
    request = news.record.request
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
        e2e_latency_s=news.now_s - request.arrival_s,
        time_to_first_token_s=request.time_to_first_token_s,
        num_retractions=request.num_retractions,
        token_weight_versions=request.token_versions[span].tolist(),
        draft_sources=request.draft_sources[span].tolist(),
        routed_experts=None if finish is None else _routed_experts(news, span.stop),
    )


def _routed_experts(news: _News, num_tokens: int) -> np.ndarray | None:
    """The experts of the prompt and of all output tokens but the last, if all of them are there."""
    num_rows = len(news.record.request.prompt_ids) + num_tokens - 1
    if news.routed is None or len(news.routed) < num_rows:
        return None
    return news.routed[:num_rows]
