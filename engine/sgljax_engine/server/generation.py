"""Runs the prompts of HTTP requests on the engine. All methods run on the server's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, TypeVar

from fastapi import Request
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from sgljax_engine import Engine, EngineError, NonFiniteLogitsError, SamplingParams
from sgljax_engine.fleet.replica import QUARANTINED, Replica
from sgljax_engine.server.config import ServerConfig
from sgljax_engine.server.responses import (
    VERSION_HEADER,
    ClientGoneError,
    HTTPError,
    overloaded,
    with_errors,
)

HALT_HEADER = "x-halt-timeout-s"

_MIN_CHECK_S = 0.05
"""Seconds between two looks at whether generation is halted, at least."""

_LAST_ANSWERS_S = 5.0
"""Seconds for the answers of aborted requests to reach their clients."""

_SEND_TIMEOUT_S = 60.0
"""Seconds for a client to take what it was sent; one that reads nothing is taken for gone."""

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """The prompts of an HTTP request, as arguments of `Engine.generate`; lists by prompt."""

    input_ids: list[list[int]]
    sampling_params: list[SamplingParams]
    rids: list[str]
    logprobs: dict[str, Any] = dataclasses.field(default_factory=dict)
    lora: list[str | None] | None = None
    min_weight_version: int | None = None

    @property
    def num_samples(self) -> int:
        return sum(params.n for params in self.sampling_params)

    def arguments(self) -> dict[str, Any]:
        return {
            "input_ids": self.input_ids,
            "sampling_params": self.sampling_params,
            "rid": self.rids,
            "lora": self.lora,
            **self.logprobs,
        }


def new_rids(count: int, prefix: str = "") -> list[str]:
    """Fresh ids of prompts."""
    return [f"{prefix}{uuid.uuid4().hex}" for _ in range(count)]


class Generation:
    """The open requests of a server."""

    def __init__(self, engine: Engine, config: ServerConfig, replica: Replica) -> None:
        self._engine = engine
        self._replica = replica
        self._config = config
        self.is_draining = False  # new requests are refused, since the server ends
        self.num_open = 0  # samples
        self.hurry = asyncio.Event()  # ends the wait of `drain`
        self._open: dict[int, Job] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    async def generate(self, request: Request, job: Job) -> list[dict[str, Any]]:
        """All outputs of a job, in order; see `RequestOutput.to_dict`.

        Raises HTTPError 503 when there are too many requests, the server's weights are too old or
        damaged, or generation is halted too long, and ClientGoneError when the client is gone; its
        requests are aborted.
        """
        limit_s = self._halt_timeout(request)
        with self._admitted(job), _Watch(self._replica) as watch:
            task = asyncio.ensure_future(self._engine.async_generate(**job.arguments()))
            with _HaltLimit(self._engine, limit_s, task.cancel) as halt:
                outputs = await _unless_gone(request, task, halt)
            outputs = outputs if isinstance(outputs, list) else [outputs]
            for output in outputs:
                watch.name(output)
            return outputs

    async def stream(self, request: Request, job: Job) -> PieceStream:
        """The pieces of a job's outputs; the caller closes them, which aborts what is left.

        What the engine refuses at once is raised by this call, and not while iterating.
        """
        limit_s = self._halt_timeout(request)
        with contextlib.ExitStack() as admitted:
            admitted.enter_context(self._admitted(job))
            pieces = await self._engine.async_generate(**job.arguments(), stream=True)
            halt = admitted.enter_context(_HaltLimit(self._engine, limit_s, pieces.interrupt))
            return PieceStream(pieces, halt, _Watch(self._replica), admitted.pop_all())

    async def drain(self, timeout_s: float) -> None:
        """Refuses new requests; waits for those that are open, and aborts them at last.

        Those whose client takes no answer are still open when this returns.
        """
        self.is_draining = True
        if await self._is_idle_within(timeout_s):
            return
        rids = [rid for job in self._open.values() for rid in job.rids]
        with contextlib.suppress(EngineError):  # an engine that is shut down ends them itself
            await asyncio.gather(*map(self._engine.async_abort_request, rids))
        self.hurry.clear()
        await self._is_idle_within(_LAST_ANSWERS_S)

    async def _is_idle_within(self, timeout_s: float) -> bool:
        waits = [asyncio.ensure_future(event.wait()) for event in (self._idle, self.hurry)]
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for each in waits:
            each.cancel()
        return self._idle.is_set()

    def watched(self) -> contextlib.AbstractContextManager[object]:
        """Wraps a call whose non-finite logits take the replica out of service."""
        return _Watch(self._replica)

    def check_serves(self, min_weight_version: int | None) -> None:
        """Raises HTTPError 503 while the server ends, or may not serve what is asked."""
        if self.is_draining:
            raise overloaded("the server is shutting down")
        refusal = self._replica.refusal(min_weight_version)
        if refusal is not None:
            code, problem = refusal
            raise overloaded(problem, code)

    @contextlib.contextmanager
    def _admitted(self, job: Job) -> Iterator[None]:
        self.check_serves(job.min_weight_version)
        count, limit = job.num_samples, self._config.max_requests
        if count > limit:
            raise HTTPError(400, f"the request asks for {count} samples, the limit is {limit}")
        if self.num_open + count > limit:
            raise overloaded(f"{self.num_open} samples are unfinished, the limit is {limit}")
        self.num_open += count
        self._open[id(job)] = job
        self._idle.clear()
        try:
            yield
        finally:
            del self._open[id(job)]
            self.num_open -= count
            if not self.num_open:
                self._idle.set()

    def _halt_timeout(self, request: Request) -> float:
        given = request.headers.get(HALT_HEADER)
        if given is None:
            return self._config.halt_timeout_s
        try:
            value = float(given)
        except ValueError:
            value = -1.0
        if not 0 <= value < float("inf"):
            problem = f"{HALT_HEADER} must be a number of seconds >= 0, got {given!r}"
            raise HTTPError(400, problem, param=HALT_HEADER)
        return value


class PieceStream(AsyncIterator[dict[str, Any]]):
    """An engine's stream that counts as open until it is closed."""

    def __init__(
        self, pieces: Any, halt: _HaltLimit, watch: _Watch, admitted: contextlib.ExitStack
    ) -> None:
        self._pieces, self._halt, self._watch, self._admitted = pieces, halt, watch, admitted

    async def __anext__(self) -> dict[str, Any]:
        with self._watch as watch:
            try:
                piece = await anext(self._pieces)
            except StopAsyncIteration:
                self._halt.check()
                watch.check()
                raise
            watch.name(piece)
            return piece

    async def aclose(self) -> None:
        """Aborts what is unfinished. Idempotent."""
        await self._pieces.aclose()
        self._admitted.close()


class EventStream(StreamingResponse):
    """Server-sent events, which end when the client is gone, also while there is none to send."""

    def __init__(self, events: AsyncIterator[str], pieces: PieceStream, version: int) -> None:
        headers = {"Cache-Control": "no-cache", VERSION_HEADER: str(version)}
        super().__init__(with_errors(events), media_type="text/event-stream", headers=headers)
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(_SEND_TIMEOUT_S):
                await send(message)
            await asyncio.sleep(0)  # else pieces that wait would be sent after a lost connection

        sending = asyncio.ensure_future(self.stream_response(send_in_time))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            sending.cancel()
            gone.cancel()
            await self._pieces.aclose()
            await asyncio.gather(sending, gone, return_exceptions=True)


class _Watch:
    """Within it, non-finite logits take the replica out of service."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._num_quarantines = replica.num_quarantines

    def __enter__(self) -> _Watch:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, NonFiniteLogitsError):
            self._replica.found_nonfinite()
        elif error is None:
            self.check()

    def check(self) -> None:
        """Raises HTTPError when the replica was quarantined: its tokens cannot be trusted."""
        if self._replica.num_quarantines != self._num_quarantines:
            problem = f"replica {self._replica.id} was quarantined while it generated"
            raise overloaded(problem, QUARANTINED)

    def name(self, output: dict[str, Any]) -> None:
        """Says in an output which replica it is of."""
        output["meta_info"]["replica_id"] = self._replica.id


class _HaltLimit:
    """Within it, ends a call when generation is halted for too long while it waits."""

    def __init__(self, engine: Engine, limit_s: float, end: Callable[[], Any]) -> None:
        self._engine, self._limit_s, self._end = engine, limit_s, end
        self._started_s = time.perf_counter()
        self._loop = asyncio.get_running_loop()
        self._is_over = False
        self._timer: asyncio.Handle = self._loop.call_soon(self._look)

    def __enter__(self) -> _HaltLimit:
        return self

    def __exit__(self, *error: object) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        halted_s = self._engine.get_progress().halted_s
        waited_s = min(halted_s or 0.0, time.perf_counter() - self._started_s)
        left_s = self._limit_s - waited_s
        if left_s > 0 or halted_s is None:
            self._timer = self._loop.call_later(max(left_s, _MIN_CHECK_S), self._look)
            return
        self._is_over = True
        self._end()

    def check(self) -> None:
        """Raises HTTPError when it ended the call."""
        if self._is_over:
            raise overloaded(
                f"generation was paused or asleep for {self._limit_s:g} s; wait longer with the "
                f"header {HALT_HEADER}"
            )


async def _disconnected(receive: Receive) -> None:
    """Returns when the client is gone; the request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _unless_gone(request: Request, task: asyncio.Future[_T], halt: _HaltLimit) -> _T:
    """The result, or ClientGoneError; then the task is cancelled."""
    gone = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        halt.check()
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)
