"""Commands that inspect the engines, and those that run while the engines do nothing else."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from sgljax_engine.core.command import PerEngineCommand
from sgljax_engine.core.engine_core import EngineCore
from sgljax_engine.core.transaction import GroupCommand
from sgljax_engine.observability.combined import combine_states
from sgljax_engine.observability.metrics import EngineState
from sgljax_engine.observability.progress import ProgressListener
from sgljax_engine.runner.warmup import Extra


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class GetState(PerEngineCommand):
    """Get the state of each engine at one moment."""

    future: Future[EngineState]

    def run(self, core: EngineCore) -> EngineState:
        return core.state()

    def combine(self, answers: Sequence[EngineState]) -> EngineState:
        return combine_states(answers)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class CheckIntegrity(PerEngineCommand):
    """Fail with EngineError if queues, pages and callers contradict one another."""

    future: Future[None]

    def run(self, core: EngineCore) -> None:
        core.check_integrity()


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Run(GroupCommand):
    """Call a function once, while no engine dispatches; answers with its result."""

    function: Callable[[], Any]
    future: Future[Any]

    def together(self, cores: Sequence[EngineCore], prepared: Sequence[None]) -> list[Any]:
        del prepared
        return [self.function()] * len(cores)

    def commit(self, core: EngineCore, prepared: Any) -> Any:
        del core
        return prepared


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Warmup(PerEngineCommand):
    """Compile every bucket; answers with the number of new programs."""

    include: frozenset[Extra]
    progress: ProgressListener | None
    future: Future[int]

    def run(self, core: EngineCore) -> int:
        core.check_awake()
        try:
            return core.warmup.compile_all(self.include, self.progress)
        except BaseException:
            if core.runner.kv_memory.recover():  # a program that failed had taken the pages
                core.lose_kv()
            raise

    def combine(self, answers: Sequence[int]) -> int:
        return sum(answers)
