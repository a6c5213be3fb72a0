"""An engine's programs, compiled for accelerators that this machine does not have.

The vendor's compiler says what each program takes: memory, exchanges, copies, kernels. Nothing is
run, and how fast it would be is an estimate.
"""

from __future__ import annotations

from tools.aot.chips import CHIPS, Chip, parse_topology
from tools.aot.compile import WHICH, AotReport, compile_programs
from tools.aot.launches import StepLaunches
from tools.aot.report import OpCount, ProgramMemory, ProgramReport
from tools.aot.roofline import Estimate
from tools.aot.topology import topology_mesh

__all__ = [
    "CHIPS",
    "WHICH",
    "AotReport",
    "Chip",
    "Estimate",
    "OpCount",
    "ProgramMemory",
    "ProgramReport",
    "StepLaunches",
    "compile_programs",
    "parse_topology",
    "topology_mesh",
]
