"""The commands of callers to the engines: one class a command, one file a noun."""

from sgljax_engine.core.command import Command, Part, PerEngineCommand, Task
from sgljax_engine.core.commands.checkpoint import Restore, TakeSnapshot
from sgljax_engine.core.commands.inspect import CheckIntegrity, GetState, Run, Warmup
from sgljax_engine.core.commands.memory import FlushCache, ReleaseKV, Sleep, WakeUp
from sgljax_engine.core.commands.pause import Continue, Drain, EndDrain, Pause
from sgljax_engine.core.commands.requests import (
    AbandonRequests,
    Abort,
    AddRequests,
    EndAnswered,
    Score,
    TakeOver,
)
from sgljax_engine.core.commands.weights import (
    BuildAdapter,
    BuildWeights,
    ChecksumWeights,
    CompareAdapter,
    CompareWeights,
    SwapAdapter,
    SwapWeights,
    UnloadAdapter,
    Weights,
)
from sgljax_engine.core.transaction import GroupCommand

__all__ = [
    "AbandonRequests",
    "Abort",
    "AddRequests",
    "BuildAdapter",
    "BuildWeights",
    "CheckIntegrity",
    "ChecksumWeights",
    "Command",
    "CompareAdapter",
    "CompareWeights",
    "Continue",
    "Drain",
    "EndAnswered",
    "EndDrain",
    "FlushCache",
    "GetState",
    "GroupCommand",
    "Part",
    "Pause",
    "PerEngineCommand",
    "ReleaseKV",
    "Restore",
    "Run",
    "Score",
    "Sleep",
    "SwapAdapter",
    "SwapWeights",
    "TakeOver",
    "TakeSnapshot",
    "Task",
    "UnloadAdapter",
    "WakeUp",
    "Warmup",
    "Weights",
]
