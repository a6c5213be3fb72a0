"""Root-mean-square norms of rows, on CPUs, in float32 (Zhang and Sennrich, 2019)."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

from sgljax_cpu.emit import F32, I64, PTR, VOID, Code, Module, Value, f32, vector
from sgljax_cpu.machine import Vectors
from sgljax_cpu.operation import Operation, Plan, Shapes, read_values
from sgljax_cpu.primitive import run_one
from sgljax_cpu.rows import VectorAt, in_vectors, rows_of_chunk

_SUMS = 4
"""Sums of squares in flight."""


def rms_norm(x: jax.Array, weight: jax.Array | None, eps: float, offset: float) -> jax.Array:
    """`(weight + offset) * x / rms(x)` over the last axis, inside a program.

    A row has the same bits in any batch: the order of its sum depends on its length alone.

    Args:
        x: [..., D] float32.
        weight: [D] float32; None for ones.
        eps: Added to the mean square.
        offset: Added to the weight.
    """
    assert x.dtype == jnp.float32, x.dtype
    assert weight is None or weight.dtype == jnp.float32, weight
    operation = _operation(eps, offset, weight is not None)
    result = jax.ShapeDtypeStruct(x.shape, jnp.float32)
    return run_one(operation, [x] if weight is None else [x, weight], result)


@functools.cache
def _operation(eps: float, offset: float, has_weight: bool) -> Operation:
    write = functools.partial(_write, eps=eps, offset=offset, has_weight=has_weight)
    return Operation("rms_norm", write, _plan)


def _plan(arguments: Shapes, results: Shapes, threads: int) -> Plan:
    del results
    *rows, size = arguments[0].shape
    num_rows = math.prod(rows)
    each = rows_of_chunk(num_rows, size, threads)
    return Plan(-(-num_rows // each), (num_rows, size, each))


def _write(
    module: Module, vectors: Vectors, *, eps: float, offset: float, has_weight: bool
) -> Value:
    """Writes f(values, chunk): some rows."""
    lanes = vectors.lanes
    with Code(module, "rows", VOID, [PTR, I64]) as code:
        values, chunk = code.arguments
        *places, num_rows, size, each = read_values(code, values, 3 if has_weight else 2, 3)
        x, y = places[0], places[-1]
        first = code.mul(chunk, each)
        with code.loop(first, code.min(code.add(first, each), num_rows)) as row:
            source, target = (code.at(base, code.mul(row, size)) for base in (x, y))
            total = code.sum_lanes(_sum_of_squares(code, source, size, lanes))
            count = code.convert("uitofp", size, F32)
            mean = code.float_op("fadd", code.float_op("fdiv", total, count), f32(eps))
            rms = code.splat(code.square_root(mean), lanes)

            def store(at: Value, vector_at: VectorAt) -> None:
                scaled = code.float_op("fdiv", vector_at.load(code.at(source, at)), rms)
                if has_weight:
                    weight = vector_at.load(code.at(places[1], at))
                    if offset:
                        weight = code.float_op("fadd", weight, code.splat(f32(offset), lanes))
                    scaled = code.float_op("fmul", weight, scaled)
                vector_at.store(scaled, code.at(target, at))

            in_vectors(code, size, lanes, store)
    return code.function


def _sum_of_squares(code: Code, source: Value, size: Value, lanes: int) -> Value:
    """Squares by lane: several sums, each of every so many vectors, and what is left."""
    step = _SUMS * lanes
    sums = [code.variable(code.zeros(lanes)) for _ in range(_SUMS)]
    whole = code.mul(code.div(size, step), step)
    with code.loop(0, whole, step) as at:
        for i, total in enumerate(sums):
            part = code.load(code.at(source, code.add(at, i * lanes)), vector(lanes), 4)
            total.set(code.fma(part, part, total.get()))
    with code.loop(whole, size, lanes) as at:
        there = code.first_lanes(code.sub(size, at), lanes)
        part = code.load_lanes(code.at(source, at), there, lanes)
        sums[0].set(code.fma(part, part, sums[0].get()))
    left, right = (code.float_op("fadd", sums[i].get(), sums[i + 1].get()) for i in (0, 2))
    return code.float_op("fadd", left, right)
