"""One `generate` call in each of the forms that callers may use, and what became of it."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from concurrent.futures import Future
from typing import Any, NamedTuple

from sgljax_engine import Engine, EngineStateError, RequestOutput, SamplingParams
from sgljax_engine.core import commands as cmd
from sgljax_engine.processing.futures import Answer
from sgljax_engine.processing.input_processor import LogprobArgs
from tests import inside
from tests.threads import LIMIT_S, start


class CountingFuture(Future[RequestOutput]):
    """Counts its answers: the engine swallows the error that a second one raises."""

    def __init__(self) -> None:
        super().__init__()
        self.num_answers = 0

    def set_result(self, result: RequestOutput) -> None:
        self.num_answers += 1
        super().set_result(result)

    def set_exception(self, exception: BaseException | None) -> None:
        self.num_answers += 1
        super().set_exception(exception)


class Result(NamedTuple):
    """An answered request."""

    ids: list[int]
    versions: list[int]
    finish: str


def to_result(out: dict[str, Any]) -> Result:
    """The result of a whole output."""
    meta = out["meta_info"]
    assert meta["completion_tokens"] == len(out["output_ids"])
    return Result(out["output_ids"], meta["token_weight_versions"], meta["finish_reason"]["type"])


@dataclasses.dataclass(eq=False, kw_only=True)
class Call:
    """A `generate` call.

    Attributes:
        prompt, max_new: What it asks for, greedily.
        version: The weight version when it came.
        rids: Of its requests.
        may_abort: Somebody ended it, or may have.
        may_refuse, must_refuse: The engine was asleep, or had no weights, and does not queue.
        is_refused: It did not.
        dirty: Versions of updates under which it may have gone on over old keys and values.
        results: Its outputs, once they are there; none if the caller went away.
        lora, stop: Its adapter and stop strings.
    """

    prompt: list[int]
    max_new: int
    version: int
    rids: list[str]
    may_abort: bool = False
    may_refuse: bool = False
    must_refuse: bool = False
    is_refused: bool = False
    is_gone: bool = False
    dirty: set[int] = dataclasses.field(default_factory=set)
    results: list[Result] | None = None
    lora: str | None = None
    stop: tuple[str, ...] = ()

    def is_done(self) -> bool:
        """Whether all is answered; False also if that cannot be told without waiting."""
        return self.results is not None

    def go_away(self) -> None:
        """Cancels, as callers of this form do."""
        self.is_gone = self.may_abort = True

    def collect(self) -> None:
        """Waits for the answers."""
        if self.results is not None:
            return
        try:
            self.results = self._collect()
        except EngineStateError:
            if not self.may_refuse:
                raise
            self.is_refused, self.results = True, []
        assert self.is_refused or not self.must_refuse or self.is_gone, "it was to be refused"

    def _collect(self) -> list[Result]:
        raise NotImplementedError


@dataclasses.dataclass(eq=False, kw_only=True)
class PlainCall(Call):
    """Submitted as `Engine.generate` does, with futures that count."""

    engine: Engine
    requests: list[Any]
    futures: list[CountingFuture]

    def is_done(self) -> bool:
        return all(future.done() for future in self.futures)

    def go_away(self) -> None:
        super().go_away()
        inside.callers(self.engine).abandon(self.requests)

    def _collect(self) -> list[Result]:
        errors = [future.exception(LIMIT_S) for future in self.futures]
        assert [future.num_answers for future in self.futures] == [1] * len(self.futures)
        assert all(errors) or not any(errors), "only some of them are refused"
        results = [to_result(future.result(LIMIT_S).to_dict()) for future in self.futures]
        return [] if self.is_gone else results


@dataclasses.dataclass(eq=False, kw_only=True)
class StreamCall(Call):
    """Iterates, after all is there."""

    stream: Any

    def go_away(self) -> None:
        super().go_away()
        self.stream.close()

    def _collect(self) -> list[Result]:
        pieces = start(lambda: list(self.stream)).result(LIMIT_S)
        if self.is_gone:
            assert not pieces
            return []
        reasons = [piece["meta_info"]["finish_reason"] for piece in pieces]
        assert reasons[-1] is not None
        assert set(map(str, reasons[:-1])) <= {"None"}
        assert self.stream._events.empty(), "a stream goes on behind its last piece"
        ids = [token for piece in pieces for token in piece["output_ids"]]
        versions = [v for piece in pieces for v in piece["meta_info"]["token_weight_versions"]]
        assert pieces[-1]["meta_info"]["completion_tokens"] == len(ids)
        return [Result(ids, versions, reasons[-1]["type"])]


@dataclasses.dataclass(eq=False, kw_only=True)
class TaskCall(Call):
    """A task of asyncio."""

    loop: asyncio.AbstractEventLoop
    task: asyncio.Task[Any]
    future: Future[Any]

    def is_done(self) -> bool:
        return self.future.done()

    def go_away(self) -> None:
        super().go_away()
        self.loop.call_soon_threadsafe(self.task.cancel)
        # The task may have been over; else it aborts its requests before it ends.
        self.future.exception(LIMIT_S)

    def _collect(self) -> list[Result]:
        out = self.future.result(LIMIT_S)
        return [to_result(out)] if out is not None else []


class AsyncCaller:
    """A thread with an event loop."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()

    def generate(self, engine: Engine, **arguments: Any) -> tuple[Any, Future[Any]]:
        """Submits before it returns. The future is None if the task is cancelled."""

        async def begin():
            task = asyncio.create_task(engine.async_generate(**arguments))
            await asyncio.sleep(0)
            return task

        async def end(task):
            try:
                return await asyncio.shield(task)
            except asyncio.CancelledError:
                return None

        task = asyncio.run_coroutine_threadsafe(begin(), self.loop).result(LIMIT_S)
        return task, asyncio.run_coroutine_threadsafe(end(task), self.loop)


class Caller:
    """Makes calls of all forms."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._async = AsyncCaller()

    def call(
        self,
        form: str,
        rid: str,
        prompt: list[int],
        max_new: int,
        n: int = 1,
        lora: str | None = None,
        stop: tuple[str, ...] = (),
    ) -> Call:
        """Submits a call; it is in the engine's queue of commands when this returns."""
        engine = self.engine
        params = SamplingParams(
            temperature=0, max_new_tokens=max_new, n=n, ignore_eos=True, stop=stop
        )
        arguments: dict[str, Any] = {
            "input_ids": prompt,
            "sampling_params": params,
            "rid": rid,
            "lora": lora,
        }
        facts: dict[str, Any] = {
            "prompt": prompt,
            "max_new": max_new,
            "version": engine.weight_version,
            "rids": [rid] if n == 1 else [f"{rid}-{i}" for i in range(n)],
            "lora": lora,
            "stop": stop,
        }
        if form == "stream":
            return StreamCall(stream=engine.generate(stream=True, **arguments), **facts)
        if form == "task":
            task, future = self._async.generate(engine, **arguments)
            return TaskCall(loop=self._async.loop, task=task, future=future, **facts)
        requests = inside.make_requests(
            engine, None, params, [prompt], LogprobArgs(), False, [rid], lora
        )
        futures = [CountingFuture() for _ in requests]
        inside.submit(engine, cmd.AddRequests(requests, [Answer(future) for future in futures]))
        return PlainCall(engine=engine, requests=requests, futures=futures, **facts)
