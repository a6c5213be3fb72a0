"""What is done for each command: tables of handlers. Engine thread only.

Most handlers return the answer. `_WAITING` lists those that answer their command themselves, now or
later. `core.steps` has what the engines of a group do together, or not at all.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

from sgljax_engine.core import commands as cmd
from sgljax_engine.core.checkpoint_state import copy_pages
from sgljax_engine.core.engine_core import EngineCore
from sgljax_engine.core.interruptions import drain, end_drain, pause_and_wait, resume
from sgljax_engine.core.meeting import Meeting
from sgljax_engine.core.steps import STEPS, takes_meeting
from sgljax_engine.types import FinishReason

_Handler = Callable[[EngineCore, Any], Any]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Attend(cmd.Command):
    """Take part in a meeting of the group's engines.

    Attributes:
        meeting: What they do.
        place: The engine's index.
    """

    meeting: Meeting
    place: int

    def refuse(self, make_error: Callable[[], BaseException]) -> None:
        """Has the meeting fail, unless the engine has come to it."""
        self.meeting.refuse(self.place, make_error)


def name_of(command: cmd.Command) -> str:
    """What a command is called in recordings."""
    return type(command).__name__ if not isinstance(command, Attend) else command.meeting.name


def handle(core: EngineCore, command: cmd.Command) -> None:
    """Does a command, or has it wait. What it raises is the caller's to see, and nobody else's."""
    kind = type(command)
    try:
        if isinstance(command, Attend):
            command.meeting.attend(command.place, core)
        elif takes_meeting(command):
            assert isinstance(command, cmd.Question), kind
            Meeting(command, STEPS[kind], 1).attend(0, core)
        elif kind in _WAITING:
            _WAITING[kind](core, command)
        else:
            assert isinstance(command, cmd.Question), kind
            cmd.answer(command, functools.partial(_HANDLERS[kind], core, command))
    finally:
        del command  # see `commands.answer`


def _add(core: EngineCore, command: cmd.AddRequests) -> None:
    core.add(command)


def _take_over(core: EngineCore, command: cmd.TakeOver) -> None:
    for request, answer in zip(command.requests, command.answers, strict=True):
        core.take_in(request, answer)


def _abandon(core: EngineCore, command: cmd.AbandonRequests) -> int:
    return core.end(command.requests, FinishReason("abort", message="aborted by the caller"))


def _abort(core: EngineCore, command: cmd.Abort) -> int:
    asked = command.request
    found = core.scheduler.requests() if asked.rid is None else core.find(asked.rid)
    return core.end(found, FinishReason("abort", message=asked.message))


def _end_answered(core: EngineCore, command: cmd.EndAnswered) -> int:
    return core.end([command.request], command.reason)


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


_WAITING: Mapping[type[cmd.Command], _Handler] = {
    cmd.AddRequests: _add,
    cmd.TakeOver: _take_over,
    cmd.Pause: pause_and_wait,
    cmd.Drain: drain,
}

_HANDLERS: Mapping[type[cmd.Command], _Handler] = {
    cmd.AbandonRequests: _abandon,
    cmd.Abort: _abort,
    cmd.EndAnswered: _end_answered,
    cmd.Continue: lambda core, _: resume(core),
    cmd.EndDrain: lambda core, _: end_drain(core),
    cmd.GetState: lambda core, _: core.state(),
    cmd.CheckIntegrity: lambda core, _: core.check_integrity(),
    cmd.Score: _score,
    cmd.Warmup: _warmup,
    cmd.ChecksumWeights: _checksum,
    cmd.CopyPages: lambda core, command: copy_pages(core, command.stamps),
}
