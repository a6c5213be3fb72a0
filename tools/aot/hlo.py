"""Reads compiled programs: the text of an optimized HLO module."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

_COMPUTATION = re.compile(r"(ENTRY )?%?([^\s(]+) \(.*\{$")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?(\S+) = ")
_OPCODE = re.compile(r" ([a-z][a-z0-9-]*)\(")
_ARRAY = re.compile(r"([a-z][a-z0-9]*)\[([0-9,<=]*)\](?:\{([^}]*)\})?")
_MEMORY_SPACE = re.compile(r"S\((\d+)\)")

_CALLS = {
    "while": re.compile(r"(?:body|condition)=%?([^\s,}]+)"),
    "conditional": re.compile(r"(?:true_computation|false_computation)=%?([^\s,}]+)"),
    "call": re.compile(r"to_apply=%?([^\s,}]+)"),
    "fusion": re.compile(r"calls=%?([^\s,}]+)"),
    "async-start": re.compile(r"calls=%?([^\s,}]+)"),
}
"""How instructions that run other computations name them."""

_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")


class Array(NamedTuple):
    """An array type.

    Attributes:
        dtype: XLA's name: "bf16", "f32", "s32", "pred".
        shape: The dimensions.
        memory_space: 0 for the device's memory; others are smaller and on the chip.
    """

    dtype: str
    shape: tuple[int, ...]
    memory_space: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes without padding."""
        return math.ceil(self.size * _bits(self.dtype) / 8)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


class Instruction(NamedTuple):
    """An instruction.

    Attributes:
        name: Its name, without the leading "%".
        opcode: What it does: "fusion", "all-reduce-start".
        arrays: The arrays of its result, from left to right.
        text: The whole line.
        is_root: Whether it is the result of its computation.
    """

    name: str
    opcode: str
    arrays: tuple[Array, ...]
    text: str
    is_root: bool


class Visit(NamedTuple):
    """An instruction where the program runs it.

    Attributes:
        instruction: The instruction.
        num_loops: Loops around it. It runs once per iteration of the innermost.
        is_conditional: Whether it is in a branch, which may not be taken.
        is_fused: Whether it is a part of a fusion, whose inner results are in no memory.
    """

    instruction: Instruction
    num_loops: int
    is_conditional: bool
    is_fused: bool


class Module:
    """A parsed module.

    Attributes:
        computations: Instructions of each computation, by its name.
        entry: Name of the computation that is the program.
    """

    def __init__(self, text: str) -> None:
        """Parses a module.

        Args:
            text: What `jax.stages.Compiled.as_text` returns.

        Raises:
            ValueError: when the text has no entry computation.
        """
        self.computations: dict[str, list[Instruction]] = {}
        entry, current = None, None
        for line in text.splitlines():
            if current is None:
                match = _COMPUTATION.match(line)
                if match is not None:
                    current = self.computations[match[2]] = []
                    entry = match[2] if match[1] else entry
            elif line.startswith("}"):
                current = None
            else:
                instruction = _parse(line)
                if instruction is not None:
                    current.append(instruction)
        if entry is None:
            raise ValueError("the text is no HLO module: it has no ENTRY computation")
        self.entry = entry

    def visits(self) -> Iterator[Visit]:
        """All instructions that the program can run, at each place from which it runs them.

        Functions that an instruction applies to elements, as a reduction does, are left out.
        """
        yield from self._visit(self.entry, 0, is_conditional=False, is_fused=False)

    def root(self, name: str) -> Instruction:
        """The instruction whose result is that of a computation."""
        return next(each for each in self.computations[name] if each.is_root)

    def by_name(self, name: str) -> dict[str, Instruction]:
        """The instructions of a computation by their names."""
        return {each.name: each for each in self.computations[name]}

    def _visit(
        self, name: str, num_loops: int, *, is_conditional: bool, is_fused: bool
    ) -> Iterator[Visit]:
        for instruction in self.computations[name]:
            yield Visit(instruction, num_loops, is_conditional, is_fused)
            for callee in called(instruction):
                yield from self._visit(
                    callee,
                    num_loops + (instruction.opcode == "while"),
                    is_conditional=is_conditional or instruction.opcode == "conditional",
                    is_fused=is_fused or instruction.opcode == "fusion",
                )


def called(instruction: Instruction) -> list[str]:
    """Names of the computations that an instruction runs."""
    pattern = _CALLS.get(instruction.opcode)
    if pattern is None:
        return []
    names = pattern.findall(instruction.text)
    for branches in _BRANCHES.findall(instruction.text):
        names += [name.strip().lstrip("%") for name in branches.split(",")]
    return names


def operands(instruction: Instruction) -> list[str]:
    """Names of an instruction's operands, in order; none of literals."""
    start = instruction.text.index(f" {instruction.opcode}(") + len(instruction.opcode) + 2
    depth, end = 1, start
    while depth:
        depth += {"(": 1, ")": -1}.get(instruction.text[end], 0)
        end += 1
    return re.findall(r"%([\w.\-]+)", instruction.text[start : end - 1])


def _parse(line: str) -> Instruction | None:
    match = _INSTRUCTION.match(line)
    if match is None:
        return None
    opcode = _OPCODE.search(line, match.end() - 1)
    if opcode is None:
        return None
    result = line[match.end() : opcode.start()]
    arrays = tuple(map(_to_array, _ARRAY.finditer(result)))
    return Instruction(match[2], opcode[1], arrays, line, match[1] is not None)


def _to_array(match: re.Match[str]) -> Array:
    sizes = [size.lstrip("<=") for size in match[2].split(",")]
    space = _MEMORY_SPACE.search(match[3] or "")
    shape = tuple(int(size) for size in sizes if size)
    return Array(match[1], shape, int(space[1]) if space else 0)


def _bits(dtype: str) -> int:
    if dtype == "pred":
        return 8
    if dtype == "token":
        return 0
    digits = re.match(r"[a-z]+(\d+)", dtype)
    return int(digits[1]) if digits else 0
