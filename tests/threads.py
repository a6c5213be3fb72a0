"""Threads that tests can rely on: none can hang a test, and the engine's can be held still."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TypeVar

from sgljax_engine import Engine
from sgljax_engine.core import commands as cmd
from sgljax_engine.observability.metrics import EngineState

LIMIT_S = 600
"""Far more than anything takes on a slow machine, compiling included; what waits longer hangs."""

_T = TypeVar("_T")


def start(call: Callable[[], _T]) -> Future[_T]:
    """Calls on a daemon thread. Wait with `result(LIMIT_S)`."""
    future: Future[_T] = Future()

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


@contextlib.contextmanager
def held(engine: Engine) -> Iterator[None]:
    """Keeps the engine's thread between two dispatches; commands queue up meanwhile."""
    reached, let_go = threading.Event(), threading.Event()

    def wait(_):
        reached.set()
        let_go.wait(LIMIT_S)

    future: Future[EngineState] = Future()
    future.add_done_callback(wait)
    engine._loop.submit(cmd.GetState(future))
    assert reached.wait(LIMIT_S)
    try:
        yield
    finally:
        let_go.set()
