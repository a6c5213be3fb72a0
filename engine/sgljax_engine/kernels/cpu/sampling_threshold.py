"""The thresholds of top-k and top-p, on CPUs.

They are looked up among the largest logits, and found by bisection where these do not reach.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from sgljax_engine.kernels.cpu.emit import (
    F32,
    I32,
    I64,
    PTR,
    VOID,
    Code,
    Module,
    Value,
    f32,
    i32,
)
from sgljax_engine.kernels.cpu.machine import Vectors
from sgljax_engine.kernels.cpu.math import exp
from sgljax_engine.kernels.cpu.operation import Operation, read_values
from sgljax_engine.kernels.cpu.primitive import run
from sgljax_engine.kernels.cpu.sampling import Peaks
from sgljax_engine.kernels.cpu.sampling_row import Row, above, divisor_of, plan_rows

_LOWEST = float("-inf")


def find_threshold(
    logits: jax.Array,
    peaks: Peaks,
    temperature: jax.Array,
    largest: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
) -> jax.Array:
    """The threshold [B] float32 of top-k and then top-p, inside a program; -inf if both keep all.

    top-p keeps a token while the probability of all likelier kept tokens is below `top_p`.

    Args:
        logits: [B, V] float32.
        peaks: Of the logits.
        temperature: [B] float32.
        largest: [B, N] float32, descending: the largest (logit - peak) / temperature of a row.
        top_k: [B] int32 in [1, V].
        top_p: [B] float32.
    """
    result = jax.ShapeDtypeStruct((logits.shape[0],), jnp.float32)
    arguments = [logits, peaks.values, temperature, largest, top_k, top_p]
    return run(_THRESHOLD, arguments, [result])[0]


def _write_threshold(module: Module, vectors: Vectors) -> Value:
    """Writes f(values, chunk): a row."""
    lanes = vectors.lanes
    with Code(module, "row", VOID, [PTR, I64]) as code:
        values, row = code.arguments
        logits, peaks, temperature, largest, top_k, top_p, found, size, num_sorted = read_values(
            code, values, 7, 2
        )
        this = Row(code, lanes, logits, row, size, peaks)
        divisor = divisor_of(code, temperature, row)
        sorted_ = code.at(largest, code.mul(row, num_sorted))
        count = code.load_int(top_k, row)
        mass = code.load(code.at(top_p, row), F32)
        lowest = f32(_LOWEST)

        kth = code.variable(lowest)
        with code.when(code.less(count, size)):
            is_sorted = code.less(code.sub(count, 1), num_sorted)
            with code.when(is_sorted):
                kth.set(code.load(code.at(sorted_, code.sub(count, 1)), F32))
            with code.unless(is_sorted):
                kth.set(_bisect(this, divisor, lambda at_or_above: _has(code, at_or_above, count)))
        limit = code.variable(kth.get())
        with code.when(code.float_compare("olt", mass, f32(1.0))):
            total = _mass_from(this, divisor, kth.get())
            target = code.float_op("fmul", mass, total)
            tiny = f32(float(jnp.finfo(jnp.float32).tiny))
            target = code.float_max(target, tiny)  # 0 would be reached by an empty nucleus
            nucleus = _sorted_nucleus(code, sorted_, num_sorted, kth.get(), target, lanes)
            limit.set(nucleus)
            with code.when(code.float_compare("oeq", nucleus, lowest)):
                limit.set(
                    _bisect(
                        this,
                        divisor,
                        lambda at_or_above: code.float_compare(
                            "oge", at_or_above.mass_above(kth.get()), target
                        ),
                    )
                )
        code.store(limit.get(), code.at(found, row))
    return code.function


def _sorted_nucleus(
    code: Code, sorted_: Value, count: Value, kth: Value, target: Value, lanes: int
) -> Value:
    """The logit among the sorted ones at which the mass reaches the target; -inf if none does."""
    total, found, at = code.variable(f32(0.0)), code.variable(f32(_LOWEST)), code.variable(0)
    with code.repeat(lambda: code.less(at.get(), count)):
        value = code.load(code.at(sorted_, at.get()), F32)
        weight = code.lane(exp(code, code.splat(value, lanes)), 0)
        is_kept = code.float_compare("oge", value, kth)
        grown = code.float_op("fadd", total.get(), code.select(is_kept, weight, f32(0.0)))
        total.set(grown)
        is_reached = code.float_compare("oge", grown, target)
        found.set(code.select(is_reached, value, found.get()))
        at.set(code.select(is_reached, count, code.add(at.get(), 1)))
    return found.get()


def _mass_from(this: Row, divisor: Value, lowest: Value) -> Value:
    """The sum of a row's exponentials of scaled logits that are at least `lowest`."""
    code, lanes = this.code, this.lanes
    total = code.variable(code.zeros(lanes))
    passes = above(code, lowest, f32(0.0), lanes)

    def add(at: Value, values: Value, there: Value) -> None:
        del at
        weights = this.weights(values, there, divisor, passes)
        total.set(code.float_op("fadd", total.get(), weights))

    this.in_vectors(0, this.size, add)
    return code.sum_lanes(total.get())


class _AtOrAbove(NamedTuple):
    """The scaled logits of a row at or above a candidate for a threshold."""

    this: Row
    divisor: Value
    candidate: Value

    def mass_above(self, lowest: Value) -> Value:
        """Their mass, without those below `lowest`."""
        code = self.this.code
        return _mass_from(self.this, self.divisor, code.float_max(self.candidate, lowest))


def _has(code: Code, found: _AtOrAbove, count: Value) -> Value:
    """Whether there are at least `count`."""
    this, lanes = found.this, found.this.lanes
    number = code.variable(code.splat(i32(0), lanes))
    limit = code.splat(found.candidate, lanes)
    one, none = code.splat(i32(1), lanes), code.splat(i32(0), lanes)

    def add(at: Value, values: Value, there: Value) -> None:
        del at
        is_at = code.float_compare("oge", this.scaled(values, found.divisor), limit)
        number.set(code.add(number.get(), code.select(code.both(there, is_at), one, none)))

    this.in_vectors(0, this.size, add)
    kept = code.stack(f"[{lanes} x i32]")
    code.store(number.get(), kept)
    total = code.variable(0)
    with code.loop(0, lanes) as lane:
        total.set(code.add(total.get(), code.load_int(kept, lane)))
    return code.compare("sge", total.get(), count)


def _bisect(this: Row, divisor: Value, is_enough: Callable[[_AtOrAbove], Value]) -> Value:
    """The largest threshold for which a condition holds, bit by bit of the ordered float."""
    code = this.code
    order = code.variable(i32(0))
    with code.loop(0, 32) as bit:
        shift = code.convert("trunc", code.sub(31, bit), I32)
        candidate = code.either(order.get(), code.shift_left(i32(1), shift))
        found = _AtOrAbove(this, divisor, _float_of_order(code, candidate))
        order.set(code.select(is_enough(found), candidate, order.get()))
    return _float_of_order(code, order.get())


def _float_of_order(code: Code, order: Value) -> Value:
    """The float of an integer whose order, without a sign, is the order of floats."""
    sign = Value(I32, str(-(1 << 31)))
    is_positive = code.less(order, i32(0))
    bits = code.select(is_positive, code.differ(order, sign), code.differ(order, i32(-1)))
    return code.convert("bitcast", bits, F32)


_THRESHOLD = Operation("threshold", _write_threshold, functools.partial(plan_rows, wide=3))
