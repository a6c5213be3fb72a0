"""Commands that free the devices' memory and allocate it again, and that empty the KV cache."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future

from sgljax_engine.core.engine_core import EngineCore
from sgljax_engine.core.transaction import GroupCommand
from sgljax_engine.errors import EngineStateError
from sgljax_engine.io_struct import (
    SLEEP_TAGS,
    FlushCacheReqInput,
    FlushCacheReqOutput,
    SleepTag,
)
from sgljax_engine.runner.sleep import HostCopies

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Sleep(GroupCommand):
    """Free the devices' memory; answers with its bytes.

    Without a rollback: to prepare only copies, and an engine that prepared has not slept. Level 1
    keeps the weights on the host, 2 gives them up; `preserve_state` keeps weights, KV pages and
    prefix cache on the host, whatever the level.
    """

    level: int
    preserve_state: bool
    tags: tuple[SleepTag, ...]
    refuse_requests: bool
    future: Future[int]

    def prepare(self, core: EngineCore) -> tuple[float, HostCopies] | None:
        """Makes the copies to keep; None if all of it sleeps already."""
        manager, serving = core.sleep_manager, core.serving
        if not set(self.tags) - set(manager.asleep):
            what = "the engine" if self.tags == SLEEP_TAGS else list(self.tags)
            logger.warning("sleep: %s sleeps already; nothing was changed", what)
            return None
        started_s = time.perf_counter()
        keeps_all = self.preserve_state
        if self.level == 2 and not keeps_all and serving.adapters.names:
            raise EngineStateError(
                "sleep(level=2) would give up the adapters "
                f"{', '.join(map(repr, serving.adapters.names))} with the weights: unload them "
                "before, or sleep with level=1"
            )
        core.runner.kv_memory.wait()
        weights = "weights" in self.tags and (keeps_all or self.level == 1)
        return started_s, manager.keep(weights=weights, pages="kv_cache" in self.tags and keeps_all)

    def commit(self, core: EngineCore, prepared: tuple[float, HostCopies] | None) -> int:
        if prepared is None:
            return 0
        started_s, copies = prepared
        manager = core.sleep_manager
        new = set(self.tags) - set(manager.asleep)
        if not self.preserve_state and "kv_cache" in new:
            core.retract_all()
            core.pool.reset_cache()
        if "weights" in new:
            core.serving.forget_unmade_digest()
        num_bytes = manager.sleep(copies, self.tags, refuses_requests=self.refuse_requests)
        core.counters.num_sleeps += 1
        core.counters.sleep_s += time.perf_counter() - started_s
        core.recorder.begin("asleep", {"level": self.level})
        core.refuse_if_held()
        return num_bytes

    def combine(self, answers: Sequence[int]) -> int:
        return sum(answers)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class WakeUp(GroupCommand):
    """Allocate the memory of these tags again; answers with its bytes."""

    tags: tuple[SleepTag, ...]
    future: Future[int]

    def prepare(self, core: EngineCore) -> tuple[list[SleepTag], int]:
        """Allocates the memory of the tags that sleep; returns them and the bytes."""
        manager = core.sleep_manager
        asleep: list[SleepTag] = [tag for tag in manager.asleep if tag in self.tags]
        if not asleep:
            logger.warning("wake_up: %s is awake; nothing was changed", list(self.tags))
            return [], 0
        return asleep, manager.prepare_wake_up(asleep)

    def commit(self, core: EngineCore, prepared: tuple[list[SleepTag], int]) -> int:
        """Drops the copies of what is awake again; returns the allocated bytes."""
        manager = core.sleep_manager
        tags, num_bytes = prepared
        if not tags:
            return 0
        manager.wake_up(tags)
        if not core.runner.weights and "weights" not in manager.asleep:
            core.serving.were_given_up()
            logger.warning("wake_up: the engine has no weights until update_weights succeeds")
        if not manager.asleep:
            core.recorder.end("asleep")
        return num_bytes

    def rollback(
        self,
        core: EngineCore,
        prepared: tuple[list[SleepTag], int] | None,
        error: BaseException,
    ) -> None:
        """Frees the memory again: everything stays asleep."""
        del error
        if prepared is not None:  # what could not be taken was given back at once
            core.sleep_manager.undo_wake_up(prepared[0])

    def combine(self, answers: Sequence[int]) -> int:
        return sum(answers)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class FlushCache(GroupCommand):
    """Empty the prefix cache and reset scheduling, unless requests hold pages."""

    request: FlushCacheReqInput
    future: Future[FlushCacheReqOutput]

    def prepare(self, core: EngineCore) -> str:
        """The reason why the prefix cache cannot be emptied; "" if it can."""
        return _pages_in_use(core)

    def together(self, cores: Sequence[EngineCore], prepared: Sequence[str]) -> list[str]:
        return [next(filter(None, prepared), "")] * len(cores)

    def commit(self, core: EngineCore, prepared: str) -> FlushCacheReqOutput:
        if prepared:
            return FlushCacheReqOutput(success=False, error_msg=prepared)
        flushed = core.pool.num_cached * core.pool.page_size
        core.pool.reset_cache()
        core.scheduler.reset_policy()
        core.stats.num_decodes = 0
        return FlushCacheReqOutput(success=True, flushed_items=flushed)

    def combine(self, answers: Sequence[FlushCacheReqOutput]) -> FlushCacheReqOutput:
        if not answers[0].success:
            return answers[0]
        flushed = sum(answer.flushed_items for answer in answers)
        return FlushCacheReqOutput(success=True, flushed_items=flushed)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ReleaseKV(GroupCommand):
    """Free the memory of the KV cache; answers with its bytes."""

    future: Future[int]

    def prepare(self, core: EngineCore) -> None:
        problem = _pages_in_use(core)
        if problem:
            raise EngineStateError(f"the KV cache cannot be released: {problem}")

    def commit(self, core: EngineCore, prepared: None) -> int:
        del prepared
        core.pool.reset_cache()
        return core.runner.kv_memory.release()

    def combine(self, answers: Sequence[int]) -> int:
        return sum(answers)


def _pages_in_use(core: EngineCore) -> str:
    """The reason why the KV cache cannot be emptied; "" if it can."""
    num_running = len(core.scheduler.running)
    if not num_running:
        return ""
    return (
        f"{num_running} running request(s) hold KV pages; "
        "pause_generation(mode='retract') or 'abort' first"
    )
