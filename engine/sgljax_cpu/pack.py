"""Packs weights into panels on CPUs, at the speed of a copy, and casts them on the way.

A panel takes whole cache lines from rows [in, out], as trainers have them. From rows [out, in], as
Hugging Face has them, squares with as many rows as a vector has lanes are transposed in registers,
by exchanging halves of ever shorter runs of lanes between pairs of rows (Eklundh, 1972).

The kernel also checks for NaN and infinity; see `copy`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from sgljax_cpu.copy import SeenValues, are_unset, flags_of
from sgljax_cpu.emit import I64, PTR, VOID, Code, Module, Number, Value, vector
from sgljax_cpu.machine import Vectors
from sgljax_cpu.numbers import STORED, load_as_float, rounded, widen
from sgljax_cpu.operation import Operation, Plan, Shapes, read_values
from sgljax_cpu.panels import PANEL, num_panels
from sgljax_cpu.primitive import run

_CHUNK_PANELS = 16
"""Panels of a chunk: neighbouring cache lines of each row [in, out]."""


_BLOCK_ROWS = 16
"""Rows [in, out] that a chunk takes through its panels at a time, for runs of cache lines there."""

_Load = Callable[[Value, Value], Value]


def pack(x: jax.Array, dtype: jnp.dtype, *, is_by_output: bool) -> tuple[jax.Array, jax.Array]:
    """A weight in panels, and bool []: whether all its values are finite in the dtype.

    Args:
        x: [..., out, in] by output, else [..., in, out], float32, bfloat16 or float16.
        dtype: Of the panels, likewise.
        is_by_output: Whether a row of `x` has the inputs of one output.
    """
    *stacked, rows, columns = x.shape
    num_inputs, num_outputs = (columns, rows) if is_by_output else (rows, columns)
    count = num_panels(num_outputs)
    panels = jax.ShapeDtypeStruct((*stacked, count, num_inputs, PANEL), dtype)
    per_weight = -(-count // _CHUNK_PANELS)
    operation = _operation(x.dtype.name, jnp.dtype(dtype).name, is_by_output)
    packed, flags = run(operation, [x], [panels, flags_of(math.prod(stacked) * per_weight)])
    return packed, are_unset(flags)


@functools.cache
def _operation(source: str, target: str, is_by_output: bool) -> Operation:
    write = functools.partial(_write, source=source, target=target, is_by_output=is_by_output)
    return Operation("pack", write, functools.partial(_plan, is_by_output=is_by_output))


def _plan(arguments: Shapes, results: Shapes, threads: int, *, is_by_output: bool) -> Plan:
    del threads
    *_, count, num_inputs, _ = results[0].shape
    num_outputs = arguments[0].shape[-2 if is_by_output else -1]
    return Plan(results[1].shape[0], (num_inputs, num_outputs, count))


def _write(
    module: Module, vectors: Vectors, *, source: str, target: str, is_by_output: bool
) -> Value:
    """Writes f(values, chunk): some panels of one weight."""
    lanes = vectors.lanes
    with Code(module, "panels", VOID, [PTR, I64]) as code:
        values, chunk = code.arguments
        x, y, flags, num_inputs, num_outputs, count = read_values(code, values, 3, 3)
        per_weight = code.ceil_div(count, _CHUNK_PANELS)
        weight, part = code.div(chunk, per_weight), code.rem(chunk, per_weight)
        x = code.at(x, code.mul(weight, code.mul(num_inputs, num_outputs)), STORED[source])
        panel_size = code.mul(num_inputs, PANEL)
        y = code.at(y, code.mul(weight, code.mul(count, panel_size)), STORED[target])
        first = code.mul(part, _CHUNK_PANELS)
        last = code.min(code.add(first, _CHUNK_PANELS), count)
        seen = SeenValues(code, lanes)

        def keep(found: Value, place: Value) -> None:
            """Stores a vector, rounded."""
            stored = rounded(code, found, target)
            code.store(stored, code.at(y, place, STORED[target]), 1)
            seen.add_zeros(code.float_op("fmul", widen(code, stored, target), code.zeros(lanes)))

        def load_some(place: Value, wanted: Value, stride: Number = 1) -> Value:
            """A vector of numbers a stride apart: as many as wanted, then zeros."""
            found = code.stack(f"[{lanes} x float]")
            code.store(code.zeros(lanes), found)
            with code.loop(0, code.min(code.max(wanted, 0), lanes)) as lane:
                at = code.at(x, code.add(place, code.mul(lane, stride)), STORED[source])
                one = load_as_float(code, at, source, 1)
                code.store(code.lane(one, 0), code.at(found, lane))
            return code.load(found, vector(lanes))

        def load(place: Value) -> Value:
            return load_as_float(code, code.at(x, place, STORED[source]), source, lanes)

        halves = range(0, PANEL, lanes)
        if not is_by_output:
            whole = code.min(last, code.div(num_outputs, PANEL))

            def of_panels(begin: Value, end: Value, load_at: _Load) -> None:
                blocks = code.loop(0, num_inputs, _BLOCK_ROWS)
                with blocks as block, code.loop(begin, end) as panel:
                    stop = code.min(code.add(block, _BLOCK_ROWS), num_inputs)
                    output = code.mul(panel, PANEL)
                    with code.loop(block, stop) as index:
                        place = code.add(code.mul(panel, panel_size), code.mul(index, PANEL))
                        row = code.mul(index, num_outputs)
                        for half in halves:
                            at = code.add(output, half)
                            keep(load_at(code.add(row, at), at), code.add(place, half))

            of_panels(first, whole, lambda place, output: load(place))
            of_panels(
                code.max(whole, first),
                last,
                lambda place, output: load_some(place, code.sub(num_outputs, output)),
            )
        else:
            square = _write_square(module, lanes, source, target)
            whole = code.mul(code.div(num_inputs, lanes), lanes)
            with code.loop(first, last) as panel:
                for half in halves:
                    output = code.add(code.mul(panel, PANEL), half)
                    place = code.add(code.mul(panel, panel_size), half)
                    is_full = code.less(code.add(output, lanes - 1), num_outputs)
                    begin = code.select(is_full, whole, 0)
                    with code.loop(0, begin, lanes) as index:
                        from_ = code.add(code.mul(output, num_inputs), index)
                        to = code.add(place, code.mul(index, PANEL))
                        arguments = [
                            code.at(x, from_, STORED[source]),
                            code.at(y, to, STORED[target]),
                            num_inputs,
                        ]
                        seen.add_zeros(code.call(square, vector(lanes), arguments))
                    with code.loop(begin, num_inputs) as index:
                        from_ = code.add(code.mul(output, num_inputs), index)
                        left = code.sub(num_outputs, output)
                        to = code.add(place, code.mul(index, PANEL))
                        keep(load_some(from_, left, num_inputs), to)
        seen.store_flag(flags, chunk)
    return code.function


def _write_square(module: Module, lanes: int, source: str, target: str) -> Value:
    """Writes f(source, target, source_stride): transposes a square into a panel.

    Returns the sum of its rows, each times 0.
    """
    with Code(module, "square", vector(lanes), [PTR, PTR, I64]) as code:
        x, y, stride = code.arguments
        rows = [
            load_as_float(code, code.at(x, code.mul(stride, row), STORED[source]), source, lanes)
            for row in range(lanes)
        ]
        zeros = code.zeros(lanes)
        for row, column in enumerate(transpose_tile(code, rows)):
            stored = rounded(code, column, target)
            code.store(stored, code.at(y, row * PANEL, STORED[target]), 1)
            zeros = code.fma(widen(code, stored, target), code.zeros(lanes), zeros)
        code.ret(zeros)
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
