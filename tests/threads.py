"""Threads that tests can rely on: none can hang a test, and the engine's can be held still."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

from sgljax_engine import Engine, EngineShutdownError, RequestOutput
from sgljax_engine.aio import Callers
from sgljax_engine.core import commands as cmd
from sgljax_engine.types import Request
from tests import inside

LIMIT_S = 600
"""Far more than anything takes on a slow machine, compiling included; what waits longer hangs."""

_T = TypeVar("_T")


class Call(Future[_T]):
    """What `start` returns. Gated engines run while the main thread waits for it."""

    def result(self, timeout: float | None = None) -> _T:
        """The result, as `Future` gives it."""
        with running():
            return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """The exception, as `Future` gives it."""
        with running():
            return super().exception(timeout)


def start(call: Callable[[], _T]) -> Future[_T]:
    """Calls on a daemon thread. Wait with `result(LIMIT_S)`."""
    future: Call[_T] = Call()

    def run():
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def wait_for(condition: Callable[[], bool]) -> None:
    """Looks at something again and again until it holds."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.001)


_gated: weakref.WeakSet[Engine] = weakref.WeakSet()


class _GatedCallers(Callers):
    def generate(self, requests: list[Request]) -> list[RequestOutput]:
        with running():
            return super().generate(requests)


class _GatedEngine(Engine):
    def restore_checkpoint(
        self, path: str | Path, *, missing_ok: bool = False
    ) -> dict[str, Future[RequestOutput]]:
        futures = super().restore_checkpoint(path, missing_ok=missing_ok)
        return {rid: _as_call(future) for rid, future in futures.items()}


def _as_call(future: Future[_T]) -> Future[_T]:
    call: Call[_T] = Call()

    def copy(done: Future[_T]) -> None:
        error = done.exception()
        if error is None:
            call.set_result(done.result())
        else:
            call.set_exception(error)

    future.add_done_callback(copy)
    return call


def gate_steps(engine: Engine) -> Engine:
    """The engine takes steps only in `take_steps`, and while the main thread is in `running`.

    It does commands all the time. So whoever sees that a request runs can interrupt it before it is
    finished, however long that takes. The main thread is in `running` while it waits for what
    `start`, `generate` or `restore_checkpoint` gave it.
    """
    if engine not in _gated:
        _gated.add(engine)
        _set_steps(engine, 0)
        # Not attributes of the objects: these would refer to themselves, and outlive their tests.
        inside.callers(engine).__class__ = _GatedCallers
        engine.__class__ = _GatedEngine
    return engine


def is_gated(engine: Engine) -> bool:
    """Whether the engine takes steps only when it is told to."""
    return engine in _gated


def take_steps(engine: Engine, count: int = 1) -> None:
    """Has a gated engine take steps, as far as there is something to do."""
    assert is_gated(engine)
    cores = inside.cores(engine)
    _set_steps(engine, count)
    # Answered between two steps, or when none can be taken.
    can_step = functools.partial(cmd.Run, lambda: any(core.can_step for core in cores))
    while inside.ask(engine, can_step):
        pass
    _set_steps(engine, 0)


@contextlib.contextmanager
def running() -> Iterator[None]:
    """Gated engines take steps by themselves, since the main thread waits for their outputs."""
    is_main = threading.current_thread() is threading.main_thread()
    engines = [engine for engine in _gated if is_main]
    for engine in engines:
        _set_steps(engine, None)
    _gated.difference_update(engines)
    try:
        yield
    finally:
        _gated.update(engines)
        for engine in engines:
            _set_steps(engine, 0)


def first_piece(stream: Iterator[_T]) -> _T:
    """The next item of a stream of a gated engine, which runs until it is there."""
    with running():
        return next(stream)


def _set_steps(engine: Engine, count: int | None) -> None:
    cores = inside.cores(engine)

    def set_all() -> None:
        for core in cores:  # not the engine, which this would keep alive
            core.steps_left = count

    with contextlib.suppress(EngineShutdownError):
        inside.submit(engine, cmd.Run(set_all, Future()))


@contextlib.contextmanager
def held(engine: Engine) -> Iterator[None]:
    """Keeps the engine's thread between two dispatches; commands queue up meanwhile."""
    reached, let_go = threading.Event(), threading.Event()

    def wait() -> None:
        reached.set()
        let_go.wait(LIMIT_S)

    inside.submit(engine, cmd.Run(wait, Future()))
    assert reached.wait(LIMIT_S)
    try:
        yield
    finally:
        let_go.set()
