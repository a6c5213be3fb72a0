"""Bytes that a compiled program moves between a device's memory and the chip.

XLA's own count includes memory on the chip, so what is fetched there counts again when it is used.
Here an instruction reads its operands and writes its results as far as they are in the device's
memory; a fusion that takes slices of an operand reads these; what is updated in place is written as
far as it changes. Kernels that XLA did not make say themselves what they move, wherever it is: what
they are given, and leave, on the chip does not count.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from tools.aot.hlo import Array, Instruction, Module, called, operands

_FREE = {
    "parameter",
    "tuple",
    "get-tuple-element",
    "constant",
    "iota",
    "bitcast",
    "while",
    "conditional",
    "call",
    "opt-barrier",
    "after-all",
    "partition-id",
    "replica-id",
    "async-start",
    "async-done",
    "async-update",
    "copy-done",
    "slice-done",
    "all-reduce-done",
    "all-gather-done",
    "collective-permute-done",
}
"""They move nothing of their own: names for what is there, what runs other computations, and the
end of what was counted when it began."""

_KERNEL_BYTES = re.compile(r'"bytes_accessed":"?(\d+)')
_SLICES = ("dynamic-slice", "gather", "slice")
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}
"""Instructions that change a part of their first operand in place; index of the part's operand."""


def count_traffic(module: Module) -> int:
    """Bytes read and written: bodies of loops once, branches, which may not be taken, never."""
    return _traffic_of(module, module.entry)


def _traffic_of(module: Module, name: str) -> int:
    """Bytes that a computation of the program moves."""
    known = module.by_name(name)
    total = 0
    for instruction in module.computations[name]:
        total += _moved(module, known, instruction)
        if instruction.opcode in ("while", "call", "async-start"):
            total += sum(_traffic_of(module, callee) for callee in called(instruction))
    return total


def _moved(module: Module, known: dict[str, Instruction], instruction: Instruction) -> int:
    opcode = instruction.opcode
    if opcode in _FREE:
        return 0
    if opcode == "copy-start":
        return _in_memory(instruction.arrays[:2])  # the target and the source
    if opcode == "slice-start":
        source, target = instruction.arrays[:2]
        is_read, is_written = (array.memory_space == 0 for array in (source, target))
        return target.num_bytes * (is_read + is_written)
    given = [known.get(name) for name in operands(instruction)]
    kernel = _KERNEL_BYTES.search(instruction.text) if opcode == "custom-call" else None
    if kernel is not None:
        arrays = [array for each in given if each is not None for array in each.arrays]
        return max(int(kernel[1]) - _on_chip([*arrays, *instruction.arrays]), 0)
    if opcode == "fusion":
        return _moved_by_fusion(module, instruction, given)
    part = given[_UPDATES[opcode]] if opcode in _UPDATES else None
    if part is not None:
        return 2 * _in_memory(part.arrays)
    if opcode in _SLICES:
        return 2 * _in_memory(instruction.arrays)
    read = sum(_in_memory(each.arrays) for each in given if each is not None)
    return read + _in_memory(instruction.arrays)


def _moved_by_fusion(
    module: Module, instruction: Instruction, given: list[Instruction | None]
) -> int:
    (inner,) = called(instruction)
    parts = module.by_name(inner)
    total = _in_memory(instruction.arrays)
    root = module.root(inner)
    if root.opcode in _UPDATES:
        part = parts[operands(root)[_UPDATES[root.opcode]]]
        total = min(total, sum(array.num_bytes for array in part.arrays))
    for index, each in enumerate(given):
        if each is None:
            continue
        used = _used_of_parameter(module, inner, index)
        size = _in_memory(each.arrays)
        total += size if used is None else min(size, used)
    return total


def _used_of_parameter(module: Module, name: str, place: int) -> int | None:
    """Bytes of slices that a fused computation takes of a parameter; None if it takes all."""
    body = module.computations[name]
    names = {each.name for each in body if f" parameter({place})" in each.text}
    total = 0
    for each in body:
        given = operands(each)
        if not names.intersection(given):
            continue
        if each.opcode == "bitcast":
            names.add(each.name)
        elif given[0] in names and not names.intersection(given[1:]) and each.opcode in _SLICES:
            total += each.arrays[0].num_bytes
        elif given[0] not in names or names.intersection(given[1:]) or each.opcode not in _UPDATES:
            return None
    return total


def _on_chip(arrays: Iterable[Array]) -> int:
    """Bytes of those that are in memory on the chip."""
    return sum(array.num_bytes for array in arrays if array.memory_space != 0)


def _in_memory(arrays: Iterable[Array]) -> int:
    """Bytes of those that are in the device's memory."""
    return sum(array.num_bytes for array in arrays if array.memory_space == 0)
