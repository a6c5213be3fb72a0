"""What the engines of a group do together, or not at all: the table of `meeting.Steps`."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from sgljax_engine.core import commands as cmd
from sgljax_engine.core.checkpoint_state import check_restore, register, restore, take_snapshot
from sgljax_engine.core.engine_core import EngineCore
from sgljax_engine.core.interruptions import PAUSE, SWAP, refuse_if_held
from sgljax_engine.core.meeting import Steps
from sgljax_engine.core.sleep import Kept
from sgljax_engine.core.snapshot import Restoration
from sgljax_engine.errors import EngineStateError
from sgljax_engine.io_struct import SLEEP_TAGS, FlushCacheReqOutput, SleepTag

logger = logging.getLogger(__name__)


def _check_flush(core: EngineCore, command: cmd.FlushCache) -> str:
    """Why the prefix cache cannot be emptied; "" if it can."""
    del command
    return _pages_in_use(core)


def _all_or_none(
    command: cmd.FlushCache, cores: Sequence[EngineCore], problems: Sequence[str]
) -> list[str]:
    """Every engine's problem is that of the first engine with one."""
    del command
    return [next(filter(None, problems), "")] * len(cores)


def _flush_cache(core: EngineCore, command: cmd.FlushCache, problem: str) -> FlushCacheReqOutput:
    """Empties the prefix cache and resets scheduling, unless requests hold pages."""
    del command
    if problem:
        return FlushCacheReqOutput(success=False, error_msg=problem)
    flushed = core.pool.num_cached * core.pool.page_size
    core.pool.reset_cache()
    core.scheduler.reset_policy()
    core.stats.num_decodes = 0
    return FlushCacheReqOutput(success=True, flushed_items=flushed)


def _flushed(outputs: Sequence[FlushCacheReqOutput]) -> FlushCacheReqOutput:
    if not outputs[0].success:
        return outputs[0]
    return FlushCacheReqOutput(success=True, flushed_items=sum(o.flushed_items for o in outputs))


def _check_release(core: EngineCore, command: cmd.ReleaseKV) -> None:
    del command
    problem = _pages_in_use(core)
    if problem:
        raise EngineStateError(f"the KV cache cannot be released: {problem}")


def _release_kv(core: EngineCore, command: cmd.ReleaseKV, prepared: None) -> int:
    """Gives the memory of the KV cache back; returns its bytes."""
    del command, prepared
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


def _keep(core: EngineCore, command: cmd.Sleep) -> tuple[float, Kept] | None:
    """Copies to the host what is to be kept; None if everything sleeps already."""
    manager, serving = core.sleep_manager, core.serving
    if manager.asleep == SLEEP_TAGS:
        logger.warning("sleep: the engine sleeps already; nothing was changed")
        return None
    started_s = time.perf_counter()
    keeps_all = command.preserve_state
    if command.level == 2 and not keeps_all and serving.adapters.names:
        raise EngineStateError(
            "sleep(level=2) would give up the adapters "
            f"{', '.join(map(repr, serving.adapters.names))} with the weights: unload them "
            "before, or sleep with level=1"
        )
    core.runner.kv_memory.wait()
    kept = manager.keep(weights=keeps_all or command.level == 1, pages=keeps_all)
    return started_s, kept


def _sleep(core: EngineCore, command: cmd.Sleep, prepared: tuple[float, Kept] | None) -> int:
    """Gives the devices' memory back; returns its bytes."""
    if prepared is None:
        return 0
    started_s, kept = prepared
    manager = core.sleep_manager
    if not command.preserve_state and "kv_cache" not in manager.asleep:
        core.retract_all()
        core.pool.reset_cache()
    core.serving.forget_unmade_digest()
    num_bytes = manager.sleep(kept, refuses_requests=command.refuse_requests)
    core.counters.num_sleeps += 1
    core.counters.sleep_s += time.perf_counter() - started_s
    core.recorder.begin("asleep", {"level": command.level})
    refuse_if_held(core)
    return num_bytes


def _take_memory(core: EngineCore, command: cmd.WakeUp) -> tuple[list[SleepTag], int]:
    """Takes the memory of those tags that sleep; with its bytes."""
    manager = core.sleep_manager
    asleep: list[SleepTag] = [tag for tag in manager.asleep if tag in command.tags]
    if not asleep:
        logger.warning("wake_up: %s is awake; nothing was changed", list(command.tags))
        return [], 0
    return asleep, manager.prepare_wake_up(asleep)


def _wake_up(core: EngineCore, command: cmd.WakeUp, taken: tuple[list[SleepTag], int]) -> int:
    """Drops the copies of what is awake again; returns the bytes taken."""
    del command
    manager = core.sleep_manager
    tags, num_bytes = taken
    if not tags:
        return 0
    manager.wake_up(tags)
    if not core.runner.weights and "weights" not in manager.asleep:
        core.serving.were_given_up()
        logger.warning("wake_up: the engine has no weights until update_weights succeeds")
    if not manager.asleep:
        core.recorder.end("asleep")
    return num_bytes


def _sleep_on(
    core: EngineCore,
    command: cmd.WakeUp,
    taken: tuple[list[SleepTag], int] | None,
    error: BaseException,
) -> None:
    del command, error
    if taken is not None:  # what could not be taken was given back at once
        core.sleep_manager.undo_wake_up(taken[0])


def _check_unload(core: EngineCore, command: cmd.UnloadAdapter) -> int:
    """The slot of an adapter that no request uses."""
    slot = core.serving.adapters.find(command.name)
    users = [request for request in core.scheduler.requests() if request.adapter == slot]
    if users:
        raise EngineStateError(
            f"adapter {command.name!r} cannot be unloaded: {len(users)} unfinished request(s) use "
            f"it, {users[0].rid!r} among them"
        )
    return slot


def _unload_adapter(core: EngineCore, command: cmd.UnloadAdapter, slot: int) -> None:
    """Gives the slot back."""
    core.pool.reset_cache(slot)
    core.serving.adapters.remove(command.name)


def _check_awake(core: EngineCore, command: cmd.Question) -> None:
    del command
    core.check_awake()


def _compare(
    command: cmd.CompareWeights, cores: Sequence[EngineCore], prepared: Sequence[Any]
) -> list[list[str]]:
    del prepared
    return [core.runner.differing_weights(command.source, command.rules) for core in cores]


def _compare_adapter(
    command: cmd.CompareAdapter, cores: Sequence[EngineCore], prepared: Sequence[Any]
) -> list[list[str]]:
    del prepared
    slot = cores[0].serving.adapters.find(command.name)
    made = command.build([core.serving.slots for core in cores], slot)
    pairs = zip(cores, made, strict=True)
    return [core.serving.differing_adapter(slots) for core, slots in pairs]


def _any_differing(names: Sequence[list[str]]) -> list[str]:
    return sorted({name for each in names for name in each})


def _run(command: cmd.Run, cores: Sequence[EngineCore], prepared: Sequence[Any]) -> list[Any]:
    del prepared
    return [command.function()] * len(cores)


def _check_restore(core: EngineCore, command: cmd.Restore) -> tuple[Restoration, bool]:
    """The engine's part, and whether the checkpoint's weights serve."""
    part = command.restoration.part(core.place, command.num_engines)
    return part, check_restore(core, part)


def _register(
    command: cmd.Restore, cores: Sequence[EngineCore], prepared: Sequence[Any]
) -> Sequence[Any]:
    register(cores[0].groups, command.restoration)
    return prepared


def _restore(core: EngineCore, command: cmd.Restore, prepared: tuple[Restoration, bool]) -> None:
    del command
    restore(core, prepared[0], is_same=prepared[1])


def _undo_restore(
    core: EngineCore, command: cmd.Restore, prepared: Any, error: BaseException
) -> None:
    """Takes back that requests were counted as the engine's load."""
    del prepared, error
    for request in command.restoration.unfinished:
        if request.engine == core.place:
            core.groups.on_finished(request)


def _hand_over(core: EngineCore, command: cmd.Question, prepared: Any) -> Any:
    """What was prepared is the answer."""
    del core, command
    return prepared


STEPS: Mapping[type[cmd.Command], Steps] = {
    cmd.Pause: PAUSE,
    cmd.FlushCache: Steps(_check_flush, _all_or_none, _flush_cache, combine=_flushed),
    cmd.ReleaseKV: Steps(_check_release, commit=_release_kv, combine=sum),
    cmd.Sleep: Steps(_keep, commit=_sleep, combine=sum),
    cmd.WakeUp: Steps(_take_memory, commit=_wake_up, rollback=_sleep_on, combine=sum),
    cmd.SwapWeights: SWAP,
    cmd.SwapAdapter: SWAP,
    cmd.UnloadAdapter: Steps(_check_unload, commit=_unload_adapter),
    cmd.Run: Steps(together=_run, commit=_hand_over),
    cmd.CompareWeights: Steps(_check_awake, _compare, _hand_over, combine=_any_differing),
    cmd.CompareAdapter: Steps(_check_awake, _compare_adapter, _hand_over, combine=_any_differing),
    cmd.TakeSnapshot: Steps(
        lambda core, command: take_snapshot(core, include_kv=command.include_kv),
        commit=_hand_over,
        combine=list,
    ),
    cmd.Restore: Steps(_check_restore, _register, _restore, _undo_restore),
}
"""Commands that engines do together, but for what `takes_meeting` leaves out."""


def takes_meeting(command: cmd.Command) -> bool:
    """Whether engines do a command together. A pause that waits ends on each at its own time."""
    waits = isinstance(command, cmd.Pause) and command.request.mode == "wait"
    return type(command) in STEPS and not waits
