"""The parts of an engine that tests look at or steer: the one module that knows where they are.

A test names the part that it needs, `runner(engine)` say, so that moving a part changes this module
alone. `tests/test_structure.py` looks for tests that reach past it. An engine that has no threads,
whose steps a test takes itself, is `tests/engine/stepping.py`.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from sgljax_engine import Engine
from sgljax_engine.aio import Callers
from sgljax_engine.core import commands as cmd
from sgljax_engine.core.engine_core import EngineCore
from sgljax_engine.core.group import EngineGroup
from sgljax_engine.core.loop import EngineLoop
from sgljax_engine.runner.runner import ModelRunner
from sgljax_engine.sampling_params import SeedSource
from sgljax_engine.types import Request


def group(engine: Engine) -> EngineGroup:
    """The engines of all submeshes, which do its commands."""
    return engine._group


def loops(engine: Engine) -> list[EngineLoop]:
    """The engine threads' loops, one a submesh."""
    return list(engine._group.loops)


def loop(engine: Engine) -> EngineLoop:
    """The first engine thread's loop."""
    return engine._group.loops[0]


def thread(engine: Engine) -> threading.Thread:
    """The first engine thread."""
    return loop(engine)._thread


def weights_thread(engine: Engine) -> threading.Thread:
    """The thread that prepares weights."""
    return engine._group.weights.thread


def tasks(engine: Engine) -> queue.SimpleQueue[Any]:
    """What the first engine thread has yet to do between two steps."""
    return loop(engine)._tasks


def cores(engine: Engine) -> list[EngineCore]:
    """What the engine threads own, one a submesh."""
    return [each._core for each in engine._group.loops]


def core(engine: Engine) -> EngineCore:
    """What the first engine thread owns."""
    return loop(engine)._core


def runner(engine: Engine) -> ModelRunner:
    """The first engine's weights, KV memory and programs."""
    return core(engine).runner


def callers(engine: Engine) -> Callers:
    """What callers of all kinds go through, and wait in."""
    return engine._calls


def make_requests(engine: Engine, *arguments: Any) -> list[Request]:
    """The requests that `Engine.generate` makes of its arguments, which nobody has submitted."""
    made, _ = engine._make_requests(*arguments)
    return made


def ask(engine: Engine, make: Callable[[Future[Any]], cmd.Command]) -> Any:
    """Has the engine do a command that `make` gives a future, and waits for its answer."""
    return callers(engine).ask(make)


def submit(engine: Engine, command: cmd.Command) -> None:
    """Queues a command as callers do; its future has the answer."""
    engine._group.submit(command)


def seeds(engine: Engine) -> SeedSource:
    """What requests without a seed get theirs from."""
    return engine._requests.seeds
