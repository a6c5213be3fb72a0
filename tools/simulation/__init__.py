"""Rollouts of a training, simulated on the host: how long steps take, and how many rows are idle.

The scheduler is the engine's own. Step times come from a table, and lengths of answers from a
distribution or a recording. Nothing here needs JAX.
"""

from __future__ import annotations

from tools.simulation.compare import WAYS, Outcome, compare_ways
from tools.simulation.hardware import TABLES, StepTable, find_table
from tools.simulation.steps import Plan, Simulation, StepReport
from tools.simulation.workload import (
    Lengths,
    LognormalLengths,
    RecordedLengths,
    read_lengths,
)

__all__ = [
    "TABLES",
    "WAYS",
    "Lengths",
    "LognormalLengths",
    "Outcome",
    "Plan",
    "RecordedLengths",
    "Simulation",
    "StepReport",
    "StepTable",
    "compare_ways",
    "find_table",
    "read_lengths",
]
