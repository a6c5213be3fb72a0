"""The thresholds of top-k and top-p, on CPUs: those of a sort in float64.

They are looked up among the largest logits, and found by bisection where these do not reach. All
sums are float64.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from sgljax_cpu.emit import (
    F32,
    F64,
    I32,
    I64,
    PTR,
    VOID,
    Code,
    Module,
    Value,
    f32,
    f64,
    i32,
    vector,
)
from sgljax_cpu.machine import Vectors
from sgljax_cpu.math import exp_double
from sgljax_cpu.operation import Operation, read_values
from sgljax_cpu.primitive import run
from sgljax_cpu.sampling import Peaks
from sgljax_cpu.sampling_row import Row, plan_rows

_LOWEST = float("-inf")


def top_threshold(
    logits: jax.Array,
    peaks: Peaks,
    largest: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    inverse_temperature: jax.Array,
) -> jax.Array:
    """The smallest logit [B] float32 that top-k and then top-p keep, inside a program.

    -inf if both keep all. top-p keeps a token while the probability of all likelier kept tokens is
    below `top_p`. A pair of float32 is the sum of both.

    Args:
        logits: [B, V] float32.
        peaks: Of the logits.
        largest: [B, N] float32, descending: the row's largest logits.
        top_k: [B] int32 >= 1; V or more keeps all.
        top_p: [B, 2] float32, a pair; 1 keeps all.
        inverse_temperature: [B, 2] float32, a pair.
    """
    result = jax.ShapeDtypeStruct((logits.shape[0],), jnp.float32)
    arguments = [logits, peaks.values, largest, top_k, top_p, inverse_temperature]
    return run(_THRESHOLD, arguments, [result])[0]


def _write_threshold(module: Module, vectors: Vectors) -> Value:
    """Writes f(values, chunk): a row."""
    lanes = vectors.lanes
    with Code(module, "row", VOID, [PTR, I64]) as code:
        values, row = code.arguments
        logits, peaks, largest, top_k, top_p, inverse, found, size, num_sorted = read_values(
            code, values, 7, 2
        )
        this = _Masses(Row(code, lanes, logits, row, size, peaks), _double(code, inverse, row))
        sorted_ = code.at(largest, code.mul(row, num_sorted))
        count = code.load_int(top_k, row)
        share = _double(code, top_p, row)
        lowest = f32(_LOWEST)

        kth = code.variable(lowest)
        with code.when(code.less(count, size)):
            is_sorted = code.less(code.sub(count, 1), num_sorted)
            with code.when(is_sorted):
                kth.set(code.load(code.at(sorted_, code.sub(count, 1)), F32))
            with code.unless(is_sorted):
                kth.set(_bisect(code, lambda least: this.has(least, count)))
        limit = code.variable(kth.get())
        with code.when(code.float_compare("olt", share, f64(1.0))):
            total = this.mass_from(kth.get())
            target = code.float_op("fmul", share, total)
            nucleus = _sorted_nucleus(this, sorted_, num_sorted, kth.get(), target)
            limit.set(nucleus)
            with code.when(code.float_compare("oeq", nucleus, lowest)):

                def reaches(least: Value) -> Value:
                    mass = this.mass_from(code.float_max(least, kth.get()))
                    return code.float_compare("oge", mass, target)

                limit.set(_bisect(code, reaches))
        code.store(limit.get(), code.at(found, row))
    return code.function


def _double(code: Code, pairs: Value, row: Value) -> Value:
    """A row's number, of which the array has two float32."""
    place = code.mul(row, 2)
    high, low = (
        code.convert("fpext", code.load(code.at(pairs, code.add(place, part)), F32), F64)
        for part in (0, 1)
    )
    return code.float_op("fadd", high, low)


class _Masses:
    """Sums over a row of logits, in float64."""

    def __init__(self, row: Row, inverse: Value) -> None:
        self.row, self.code, self._inverse = row, row.code, inverse
        self._peak = self.code.convert("fpext", row.peak, F64)

    def weights(self, values: Value) -> Value:
        """Exponentials of (logit - largest) / temperature of a vector of float32."""
        code, lanes = self.code, self.row.lanes
        wide = code.convert("fpext", values, vector(lanes, F64))
        below = code.float_op("fsub", wide, code.splat(self._peak, lanes))
        scaled = code.float_op("fmul", below, code.splat(self._inverse, lanes))
        return exp_double(code, scaled)

    def mass_from(self, least: Value) -> Value:
        """The sum of the exponentials of logits that are at least `least`."""
        code, lanes = self.code, self.row.lanes
        zeros = code.zeros(lanes, F64)
        total = code.variable(zeros)

        def add(at: Value, values: Value, there: Value) -> None:
            del at
            kept = code.select(self.row.reaches(values, there, least), self.weights(values), zeros)
            total.set(code.float_op("fadd", total.get(), kept))

        self.row.in_vectors(0, self.row.size, add)
        return code.sum_lanes(total.get())

    def has(self, least: Value, count: Value) -> Value:
        """Whether at least `count` logits are at least `least`."""
        code, lanes = self.code, self.row.lanes
        number = code.variable(code.splat(i32(0), lanes))
        one, none = code.splat(i32(1), lanes), code.splat(i32(0), lanes)

        def add(at: Value, values: Value, there: Value) -> None:
            del at
            is_at = self.row.reaches(values, there, least)
            number.set(code.add(number.get(), code.select(is_at, one, none)))

        self.row.in_vectors(0, self.row.size, add)
        kept = code.stack(f"[{lanes} x i32]")
        code.store(number.get(), kept)
        total = code.variable(0)
        with code.loop(0, lanes) as lane:
            total.set(code.add(total.get(), code.load_int(kept, lane)))
        return code.compare("sge", total.get(), count)


def _sorted_nucleus(
    this: _Masses, sorted_: Value, count: Value, kth: Value, target: Value
) -> Value:
    """The logit among the sorted ones at which the mass reaches the target; -inf if none does."""
    code, lanes = this.code, this.row.lanes
    total, found, at = code.variable(f64(0.0)), code.variable(f32(_LOWEST)), code.variable(0)
    with code.repeat(lambda: code.less(at.get(), count)):
        value = code.load(code.at(sorted_, at.get()), F32)
        weight = code.lane(this.weights(code.splat(value, lanes)), 0)
        is_kept = code.float_compare("oge", value, kth)
        grown = code.float_op("fadd", total.get(), code.select(is_kept, weight, f64(0.0)))
        total.set(grown)
        is_reached = code.float_compare("oge", grown, target)
        found.set(code.select(is_reached, value, found.get()))
        at.set(code.select(is_reached, count, code.add(at.get(), 1)))
    return found.get()


def _bisect(code: Code, is_enough: Callable[[Value], Value]) -> Value:
    """The largest float32 for which a condition holds, bit by bit of the ordered float.

    -inf where no finite one does: what would come below it are no numbers.
    """
    order = code.variable(i32(0))
    with code.loop(0, 32) as bit:
        shift = code.convert("trunc", code.sub(31, bit), I32)
        candidate = code.either(order.get(), code.shift_left(i32(1), shift))
        holds = is_enough(_float_of_order(code, candidate))
        order.set(code.select(holds, candidate, order.get()))
    found = _float_of_order(code, order.get())
    return code.select(code.compare("eq", order.get(), i32(0)), f32(_LOWEST), found)


def _float_of_order(code: Code, order: Value) -> Value:
    """The float of an integer whose order, without a sign, is the order of floats.

    Numbers that some threads take for 0 and others do not (denormal ones) are rounded up.
    """
    sign = Value(I32, str(-(1 << 31)))
    is_positive = code.less(order, i32(0))
    bits = code.select(is_positive, code.differ(order, sign), code.differ(order, i32(-1)))
    size = code.both(bits, i32(0x7FFFFFFF))
    is_tiny = code.both(code.less(i32(0), size), code.less(size, i32(0x00800000)))
    bits = code.select(is_tiny, code.select(is_positive, i32(0x00800000), sign), bits)
    return code.convert("bitcast", bits, F32)


_THRESHOLD = Operation("threshold", _write_threshold, functools.partial(plan_rows, wide=2))
