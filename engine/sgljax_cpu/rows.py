"""Rows of floats in the code of kernels that take some rows at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from sgljax_cpu.emit import Code, Value, i32, vector

_CHUNK = 4096
"""Floats of a chunk, about."""


def rows_of_chunk(num_rows: int, row_size: int, threads: int) -> int:
    """Rows of a chunk, for work that is little per row."""
    return max(min(_CHUNK // max(row_size, 1), -(-num_rows // threads)), 1)


class VectorAt(NamedTuple):
    """How to load and store vectors at one place of rows.

    Attributes:
        code: Code of the kernel.
        lanes: Numbers of a vector.
        there: Conditions, which lanes are in the row; None if all are.
    """

    code: Code
    lanes: int
    there: Value | None

    def load(self, address: Value) -> Value:
        """Loads floats; 0 in lanes that are not there."""
        if self.there is None:
            return self.code.load(address, vector(self.lanes), 4)
        return self.code.load_lanes(address, self.there, self.lanes)

    def load_conditions(self, address: Value) -> Value:
        """Loads bools, a byte each."""
        code, lanes = self.code, self.lanes
        bytes_ = vector(lanes, "i8")
        zeros = Value(bytes_, "zeroinitializer")
        if self.there is None:
            found = code.load(address, bytes_, 1)
        else:
            arguments = [address, i32(1), self.there, zeros]
            found = code.intrinsic(f"llvm.masked.load.v{lanes}i8.p0", bytes_, arguments)
        return code.compare("ne", found, zeros)

    def store(self, value: Value, address: Value) -> None:
        """Stores floats in lanes that are there."""
        if self.there is None:
            self.code.store(value, address, 4)
        else:
            self.code.store_lanes(value, address, self.there, self.lanes)


def in_vectors(code: Code, size: Value, lanes: int, one: Callable[[Value, VectorAt], None]) -> None:
    """Emits a loop over the vectors of a row; the last one may be partly filled.

    Args:
        code: Code of the kernel.
        size: Numbers of the row.
        lanes: Numbers of a vector.
        one: Takes the index of a vector's first number, and how to load and store there.
    """
    whole = code.mul(code.div(size, lanes), lanes)
    with code.loop(0, whole, lanes) as at:
        one(at, VectorAt(code, lanes, None))
    left = code.sub(size, whole)
    with code.when(code.less(0, left)):
        one(whole, VectorAt(code, lanes, code.first_lanes(left, lanes)))
