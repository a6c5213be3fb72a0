"""Products of tokens sorted by expert with their expert's weight, on CPUs, in float32.

One call computes all experts. Each thread takes some rows of every weight, so that threads finish
together however tokens are spread over experts, and reads the weights in place. Experts without
tokens cost nothing. A sum over the inputs has the same bits however many tokens an expert has.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from sgljax_engine.kernels.cpu.emit import F32, I32, I64, PTR, VOID, Code, Module, Value, f32
from sgljax_engine.kernels.cpu.ffi import Buffer, Job, Operation, read_values, register
from sgljax_engine.kernels.cpu.machine import Vectors
from sgljax_engine.kernels.cpu.small_batch_linear import (
    CHUNKS_PER_THREAD,
    Arrays,
    multiply,
    write_tiles,
)

_CHUNK_WEIGHTS = 1 << 16
"""Weights of an expert in a chunk: they are read again for every eight tokens, from a cache."""


def ragged_linear(weights: jax.Array, x: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """`x[t] @ weights[e].T` for each token t of each expert e.

    Args:
        weights: [E, out, in] float32.
        x: [T, in] float32: first the tokens of expert 0, then those of expert 1, and so on.
        group_sizes: [E] int32, tokens of each expert; together at most T.

    Returns:
        [T, out] float32; 0 for tokens beyond the last expert's.
    """
    ends = jnp.cumsum(group_sizes, dtype=jnp.int32)
    result = jax.ShapeDtypeStruct((x.shape[0], weights.shape[1]), jnp.float32)
    return jax.ffi.ffi_call(register(_operation()), result)(weights, x, ends)


@functools.cache
def _operation() -> Operation:
    return Operation("ragged_linear", 3, 1, _write_chunk, _plan)


def _plan(code: Code, buffers: Sequence[Buffer], threads: Value) -> Job:
    weights, x, ends, y = buffers
    num_rows, num_inputs = weights.dim(1), weights.dim(2)
    even = code.ceil_div(num_rows, code.mul(threads, CHUNKS_PER_THREAD))
    near = code.div(_CHUNK_WEIGHTS, code.max(num_inputs, 1))
    size = code.round_up(code.max(code.min(even, near), 1), 24)  # whole tiles
    pointers = [weights.data, x.data, ends.data, y.data]
    sizes = [weights.dim(0), num_rows, num_inputs, x.dim(0), size]
    return Job(code.ceil_div(num_rows, size), [*pointers, *sizes])


def _write_chunk(module: Module, vectors: Vectors) -> Value:
    """Writes f(values, chunk): some rows of all experts with their tokens."""
    tiles = write_tiles(module, vectors)
    with Code(module, "chunk", VOID, [PTR, I64]) as code:
        values, chunk = code.arguments
        weights, x, ends, y, *sizes = read_values(code, values, 4, 5)
        num_experts, num_rows, num_inputs, num_tokens, size = sizes
        first = code.mul(chunk, size)
        last = code.min(code.add(first, size), num_rows)
        per_expert = code.mul(num_rows, num_inputs)
        start = code.variable(0)
        with code.loop(0, num_experts) as expert:
            end = code.convert("sext", code.load(code.at(ends, expert, I32), I32), I64)
            with code.when(code.less(start.get(), end)):
                weight = code.at(weights, code.mul(expert, per_expert))
                arrays = Arrays(weight, x, y, num_inputs, Value(I64, "1"), num_rows)
                multiply(code, tiles, arrays, (first, last), (start.get(), end))
                start.set(end)
        with code.loop(start.get(), num_tokens) as token:
            place = code.at(y, code.mul(token, num_rows))
            with code.loop(first, last) as row:
                code.store(f32(0.0), code.at(place, row, F32))
    return code.function
