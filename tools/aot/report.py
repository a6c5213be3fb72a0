"""Costs of a compiled program, read off the program itself."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Collection
from typing import Any

from sgljax_engine.runner.compile.program_fit import ProgramMemory
from tools.aot.hlo import Array, Instruction, Module, Visit
from tools.aot.launches import OWN, StepLaunches, count_launches
from tools.aot.traffic import count_traffic

_COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-broadcast",
    "collective-permute",
)
_BOTH_IN_RESULT = ("all-gather-start", "collective-permute-start")
"""Their result holds the operand too."""

_COPIES = ("copy", "transpose")
_TPU_KERNELS = re.compile(r'custom_call_target="[^"]*tpu_custom_call')
_TARGET = re.compile(r'custom_call_target="([^"]*)"')


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpCount:
    """Instructions of one kind at one place of a program.

    Attributes:
        name: The opcode, or the kernel's name.
        array: Dtype and shape of the result, or of several, where all counted have the same;
            else "".
        count: Number of instructions.
        num_bytes: Bytes of their results on one device, together.
        num_loops: Loops around them; they run once per iteration of the innermost. A decode
            program has one loop over tokens.
        is_conditional: Whether they are in a branch, which may not be taken.
    """

    name: str
    array: str
    count: int
    num_bytes: int
    num_loops: int
    is_conditional: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramReport:
    """A compiled program; all numbers are of one device.

    Attributes:
        name: Name of the program: "decode", "prefill", "score", "copy_pages".
        size: Rows of decode, tokens of prefill and score, pages of copy_pages.
        memory: Its memory; None if it does not fit.
        problem: What the compiler says if it does not fit; None if it fits.
        flops: Operations, by the compiler. The body of a loop whose iterations it does not know
            counts once: a decode program counts one token of each row. None for GPUs, whose
            compiler does not count.
        memory_bytes: Bytes that go between the device's memory and the chip, see
            `traffic.count_traffic`; loops and GPUs as for `flops`. Branches do not count.
        collectives: Exchanges between devices.
        kernels: Calls of kernels that XLA did not make.
        copies: Copies and transpositions of arrays as large as a layer's KV pages or a weight.
        launches: Kernels that a GPU launches in a step; None for other devices.
        compile_s: Seconds that lowering and compilation took here.
    """

    name: str
    size: int
    memory: ProgramMemory | None = None
    problem: str | None = None
    flops: float | None = None
    memory_bytes: int | None = None
    collectives: tuple[OpCount, ...] = ()
    kernels: tuple[OpCount, ...] = ()
    copies: tuple[OpCount, ...] = ()
    launches: StepLaunches | None = None
    compile_s: float


def read_program(
    compiled: Any,
    *,
    name: str,
    size: int,
    large: Collection[int],
    num_layers: int | None = None,
    compile_s: float,
) -> ProgramReport:
    """The report of a compiled program.

    Args:
        compiled: A `jax.stages.Compiled`.
        name: Name of the program.
        size: Size of its batch.
        large: Numbers of elements of the arrays whose copies are reported.
        num_layers: The model's layers, for a GPU, whose launches are counted; else None.
        compile_s: Seconds that it took.
    """
    costs = compiled.cost_analysis() or {}
    module = Module(compiled.as_text())
    return ProgramReport(
        name=name,
        size=size,
        memory=ProgramMemory.of(compiled),
        flops=costs.get("flops"),
        memory_bytes=count_traffic(module) if "flops" in costs else None,
        collectives=count_collectives(module),
        kernels=count_kernels(module),
        copies=count_copies(module, large),
        launches=None if num_layers is None else count_launches(module, large, num_layers),
        compile_s=compile_s,
    )


def count_collectives(module: Module) -> tuple[OpCount, ...]:
    """Exchanges between devices, by kind, arrays and place."""
    found = _Counts()
    for visit in module.visits():
        opcode = visit.instruction.opcode
        kind = opcode.removesuffix("-start")
        if kind in _COLLECTIVES:
            arrays = _exchanged(visit.instruction)
            found.add(visit, kind, ", ".join(map(str, arrays)), _bytes_of(arrays))
    return found.result()


def count_kernels(module: Module) -> tuple[OpCount, ...]:
    """Calls of kernels that XLA did not make, by name and place."""
    found = _Counts()
    for visit in module.visits():
        if visit.instruction.opcode != "custom-call":
            continue
        target = _TARGET.search(visit.instruction.text)
        text = visit.instruction.text
        if target is not None and (OWN.search(text) or _TPU_KERNELS.search(text)):
            own = re.sub(r"(\.\d+|\.clone)+$", "", visit.instruction.name)
            found.add(visit, f"{target[1]} {own}", "", _bytes_of(visit.instruction.arrays))
    return found.result()


def count_copies(module: Module, large: Collection[int]) -> tuple[OpCount, ...]:
    """Copies and transpositions in memory of arrays with so many elements, by shape and place.

    Prefetches, which move an array as it is into memory on the chip, are left out.
    """
    found = _Counts()
    for visit in module.visits():
        instruction = visit.instruction
        if visit.is_fused or not instruction.arrays:
            continue
        kind = _copy_kind(module, instruction)
        array = instruction.arrays[0]
        if kind is not None and array.size in large:
            found.add(visit, kind, str(array), array.num_bytes)
    return found.result()


def _copy_kind(module: Module, instruction: Instruction) -> str | None:
    """Kind of a copying instruction, "copy" or "transpose"; None for others."""
    if instruction.opcode in _COPIES:
        return instruction.opcode
    if instruction.opcode == "copy-start":
        target, source = instruction.arrays[:2]
        return "copy" if target.memory_space == source.memory_space else None
    if instruction.opcode == "fusion":
        name = re.search(r"calls=%?([^\s,}]+)", instruction.text)
        root = None if name is None else module.root(name[1])
        return root.opcode if root is not None and root.opcode in _COPIES else None
    return None


def _exchanged(instruction: Instruction) -> Collection[Array]:
    """Arrays that an exchange leaves on a device."""
    if instruction.opcode in _BOTH_IN_RESULT:
        return (max(instruction.arrays, key=lambda array: array.num_bytes),)
    return instruction.arrays


def _bytes_of(arrays: Collection[Array]) -> int:
    return sum(array.num_bytes for array in arrays)


class _Counts:
    """Counts visits by name, array and place."""

    def __init__(self) -> None:
        self._count: Counter[tuple[str, str, int, bool]] = Counter()
        self._bytes: Counter[tuple[str, str, int, bool]] = Counter()

    def add(self, visit: Visit, name: str, array: str, num_bytes: int) -> None:
        key = name, array, visit.num_loops, visit.is_conditional
        self._count[key] += 1
        self._bytes[key] += num_bytes

    def result(self) -> tuple[OpCount, ...]:
        """All counts, those with the most bytes first."""
        keys = sorted(self._count, key=lambda key: (-self._bytes[key], key))
        return tuple(
            OpCount(
                name=name,
                array=array,
                count=self._count[name, array, num_loops, is_conditional],
                num_bytes=self._bytes[name, array, num_loops, is_conditional],
                num_loops=num_loops,
                is_conditional=is_conditional,
            )
            for name, array, num_loops, is_conditional in keys
        )
