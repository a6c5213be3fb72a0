"""An engine's programs, compiled for accelerators that this machine does not have.

The vendor's compiler says what each program takes: memory, exchanges, copies, kernels. Nothing is
run, and how fast it would be is an estimate.
"""

from __future__ import annotations

from sgljax_engine.aot.chips import CHIPS, Chip, parse_topology
from sgljax_engine.aot.compile import WHICH, AotReport, compile_programs
from sgljax_engine.aot.launches import StepLaunches
from sgljax_engine.aot.report import OpCount, ProgramMemory, ProgramReport
from sgljax_engine.aot.roofline import Estimate
from sgljax_engine.aot.topology import topology_mesh

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
