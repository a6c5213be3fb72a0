"""Commands that pause generation, or wait for requests to finish.

docs/interruptions.md has the modes.
"""

from __future__ import annotations

import dataclasses
from concurrent.futures import Future

from sgljax_engine.core.command import PerEngineCommand, Recipients
from sgljax_engine.core.engine_core import EngineCore
from sgljax_engine.core.pause_state import PendingDrain
from sgljax_engine.core.transaction import GroupCommand
from sgljax_engine.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Pause(GroupCommand):
    """Stop generating; answered once nothing runs on the device. The last call's mode holds."""

    request: PauseGenerationReqInput
    future: Future[None]

    def hand_out(self, group: Recipients) -> None:
        """Has each engine take part; with mode "wait" each answers at a time of its own."""
        if self.request.mode == "wait":
            PauseWhenDrained(self.future).hand_out(group)
        else:
            GroupCommand.hand_out(self, group)

    def prepare(self, core: EngineCore) -> None:
        """Waits for the device; its failure goes to the caller."""
        core.runner.kv_memory.wait()

    def commit(self, core: EngineCore, prepared: None) -> None:
        del prepared
        mode = self.request.mode
        core.apply_pause_mode(mode)  # first: if it fails there is no pause
        core.stats.paused(mode)
        core.pauses.mode = mode
        core.outputs.flush()
        core.refuse_if_held()


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class PauseWhenDrained(PerEngineCommand):
    """Pause with mode "wait"; answered when no started request is left."""

    future: Future[None]

    def start(self, core: EngineCore, future: Future[None]) -> None:
        """Pauses; `EngineCore.settle` answers."""
        core.stats.paused("wait")
        core.pauses.mode = "wait"
        core.pauses.wait(PendingDrain("pause_generation('wait')", future, is_pause=True))
        core.refuse_if_held()


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Continue(PerEngineCommand):
    request: ContinueGenerationReqInput
    future: Future[None]

    def run(self, core: EngineCore) -> None:
        core.pauses.mode = None
        core.stats.continued()
        why = "continue_generation ended the pause"
        core.pauses.refuse(core.scheduler.num_started, why, pauses_only=True)
        core.set_admission()


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Drain(PerEngineCommand):
    """Let started requests finish, and start no others until a swap or `EndDrain`.

    So engines wait for a swap with mode "wait". `name` is the caller's method, for an error.
    """

    name: str
    future: Future[None]

    def start(self, core: EngineCore, future: Future[None]) -> None:
        drain = PendingDrain(f"{self.name}(mode='wait')", future, is_pause=False)
        # Without weights no request ever finishes, so there is nothing to wait for.
        if core.serving.are_held:
            core.pauses.wait(drain)
        else:
            core.drained(drain)
        core.refuse_if_held()


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class EndDrain(PerEngineCommand):
    """Start requests again after a `Drain` that no swap follows."""

    future: Future[None]

    def run(self, core: EngineCore) -> None:
        core.end_drain()
