"""Commands that pause generation, and what waits for requests to finish.

docs/interruptions.md has the modes.
"""

from __future__ import annotations

import dataclasses
from concurrent.futures import Future

from sgljax_engine.core.command import PerEngineCommand, Recipients
from sgljax_engine.core.engine_core import EngineCore
from sgljax_engine.core.pause import PendingDrain
from sgljax_engine.core.transaction import GroupCommand
from sgljax_engine.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput, PauseMode
from sgljax_engine.processing.futures import resolve
from sgljax_engine.types import FinishReason


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Pause(GroupCommand):
    """Stop generating; answered once nothing runs on the device. The last call's mode holds."""

    request: PauseGenerationReqInput
    future: Future[None]

    def hand_out(self, group: Recipients) -> None:
        """Has each engine take part; with mode "wait" each ends at a time of its own."""
        if self.request.mode == "wait":
            PauseWhenDrained(self.future).hand_out(group)
        else:
            GroupCommand.hand_out(self, group)

    def prepare(self, core: EngineCore) -> None:
        """Waits for the device, whose failure is the caller's."""
        core.runner.kv_memory.wait()

    def commit(self, core: EngineCore, prepared: None) -> None:
        """Pauses."""
        del prepared
        mode = self.request.mode
        apply_pause_mode(core, mode)  # first: if it fails there is no pause
        core.stats.paused(mode)
        core.pauses.mode = mode
        core.outputs.flush()
        refuse_if_held(core)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class PauseWhenDrained(PerEngineCommand):
    """Pause with mode "wait"; answered when no started request is left."""

    future: Future[None]

    def start(self, core: EngineCore, future: Future[None]) -> None:
        """Pauses; `settle` answers."""
        core.stats.paused("wait")
        core.pauses.mode = "wait"
        core.pauses.wait(PendingDrain("pause_generation('wait')", future, is_pause=True))
        refuse_if_held(core)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Continue(PerEngineCommand):
    """Go on generating."""

    request: ContinueGenerationReqInput
    future: Future[None]

    def run(self, core: EngineCore) -> None:
        """Ends the pause."""
        core.pauses.mode = None
        core.stats.continued()
        why = "continue_generation ended the pause"
        core.pauses.refuse(core.scheduler.num_started, why, pauses_only=True)
        _set_admission(core)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Drain(PerEngineCommand):
    """Let started requests finish and start no others until a swap, or `EndDrain`.

    This is how engines wait for a swap with mode "wait".

    Attributes:
        name: The caller's method, for an error.
        future: Gets None when no started request is left.
    """

    name: str
    future: Future[None]

    def start(self, core: EngineCore, future: Future[None]) -> None:
        """Answers now, or has `settle` answer."""
        drain = PendingDrain(f"{self.name}(mode='wait')", future, is_pause=False)
        # Without weights no request ever finishes, so there is nothing to wait for.
        if core.serving.are_held:
            core.pauses.wait(drain)
        else:
            _drained(core, drain)
        refuse_if_held(core)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class EndDrain(PerEngineCommand):
    """Start requests again after a `Drain` that no swap follows."""

    future: Future[None]

    def run(self, core: EngineCore) -> None:
        """Starts requests again."""
        end_drain(core)


def end_drain(core: EngineCore) -> None:
    """Starts requests again, unless there is a pause."""
    core.pauses.end_update()
    _set_admission(core)


def settle(core: EngineCore) -> None:
    """Answers what waits until no started request is left, if none is."""
    if core.scheduler.num_started:
        return
    core.outputs.flush()
    if core.pauses.has_pauses:
        core.runner.kv_memory.wait()
    for drain in core.pauses.take():
        _drained(core, drain)
    _set_admission(core)


def _drained(core: EngineCore, drain: PendingDrain) -> None:
    if not drain.is_pause:
        core.pauses.is_drained = True
    resolve(drain.future, None)


def refuse_if_held(core: EngineCore) -> None:
    """Answers all that waits for requests to finish, if they cannot. See `settle` else."""
    num_started = core.scheduler.num_started
    if num_started and core.is_held:
        holder = f"pause_generation({core.pauses.mode!r})"
        if not core.can_run:
            holder = "sleep" if core.sleep_manager.asleep else "the want of weights"
        core.pauses.refuse(num_started, f"{holder} keeps them from finishing")
    _set_admission(core)


def apply_pause_mode(core: EngineCore, mode: PauseMode, adapter: int | None = None) -> None:
    """Does to the requests what a pause, or an update, of this mode does.

    Args:
        core: The engine.
        mode: The pause's, or the update's.
        adapter: Slot of an adapter whose requests alone are meant; None for all.
    """
    if mode == "abort":
        reason = FinishReason("abort", message="generation was paused, or weights changed")
        core.end([r for r in core.scheduler.requests() if adapter in (None, r.adapter)], reason)
    elif mode == "retract":
        core.retract_all(adapter)


def _set_admission(core: EngineCore) -> None:
    core.scheduler.admits_new = not core.pauses.holds_new_requests
