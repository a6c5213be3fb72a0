"""Pauses and updates of weights: what they do to requests, and what waits for requests to finish.

Engine thread only. docs/interruptions.md has the modes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import jax

from sgljax_engine.core import commands as cmd
from sgljax_engine.core.engine_core import EngineCore
from sgljax_engine.core.meeting import Steps
from sgljax_engine.core.serving import make_weights
from sgljax_engine.errors import EngineStateError, WeightsLostError
from sgljax_engine.io_struct import PauseMode
from sgljax_engine.processing.futures import resolve
from sgljax_engine.types import FinishReason


def pause_and_wait(core: EngineCore, command: cmd.Pause) -> None:
    """Pauses with mode "wait"; `settle` answers. The last call's mode holds."""
    core.stats.paused("wait")
    core.pauses.mode = "wait"
    core.pauses.wait(command.future)
    refuse_if_held(core)


def _check_pause(core: EngineCore, command: cmd.Pause) -> None:
    """Waits for the device, whose failure is the caller's."""
    del command
    core.runner.kv_memory.wait()


def _pause(core: EngineCore, command: cmd.Pause, prepared: None) -> None:
    """Pauses with another mode than "wait"; the last call's mode holds."""
    del prepared
    mode = command.request.mode
    apply_pause_mode(core, mode)  # first: if it fails there is no pause
    core.stats.paused(mode)
    core.pauses.mode = mode
    core.outputs.flush()
    refuse_if_held(core)


PAUSE = Steps(_check_pause, commit=_pause)


def resume(core: EngineCore) -> None:
    """Ends the pause."""
    core.pauses.mode = None
    core.stats.continued()
    why = "continue_generation ended the pause"
    core.pauses.refuse_pauses(core.scheduler.num_started, why)
    _set_admission(core)


def drain(core: EngineCore, command: cmd.Drain) -> None:
    """Answers when no started request is left; no other starts until a swap or `end_drain`."""
    # Without weights no request ever finishes, so there is nothing to wait for.
    if core.serving.are_held:
        core.pauses.waiting_drain = command
    else:
        _drained(core, command)
    refuse_if_held(core)


def _drained(core: EngineCore, command: cmd.Drain) -> None:
    core.pauses.is_drained = True
    resolve(command.future, None)


def end_drain(core: EngineCore) -> None:
    """Starts requests again."""
    core.pauses.take_drain()
    core.pauses.is_drained = False
    _set_admission(core)


def _check_swap(core: EngineCore, command: cmd.SwapWeights | cmd.SwapAdapter) -> float:
    """When the swap began."""
    num_running = len(core.scheduler.running)
    if command.flush_cache and command.mode == "in_place" and num_running:
        raise EngineStateError(
            f"flush_cache=True with mode='in_place': {num_running} running request(s) would "
            "go on with keys and values of the old weights"
        )
    core.serving.check_swap(command)
    return time.perf_counter()


def _make_weights(
    command: cmd.SwapWeights | cmd.SwapAdapter,
    cores: Sequence[EngineCore],
    started: Sequence[float],
) -> list[tuple[float, Mapping[str, jax.Array]]]:
    """Makes the new weights of all engines; whatever fails leaves the old ones in all of them.

    Raises:
        WeightsLostError: when a donating update failed half-way: there are no weights.
    """
    made = make_weights(command, [core.serving for core in cores])
    return list(zip(started, made, strict=True))


def _serve_weights(
    core: EngineCore,
    command: cmd.SwapWeights | cmd.SwapAdapter,
    made: tuple[float, Mapping[str, jax.Array]],
) -> int:
    """Serves other weights from the next dispatch on; returns their version."""
    started_s, weights = made
    core.serving.swap(command, weights)
    if not core.sleep_manager.asleep:
        core.recorder.end("asleep")
    _forget_computed(core, command)
    core.stats.swapped(started_s, core.serving.version, command.mode)
    end_drain(core)
    return core.serving.version


def _keep_weights(
    core: EngineCore,
    command: cmd.SwapWeights | cmd.SwapAdapter,
    started_s: float | None,
    error: BaseException,
) -> None:
    """A swap failed: the old weights serve on, unless a donating update lost them."""
    del command, started_s
    if isinstance(error, WeightsLostError):
        core.serving.were_lost(str(error))
        core.fail_all(EngineStateError(str(error)))
    end_drain(core)


SWAP = Steps(_check_swap, _make_weights, _serve_weights, _keep_weights)


def _forget_computed(core: EngineCore, command: cmd.SwapWeights | cmd.SwapAdapter) -> None:
    """Nothing that other weights, or another adapter, computed is ever matched again.

    Pages of requests that run on are theirs alone from now on, since the cache takes no page from
    before its reset.
    """
    # "wait" found nobody to wait for, or no weights to wait under.
    mode: PauseMode = "retract" if command.mode == "wait" else command.mode
    if isinstance(command, cmd.SwapAdapter):
        slot = core.serving.adapters.find(command.name)
        core.pool.reset_cache(slot)
    else:
        slot = None
        core.pool.reset_cache()
    apply_pause_mode(core, mode, slot)
    for request in core.scheduler.waiting:
        if not request.output_ids and slot in (None, request.adapter):
            request.prompt_logprobs = None  # scored when it starts again


def settle(core: EngineCore) -> None:
    """Does what waited until no started request is left, if none is."""
    if core.scheduler.num_started:
        return
    core.outputs.flush()
    drain = core.pauses.take_drain()
    if drain is not None:
        _drained(core, drain)
    futures = core.pauses.take_pauses()
    if futures:
        core.runner.kv_memory.wait()
        for future in futures:
            resolve(future, None)
    _set_admission(core)


def refuse_if_held(core: EngineCore) -> None:
    """Answers all that waits for requests to finish, if they cannot. See `settle` else."""
    num_started = core.scheduler.num_started
    if num_started and core.is_held:
        holder = f"pause_generation({core.pauses.mode!r})"
        if not core.can_run:
            holder = "sleep" if core.sleep_manager.asleep else "the want of weights"
        why = f"{holder} keeps them from finishing"
        core.pauses.refuse_pauses(num_started, why)
        core.pauses.refuse_drain(num_started, why)
    _set_admission(core)


def apply_pause_mode(core: EngineCore, mode: PauseMode, adapter: int | None = None) -> None:
    """Does to the requests what a pause, or an update, of this mode does.

    Args:
        core: The engine.
        mode: Of the pause or update.
        adapter: Slot of an adapter whose requests alone are meant; None for all.
    """
    if mode == "abort":
        reason = FinishReason("abort", message="generation was paused, or weights changed")
        core.end([r for r in core.scheduler.requests() if adapter in (None, r.adapter)], reason)
    elif mode == "retract":
        core.retract_all(adapter)


def _set_admission(core: EngineCore) -> None:
    core.scheduler.admits_new = not core.pauses.holds_new_requests
