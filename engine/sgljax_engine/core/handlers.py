"""What is done for each command: a table of handlers. Engine thread only.

Most handlers return the answer. `_WAITING` lists those that answer their command themselves, now or
later.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from sgljax_engine.core import commands as cmd
from sgljax_engine.core.checkpoint_state import copy_pages, restore, take_snapshot
from sgljax_engine.core.engine_core import EngineCore
from sgljax_engine.core.interruptions import pause, refuse_if_held, resume, swap
from sgljax_engine.errors import EngineStateError
from sgljax_engine.io_struct import SLEEP_TAGS, FlushCacheReqOutput, SleepTag
from sgljax_engine.types import FinishReason

logger = logging.getLogger(__name__)

_Handler = Callable[[EngineCore, Any], Any]


def handle(core: EngineCore, command: cmd.Command) -> None:
    """Does a command, or has it wait. What it raises is the caller's to see, and nobody else's."""
    kind = type(command)
    try:
        if kind in _WAITING:
            _WAITING[kind](core, command)
        else:
            assert isinstance(command, cmd.Question), kind
            cmd.answer(command, functools.partial(_HANDLERS[kind], core, command))
    finally:
        del command  # see `commands.answer`


def _add(core: EngineCore, command: cmd.AddRequests) -> None:
    core.add(command.requests, command.answers)


def _pause(core: EngineCore, command: cmd.Pause) -> None:
    pause(core, command.request.mode, command.future)


def _abandon(core: EngineCore, command: cmd.AbandonRequests) -> int:
    return core.end(command.requests, FinishReason("abort", message="aborted by the caller"))


def _abort(core: EngineCore, command: cmd.Abort) -> int:
    asked = command.request
    found = core.scheduler.requests() if asked.rid is None else core.find(asked.rid)
    return core.end(found, FinishReason("abort", message=asked.message))


def _end_answered(core: EngineCore, command: cmd.EndAnswered) -> int:
    return core.end([command.request], command.reason)


def _flush_cache(core: EngineCore, command: cmd.FlushCache) -> FlushCacheReqOutput:
    """Empties the prefix cache and resets scheduling, unless requests hold pages."""
    del command
    problem = _pages_in_use(core)
    if problem:
        return FlushCacheReqOutput(success=False, error_msg=problem)
    flushed = core.pool.num_cached * core.pool.page_size
    core.pool.reset_cache()
    core.scheduler.reset_policy()
    core.stats.num_decodes = 0
    return FlushCacheReqOutput(success=True, flushed_items=flushed)


def _release_kv(core: EngineCore, command: cmd.ReleaseKV) -> int:
    """Gives the memory of the KV cache back; returns its bytes."""
    del command
    problem = _pages_in_use(core)
    if problem:
        raise EngineStateError(f"the KV cache cannot be released: {problem}")
    core.pool.reset_cache()
    return core.runner.kv_memory.release()


def _pages_in_use(core: EngineCore) -> str:
    """Why the KV cache cannot be emptied; "" if it can."""
    num_running = len(core.scheduler.running)
    if not num_running:
        return ""
    return (
        f"{num_running} running request(s) hold KV pages; "
        "pause_generation(mode='retract') or 'abort' first"
    )


def _sleep(core: EngineCore, command: cmd.Sleep) -> int:
    """Gives the devices' memory back; returns its bytes. What fails changes nothing."""
    manager, serving = core.sleep_manager, core.serving
    if manager.asleep == SLEEP_TAGS:
        logger.warning("sleep: the engine sleeps already; nothing was changed")
        return 0
    started = time.perf_counter()
    keeps_all = command.preserve_state
    if command.level == 2 and not keeps_all and serving.adapters.names:
        raise EngineStateError(
            "sleep(level=2) would give up the adapters "
            f"{', '.join(map(repr, serving.adapters.names))} with the weights: unload them "
            "before, or sleep with level=1"
        )
    core.runner.kv_memory.wait()
    kept = manager.keep(weights=keeps_all or command.level == 1, pages=keeps_all)
    if not keeps_all and "kv_cache" not in manager.asleep:
        core.retract_all()
        core.pool.reset_cache()
    serving.forget_unmade_digest()
    num_bytes = manager.sleep(kept, refuses_requests=command.refuse_requests)
    core.counters.num_sleeps += 1
    core.counters.sleep_s += time.perf_counter() - started
    core.recorder.begin("asleep", {"level": command.level})
    refuse_if_held(core)
    return num_bytes


def _wake_up(core: EngineCore, command: cmd.WakeUp) -> int:
    """Takes the memory of those tags that sleep; returns its bytes. What fails sleeps on."""
    manager = core.sleep_manager
    asleep: list[SleepTag] = [tag for tag in manager.asleep if tag in command.tags]
    if not asleep:
        logger.warning("wake_up: %s is awake; nothing was changed", list(command.tags))
        return 0
    num_bytes = manager.wake_up(asleep)
    if not core.runner.weights and "weights" not in manager.asleep:
        core.serving.were_given_up()
        logger.warning("wake_up: the engine has no weights until update_weights succeeds")
    if not manager.asleep:
        core.recorder.end("asleep")
    return num_bytes


def _unload_adapter(core: EngineCore, command: cmd.UnloadAdapter) -> None:
    """Gives an adapter's slot back, unless requests use it."""
    slot = core.serving.adapters.find(command.name)
    users = [request for request in core.scheduler.requests() if request.adapter == slot]
    if users:
        raise EngineStateError(
            f"adapter {command.name!r} cannot be unloaded: {len(users)} unfinished request(s) use "
            f"it, {users[0].rid!r} among them"
        )
    core.pool.reset_cache(slot)
    core.serving.adapters.remove(command.name)


def _score(core: EngineCore, command: cmd.Score) -> Any:
    core.check_awake()
    slot = core.serving.adapters.find(command.lora)
    return core.runner.scorer.score(command.sequences, command.starts, command.temperature, slot)


def _warmup(core: EngineCore, command: cmd.Warmup) -> int:
    """Compiles and runs all buckets; returns how many were new."""
    core.check_awake()
    try:
        return core.warmup.run(
            include_score=command.include_score,
            include_table=command.include_table,
            progress=command.progress,
        )
    except BaseException:
        if core.runner.kv_memory.recover():  # a program that failed had taken the pages
            core.lose_kv()
        raise


def _checksum(core: EngineCore, command: cmd.ChecksumWeights) -> dict[str, str]:
    del command
    core.check_awake()
    return core.runner.checksum_weights()()


def _compare(core: EngineCore, command: cmd.CompareWeights) -> list[str]:
    core.check_awake()
    return core.runner.differing_weights(command.source, command.rules)


def _compare_adapter(core: EngineCore, command: cmd.CompareAdapter) -> list[str]:
    core.check_awake()
    return core.serving.differing_adapter(command.name, command.build)


_WAITING: Mapping[type[cmd.Command], _Handler] = {
    cmd.AddRequests: _add,
    cmd.Pause: _pause,
    cmd.SwapWeights: swap,
    cmd.SwapAdapter: swap,
}

_HANDLERS: Mapping[type[cmd.Command], _Handler] = {
    cmd.AbandonRequests: _abandon,
    cmd.Abort: _abort,
    cmd.EndAnswered: _end_answered,
    cmd.Continue: lambda core, _: resume(core),
    cmd.FlushCache: _flush_cache,
    cmd.ReleaseKV: _release_kv,
    cmd.Sleep: _sleep,
    cmd.WakeUp: _wake_up,
    cmd.GetState: lambda core, _: core.state(),
    cmd.CheckIntegrity: lambda core, _: core.check_integrity(),
    cmd.Run: lambda _, command: command.function(),
    cmd.Score: _score,
    cmd.Warmup: _warmup,
    cmd.ChecksumWeights: _checksum,
    cmd.CompareWeights: _compare,
    cmd.CompareAdapter: _compare_adapter,
    cmd.UnloadAdapter: _unload_adapter,
    cmd.TakeSnapshot: lambda core, command: take_snapshot(core, include_kv=command.include_kv),
    cmd.CopyPages: lambda core, command: copy_pages(core, command.stamps),
    cmd.Restore: lambda core, command: restore(core, command.restoration),
}
