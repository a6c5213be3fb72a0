"""A row of logits in the code of the kernels that sample."""

from __future__ import annotations

from collections.abc import Callable

from sgljax_cpu.emit import F32, Code, Number, Value, f32
from sgljax_cpu.math import exp
from sgljax_cpu.operation import Plan, Shapes

BLOCK = 128
"""Logits that are summed by lane before others are added."""

PART = 32 * BLOCK
"""Logits of a row that a thread takes at a time."""


class Row:
    """A row of logits in the code of a kernel."""

    def __init__(
        self, code: Code, lanes: int, logits: Value, row: Value, size: Value, peaks: Value | None
    ) -> None:
        """Takes the row's largest logit from `peaks`, unless that is None."""
        self.code, self.lanes, self.size = code, lanes, size
        self.base = code.at(logits, code.mul(row, size))
        self.row = row
        self.num_parts = code.ceil_div(size, PART)
        if peaks is not None:
            self.peak = self._largest_of(peaks)

    def _largest_of(self, peaks: Value) -> Value:
        code = self.code
        first = code.mul(self.row, self.num_parts)
        found = code.variable(code.load(code.at(peaks, first), F32))
        with code.loop(1, self.num_parts) as part:
            value = code.load(code.at(peaks, code.add(first, part)), F32)
            found.set(code.float_max(found.get(), value))
        return found.get()

    def in_vectors(
        self, begin: Number, end: Value, one: Callable[[Value, Value, Value], None]
    ) -> None:
        """Emits a loop: takes indices of vectors, their logits, and which lanes are there."""
        code, lanes = self.code, self.lanes
        with code.loop(begin, end, lanes) as at:
            there = code.first_lanes(code.sub(end, at), lanes)
            found = code.load_lanes(code.at(self.base, at), there, lanes)
            one(at, found, there)

    def scaled(self, values: Value, divisor: Value) -> Value:
        """(logit - largest) / temperature of a vector."""
        code, lanes = self.code, self.lanes
        below = code.float_op("fsub", values, code.splat(self.peak, lanes))
        return code.float_op("fdiv", below, code.splat(divisor, lanes))

    def scaled_at(self, index: Value, divisor: Value) -> Value:
        """`scaled` of one logit."""
        code = self.code
        value = code.load(code.at(self.base, index), F32)
        return code.float_op("fdiv", code.float_op("fsub", value, self.peak), divisor)

    def weights(self, values: Value, there: Value, divisor: Value, least: Value) -> Value:
        """Exponentials of the logits of a vector that are at least `least`, else 0."""
        code = self.code
        found = exp(code, self.scaled(values, divisor))
        return code.select(self.reaches(values, there, least), found, code.zeros(self.lanes))

    def reaches(self, values: Value, there: Value, least: Value) -> Value:
        """Which logits of a vector are there and at least `least`."""
        limit = self.code.splat(least, self.lanes)
        return self.code.both(there, self.code.float_compare("oge", values, limit))


def part_of_row(code: Code, chunk: Value, size: Value) -> tuple[Value, Value, Value]:
    """The row of a chunk that is a part, and where the part begins and ends in the row."""
    num_parts = code.ceil_div(size, PART)
    begin = code.mul(code.rem(chunk, num_parts), PART)
    return code.div(chunk, num_parts), begin, code.min(code.add(begin, PART), size)


def divisor_of(code: Code, temperatures: Value, row: Value) -> Value:
    """Divisor of a row's logits."""
    found = code.load(code.at(temperatures, row), F32)
    return code.select(code.float_compare("oeq", found, f32(0.0)), f32(1.0), found)


def plan_rows(arguments: Shapes, results: Shapes, threads: int, *, wide: int | None = None) -> Plan:
    """Sizes: the vocabulary, and the last axis of one more argument."""
    del results, threads
    num_rows, size = arguments[0].shape
    return Plan(num_rows, (size,) if wide is None else (size, arguments[wide].shape[-1]))
