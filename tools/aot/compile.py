"""Compiles an engine's programs for devices that this machine need not have."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jax

from sgljax_engine.builder.group import build_shapes
from sgljax_engine.config import EngineConfig
from sgljax_engine.model_config import ModelConfig
from sgljax_engine.preview import EnginePreview, preview_engine
from sgljax_engine.runner.compile.compiled import ProgramCall
from sgljax_engine.runner.compile.program_fit import ProgramDoesNotFit
from sgljax_engine.runner.runner import ModelRunner
from sgljax_engine.runner.warmup import Extra, call_size, largest, warm_calls
from tools.aot.chips import Chip
from tools.aot.report import ProgramReport, read_program
from tools.aot.roofline import Estimate, estimate

WHICH = ("largest", "all", "none")
"""Which sizes of each program to compile."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AotReport:
    """An engine that was compiled for a chip, and not run.

    Attributes:
        chip: The chip.
        preview: What the engine would use. Its `memory` is of one engine of the group.
        programs: The programs; none if weights or pages do not fit, or none was asked for.
        estimates: How fast the chip could run the largest decode and prefill programs.
    """

    chip: Chip
    preview: EnginePreview
    programs: tuple[ProgramReport, ...]
    estimates: tuple[Estimate, ...]

    @property
    def held_bytes(self) -> int:
        """Bytes of one device that weights and KV take; 0 if they do not fit."""
        memory = self.preview.memory
        if memory is None:
            return 0
        return (memory.weights_bytes + memory.kv_bytes) // self.preview.tp_size

    @property
    def needed_bytes(self) -> int:
        """Bytes of one device that weights, KV and the program that needs most take.

        Of a program that does not fit, the compiler does not say all.
        """
        needed = [self.held_bytes]
        for program in self.programs:
            if program.memory is not None:
                held = max(self.held_bytes, program.memory.argument_bytes)
                needed.append(held + program.memory.extra_bytes)
        return max(needed)

    @property
    def problem(self) -> str | None:
        """Why the engine does not fit the chip; None if it does."""
        if self.preview.problem is not None:
            return self.preview.problem
        for program in self.programs:
            if program.problem is not None:
                return f"{program.name} of {program.size}: {program.problem}"
        if self.needed_bytes > self.chip.usable_bytes:
            return (
                f"weights, KV and programs take {self.needed_bytes} bytes of a device; "
                f"{self.chip.usable_bytes} can be used"
            )
        return None


def compile_programs(
    model: ModelConfig,
    *,
    chip: Chip,
    mesh: jax.sharding.Mesh,
    config: EngineConfig | None = None,
    folder: str | Path | None = None,
    which: Literal["largest", "all", "none"] = "largest",
    on_program: Callable[[str, int], None] = lambda name, size: None,
) -> AotReport:
    """Compiles the programs of an engine by the compiler of its devices, and runs none.

    Of a group of engines it compiles for the first; those of the others are the same.

    Args:
        model: The model's shape.
        chip: The kind of device that the mesh is of.
        mesh: As for `Engine`; its devices may be those of `topology_mesh`.
        config: As for `Engine`.
        folder: The model's Hugging Face folder, whose config.json may name the dtype.
        which: "largest": decode, prefill and page copies, each for the largest batch. "all": every
            program, those of scores and of changed logits too. "none": weights and KV are counted.
        on_program: Told of each program before it is compiled: its name and its size.

    Raises:
        InvalidConfigError: names an option that the engine would refuse.
        UnsupportedModelError: for an architecture that is not implemented.
    """
    config = config or EngineConfig()
    preview = preview_engine(
        model, folder=folder, mesh=mesh, config=config, device_bytes=chip.usable_bytes
    )
    if preview.problem is not None or which == "none":
        return AotReport(chip=chip, preview=preview, programs=(), estimates=())
    runner, memory = build_shapes(model, config, preview.dtype, mesh, chip.usable_bytes)
    preview = dataclasses.replace(preview, memory=memory)
    is_all = which == "all"
    include: frozenset[Extra] = frozenset({"score", "table"}) if is_all else frozenset()
    calls = list(warm_calls(runner, include, has_shared=is_all))
    programs = []
    for call in calls if is_all else largest(calls):
        on_program(call.name, call_size(call))
        programs.append(compile_call(runner, call, chip, model))
    fitting = [program for program in programs if program.memory is not None]
    estimates = [
        each
        for name in ("decode", "prefill")
        for program in _largest_of(fitting, name)
        for each in estimate(chip, model, preview, program)
    ]
    return AotReport(
        chip=chip, preview=preview, programs=tuple(programs), estimates=tuple(estimates)
    )


def _largest_of(programs: list[ProgramReport], name: str) -> list[ProgramReport]:
    """The largest program of a name, in a list that is empty if there is none."""
    found = [program for program in programs if program.name == name]
    return sorted(found, key=lambda program: program.size)[-1:]


def _large_sizes(runner: ModelRunner) -> set[int]:
    """Elements on one device of a layer's KV pages, and of each weight that is a matrix."""
    weights = [weight for weight in runner.weights.values() if len(weight.shape) > 1]
    arrays: list[Any] = [*weights, *jax.tree.leaves(runner.kv_memory.state(runner.weights).kv)]
    return {math.prod(array.sharding.shard_shape(array.shape)) for array in arrays}


def compile_call(
    runner: ModelRunner, call: ProgramCall, chip: Chip, model: ModelConfig
) -> ProgramReport:
    """Compiles one program of a runner that has shapes for weights."""
    large = _large_sizes(runner)
    num_layers = model.num_layers if chip.platform == "gpu" else None
    started = time.perf_counter()
    name, size = call.name, call_size(call)
    try:
        compiled = runner.programs.compile_alone(call, runner.kv_memory.state(runner.weights))
    except ProgramDoesNotFit as error:
        compile_s = time.perf_counter() - started
        return ProgramReport(name=name, size=size, problem=str(error), compile_s=compile_s)
    compile_s = time.perf_counter() - started
    return read_program(
        compiled, name=name, size=size, large=large, num_layers=num_layers, compile_s=compile_s
    )
