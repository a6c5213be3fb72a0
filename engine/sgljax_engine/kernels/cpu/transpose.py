"""Transposes float32 matrices on CPUs, at the speed of a copy.

Squares with as many rows as a vector has lanes are transposed in registers, by exchanging halves of
ever shorter runs of lanes between pairs of rows (Eklundh, 1972). Several adjacent squares are read
before the next rows, so that memory is read in runs of several cache lines.

The kernel also checks for NaN and infinity; see `kernels.cpu.copy`.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax

from sgljax_engine.kernels.cpu.copy import SeenValues, clear_flag, is_unset
from sgljax_engine.kernels.cpu.emit import F32, I64, PTR, VOID, Code, Module, Number, Value, vector
from sgljax_engine.kernels.cpu.ffi import Buffer, Job, Operation, read_values, register
from sgljax_engine.kernels.cpu.machine import Vectors

_LINE = 16
"""Floats of a cache line."""

_COLUMNS = 64
"""Columns in a chunk: some adjacent cache lines of each row."""


def transpose(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """[m, n] float32 to [n, m], and bool []: whether all values are finite."""
    results = jax.ShapeDtypeStruct(x.shape[::-1], x.dtype), jax.ShapeDtypeStruct((), x.dtype)
    transposed, flag = jax.ffi.ffi_call(register(_TRANSPOSE), results)(x)
    return transposed, is_unset(flag)


def _plan(code: Code, buffers: Sequence[Buffer], threads: Value) -> Job:
    del threads
    x, y, flag = buffers
    num_rows, num_columns = x.dim(0), x.dim(1)
    clear_flag(code, flag.data)
    values = [x.data, y.data, flag.data, num_rows, num_columns]
    return Job(code.ceil_div(num_columns, _COLUMNS), values)


def _write_chunk(module: Module, vectors: Vectors) -> Value:
    """Writes f(values, chunk): some columns of the matrix."""
    lanes = vectors.lanes
    squares = [_write_square(module, lanes, is_past_caches) for is_past_caches in (False, True)]
    with Code(module, "columns", VOID, [PTR, I64]) as code:
        values, chunk = code.arguments
        x, y, flag, num_rows, num_columns = read_values(code, values, 3, 2)
        begin = code.mul(chunk, _COLUMNS)
        end = code.min(code.add(begin, _COLUMNS), num_columns)
        whole_rows = code.mul(code.div(num_rows, lanes), lanes)
        whole_end = code.add(begin, code.mul(code.div(code.sub(end, begin), lanes), lanes))
        # Rows of squares are then whole cache lines, which need not be read before the write.
        address = code.convert("ptrtoint", y, I64)
        seen = SeenValues(code, lanes)
        is_aligned = code.both(
            code.equal(code.rem(address, 4 * _LINE), 0), code.equal(code.rem(num_rows, _LINE), 0)
        )
        # A cache line of the result is written at once, with short vectors one half after the
        # other.
        with (
            code.loop(0, whole_rows, _LINE) as line,
            code.loop(begin, whole_end, lanes) as column,
            code.loop(line, code.min(code.add(line, _LINE), whole_rows), lanes) as row,
        ):
            source = code.at(x, code.add(code.mul(row, num_columns), column))
            target = code.at(y, code.add(code.mul(column, num_rows), row))
            for square, condition in zip(squares, (code.unless, code.when), strict=True):
                with condition(is_aligned):
                    arguments = [source, target, num_columns, num_rows]
                    seen.add_zeros(code.call(square, vector(lanes), arguments))

        def one_by_one(rows: tuple[Number, Value], columns: tuple[Value, Value]) -> None:
            with code.loop(*columns) as column, code.loop(*rows) as row:
                value = code.load(code.at(x, code.add(code.mul(row, num_columns), column)), F32)
                code.store(value, code.at(y, code.add(code.mul(column, num_rows), row)))
                seen.add_one(value)

        one_by_one((whole_rows, num_rows), (begin, whole_end))
        one_by_one((0, num_rows), (whole_end, end))
        seen.set_flag(flag)
    return code.function


def _write_square(module: Module, lanes: int, is_past_caches: bool) -> Value:
    """Writes f(source, target, source_stride, target_stride): a square of `lanes` rows.

    Returns the sum of its rows, each times 0.
    """
    name = f"square_{'past' if is_past_caches else 'through'}_caches"
    with Code(module, name, vector(lanes), [PTR, PTR, I64, I64]) as code:
        source, target, source_stride, target_stride = code.arguments
        rows = [
            code.load(code.at(source, code.mul(source_stride, row)), vector(lanes), 4)
            for row in range(lanes)
        ]
        zeros = code.zeros(lanes)
        for row in rows:
            zeros = code.fma(row, code.zeros(lanes), zeros)
        for row, column in enumerate(transpose_tile(code, rows)):
            place = code.at(target, code.mul(target_stride, row))
            if is_past_caches:
                code.store_past_caches(column, place, lanes * 4)
            else:
                code.store(column, place, 4)
        code.give(zeros)
    return code.function


def transpose_tile(code: Code, rows: Sequence[Value]) -> list[Value]:
    """The columns of a square given by its rows: as many vectors as a row has lanes."""
    lanes = len(rows)
    distance, rows = lanes // 2, list(rows)
    while distance:
        exchanged = list(rows)
        for low in range(lanes):
            if not low & distance:
                high = low | distance
                exchanged[low], exchanged[high] = _exchange(
                    code, rows[low], rows[high], distance, lanes
                )
        rows = exchanged
        distance //= 2
    return rows


def _exchange(
    code: Code, low: Value, high: Value, distance: int, lanes: int
) -> tuple[Value, Value]:
    """Exchanges lanes of `low` that have the bit of `distance` with lanes of `high` that do not."""
    has_bit = [bool(lane & distance) for lane in range(lanes)]
    new_low = [lanes + lane - distance if has_bit[lane] else lane for lane in range(lanes)]
    new_high = [lanes + lane if has_bit[lane] else lane + distance for lane in range(lanes)]
    return code.shuffle(low, high, new_low), code.shuffle(low, high, new_high)


_TRANSPOSE = Operation("transpose", 1, 2, _write_chunk, _plan)
