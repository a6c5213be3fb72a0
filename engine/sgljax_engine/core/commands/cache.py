"""Commands that empty the KV cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from concurrent.futures import Future

from sgljax_engine.core.engine_core import EngineCore
from sgljax_engine.core.transaction import GroupCommand
from sgljax_engine.errors import EngineStateError
from sgljax_engine.io_struct import FlushCacheReqInput, FlushCacheReqOutput


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class FlushCache(GroupCommand):
    """Empty the prefix cache and reset scheduling, unless requests hold pages."""

    request: FlushCacheReqInput
    future: Future[FlushCacheReqOutput]

    def prepare(self, core: EngineCore) -> str:
        """Why the prefix cache cannot be emptied; "" if it can."""
        return _pages_in_use(core)

    def together(self, cores: Sequence[EngineCore], prepared: Sequence[str]) -> list[str]:
        """Every engine's problem is that of the first engine with one."""
        return [next(filter(None, prepared), "")] * len(cores)

    def commit(self, core: EngineCore, prepared: str) -> FlushCacheReqOutput:
        """Empties the prefix cache and resets scheduling."""
        if prepared:
            return FlushCacheReqOutput(success=False, error_msg=prepared)
        flushed = core.pool.num_cached * core.pool.page_size
        core.pool.reset_cache()
        core.scheduler.reset_policy()
        core.stats.num_decodes = 0
        return FlushCacheReqOutput(success=True, flushed_items=flushed)

    def combine(self, answers: Sequence[FlushCacheReqOutput]) -> FlushCacheReqOutput:
        """The tokens of all engines."""
        if not answers[0].success:
            return answers[0]
        flushed = sum(answer.flushed_items for answer in answers)
        return FlushCacheReqOutput(success=True, flushed_items=flushed)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ReleaseKV(GroupCommand):
    """Give the memory of the KV cache back; answers with its bytes."""

    future: Future[int]

    def prepare(self, core: EngineCore) -> None:
        """Raises EngineStateError when requests hold pages."""
        problem = _pages_in_use(core)
        if problem:
            raise EngineStateError(f"the KV cache cannot be released: {problem}")

    def commit(self, core: EngineCore, prepared: None) -> int:
        """Gives the memory back; returns its bytes."""
        del prepared
        core.pool.reset_cache()
        return core.runner.kv_memory.release()

    def combine(self, answers: Sequence[int]) -> int:
        """The bytes of all engines."""
        return sum(answers)


def _pages_in_use(core: EngineCore) -> str:
    """Why the KV cache cannot be emptied; "" if it can."""
    num_running = len(core.scheduler.running)
    if not num_running:
        return ""
    return (
        f"{num_running} running request(s) hold KV pages; "
        "pause_generation(mode='retract') or 'abort' first"
    )
