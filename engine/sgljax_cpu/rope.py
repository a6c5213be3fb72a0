"""Rotary position embedding, on CPUs, in float32; see `layers.rope`."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

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
    vector,
)
from sgljax_cpu.machine import Vectors
from sgljax_cpu.math import sin_cos
from sgljax_cpu.operation import Operation, Plan, Shapes, read_values
from sgljax_cpu.primitive import run, run_one
from sgljax_cpu.rows import VectorAt, in_vectors, rows_of_chunk


def rotate(x: jax.Array, sin: jax.Array, cos: jax.Array) -> jax.Array:
    """Rotates the first half of each head against its second half, inside a program.

    Args:
        x: [T, N, H] float32.
        sin: [T, 1, H / 2] float32.
        cos: Likewise.
    """
    assert {x.dtype, sin.dtype, cos.dtype} == {jnp.dtype(jnp.float32)}, x.dtype
    return run_one(_operation(), [x, sin, cos], jax.ShapeDtypeStruct(x.shape, jnp.float32))


def rope_tables(
    positions: jax.Array, timescales: jax.Array | np.ndarray
) -> tuple[jax.Array, jax.Array]:
    """Sines and cosines [T, 1, N] float32 of the angles position / timescale, inside a program.

    A position has the same bits in any batch.

    Args:
        positions: [T] int32.
        timescales: [N] float32.
    """
    shape = (positions.shape[0], 1, timescales.shape[0])
    results = [jax.ShapeDtypeStruct(shape, jnp.float32)] * 2
    sin, cos = run(_TABLES, [positions, timescales], results)
    return sin, cos


@functools.cache
def _operation() -> Operation:
    return Operation("rotate", _write, _plan)


def _plan(arguments: Shapes, results: Shapes, threads: int) -> Plan:
    del results
    num_tokens, num_heads, head_dim = arguments[0].shape
    each = rows_of_chunk(num_tokens, num_heads * head_dim, threads)
    return Plan(-(-num_tokens // each), (num_tokens, num_heads, head_dim // 2, each))


def _write(module: Module, vectors: Vectors) -> Value:
    """Writes f(values, chunk): some tokens."""
    lanes = vectors.lanes
    with Code(module, "tokens", VOID, [PTR, I64]) as code:
        values, chunk = code.arguments
        x, sin, cos, y, num_tokens, num_heads, half, each = read_values(code, values, 4, 4)
        first = code.mul(chunk, each)
        tokens = code.loop(first, code.min(code.add(first, each), num_tokens))
        with tokens as token, code.loop(0, num_heads) as head:
            angles = code.mul(token, half)
            row = code.add(code.mul(token, num_heads), head)
            low = code.mul(code.mul(row, half), 2)

            def one(at: Value, vector_at: VectorAt) -> None:
                sines, cosines = (
                    vector_at.load(code.at(t, code.add(angles, at))) for t in (sin, cos)
                )
                places = [code.add(low, at), code.add(code.add(low, half), at)]
                left, right = (vector_at.load(code.at(x, place)) for place in places)
                rotated = code.float_op("fmul", right, sines), code.float_op("fmul", left, sines)
                low_half = code.fma(left, cosines, code.negative(rotated[0]))
                vector_at.store(low_half, code.at(y, places[0]))
                vector_at.store(code.fma(right, cosines, rotated[1]), code.at(y, places[1]))

            in_vectors(code, half, lanes, one)
    return code.function


def _plan_tables(arguments: Shapes, results: Shapes, threads: int) -> Plan:
    del results
    (num_tokens,), (count,) = (x.shape for x in arguments)
    each = rows_of_chunk(num_tokens, count, threads)
    return Plan(-(-num_tokens // each), (num_tokens, count, each))


def _write_tables(module: Module, vectors: Vectors) -> Value:
    """Writes f(values, chunk): some positions."""
    lanes = vectors.lanes // 2  # doubles
    with Code(module, "positions", VOID, [PTR, I64]) as code:
        values, chunk = code.arguments
        positions, timescales, sin, cos, num_tokens, count, each = read_values(code, values, 4, 3)
        first = code.mul(chunk, each)
        with code.loop(first, code.min(code.add(first, each), num_tokens)) as token:
            position = code.convert("sitofp", code.load(code.at(positions, token, I32), I32), F32)
            row = code.mul(token, count)

            def one(at: Value, vector_at: VectorAt) -> None:
                scales = vector_at.load(code.at(timescales, at))
                angles = code.float_op("fdiv", code.splat(position, lanes), scales)
                doubles = code.convert("fpext", angles, vector(lanes, F64))
                for found, target in zip(sin_cos(code, doubles), (sin, cos), strict=True):
                    rounded = code.convert("fptrunc", found, vector(lanes))
                    vector_at.store(rounded, code.at(target, code.add(row, at)))

            in_vectors(code, count, lanes, one)
    return code.function


_TABLES = Operation("rope_tables", _write_tables, _plan_tables)
