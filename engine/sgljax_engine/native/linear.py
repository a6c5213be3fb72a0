"""Products `W @ x` of projections, on CPUs, in float32.

A processor's registers hold a tile of the result, some rows of the weight by some vectors of
tokens, while it is added up over the inputs (Goto and van de Geijn, 2008): each weight is loaded
once for all tokens of the tile, and each vector of tokens once for all of its rows. The weight is
read where it lies. A result is added up over the inputs one by one, whatever the number of tokens,
and however they are shared among threads.

Products of few tokens are those of `linear_of_few`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from sgljax_engine.native.emit import F32, I64, PTR, VOID, Code, Module, Value, vector
from sgljax_engine.native.ffi import Buffer, Job, Operation, read_values, register
from sgljax_engine.native.linear_few import (
    CHUNK_WEIGHTS,
    CHUNKS_PER_THREAD,
    FEW,
    in_row_tiles,
    linear_of_few,
)
from sgljax_engine.native.machine import Vectors


def linear(weight: jax.Array, x: jax.Array, *, is_deterministic: bool = False) -> jax.Array:
    """`weight @ x`.

    Args:
        weight: [out, in] float32.
        x: [in, T] float32.
        is_deterministic: A token gets the same bits whatever T is, if few tokens take longer.

    Returns:
        [out, T] float32.
    """
    if x.shape[1] <= FEW and not is_deterministic:
        return linear_of_few(weight, x.T)
    result = jax.ShapeDtypeStruct((weight.shape[0], x.shape[1]), jnp.float32)
    return jax.ffi.ffi_call(register(_MANY_TOKENS), result)(weight, x)


def _write_many(module: Module, vectors: Vectors) -> Value:
    """f(values, chunk): rows of the result for all tokens."""
    tiles = {
        (rows, width, is_partial): _write_tile(module, vectors.lanes, rows, width, is_partial)
        for rows in (vectors.row_tile, 1)
        for width in range(1, vectors.token_vectors + 1)
        for is_partial in (False, True)
    }
    with Code(module, "many", VOID, [PTR, I64]) as code:
        values, chunk = code.arguments
        weight, x, y, *sizes = read_values(code, values, 3, 4)
        num_inputs, num_tokens, num_rows, size = sizes
        first = code.mul(chunk, size)
        last = code.min(code.add(first, size), num_rows)
        per_tile = vectors.lanes * vectors.token_vectors

        def all_rows(width: int, is_partial: bool, token: Value, last_lanes: Value) -> None:
            def one(row: Value, rows: int) -> None:
                row_y = code.add(code.mul(row, num_tokens), token)
                places = [
                    code.at(weight, code.mul(row, num_inputs)),
                    code.at(x, token),
                    code.at(y, row_y),
                ]
                sizes = [num_inputs, num_tokens, last_lanes]
                code.call(tiles[rows, width, is_partial], VOID, [*places, *sizes])

            in_row_tiles(code, first, last, vectors.row_tile, one)

        whole = code.mul(code.div(num_tokens, per_tile), per_tile)
        with code.loop(0, whole, per_tile) as token:
            all_rows(vectors.token_vectors, False, token, num_tokens)
        width = code.ceil_div(code.sub(num_tokens, whole), vectors.lanes)
        last_lanes = code.rem(num_tokens, vectors.lanes)
        for count in range(1, vectors.token_vectors + 1):
            with code.when(code.equal(width, count)):
                for is_partial in (False, True):
                    with code.when(code.compare("ne" if is_partial else "eq", last_lanes, 0)):
                        all_rows(count, is_partial, whole, last_lanes)
    return code.function


def _write_tile(module: Module, lanes: int, rows: int, width: int, is_partial: bool) -> Value:
    """f(weight, x, y, inputs, tokens, last_lanes): a tile of the result.

    `is_partial`: of the last vector only so many lanes are there.
    """
    name = f"tile_{rows}_{width}{'_partial' if is_partial else ''}"
    with Code(module, name, VOID, [PTR, PTR, PTR, I64, I64, I64]) as code:
        weight, x, y, num_inputs, num_tokens, last_lanes = code.arguments
        there = code.first_lanes(last_lanes, lanes) if is_partial else None
        sums = [[code.variable(code.zeros(lanes)) for _ in range(width)] for _ in range(rows)]
        weights = [code.at(weight, code.mul(num_inputs, row)) for row in range(rows)]

        def add_input(index: Value) -> None:
            tokens = []
            for i in range(width):
                place = code.at(x, code.add(code.mul(index, num_tokens), i * lanes))
                if there is not None and i == width - 1:
                    tokens.append(code.load_lanes(place, there, lanes))
                else:
                    tokens.append(code.load(place, vector(lanes), 4))
            for row in range(rows):
                factor = code.splat(code.load(code.at(weights[row], index), F32), lanes)
                for i in range(width):
                    sums[row][i].set(code.fma(factor, tokens[i], sums[row][i].get()))

        _unrolled(code, num_inputs, add_input)
        for row in range(rows):
            for i in range(width):
                place = code.at(y, code.add(code.mul(num_tokens, row), i * lanes))
                if there is not None and i == width - 1:
                    code.store_lanes(sums[row][i].get(), place, there, lanes)
                else:
                    code.store(sums[row][i].get(), place, 4)
    return code.function


def _unrolled(code: Code, count: Value, one: Callable[[Value], None], times: int = 4) -> None:
    whole = code.mul(code.div(count, times), times)
    with code.loop(0, whole, times) as index:
        for i in range(times):
            one(code.add(index, i))
    with code.loop(whole, count) as index:
        one(index)


def _plan_many(code: Code, buffers: Sequence[Buffer], threads: Value) -> Job:
    weight, x, y = buffers
    num_rows, num_inputs, num_tokens = weight.dim(0), weight.dim(1), x.dim(1)
    size = _chunk_size(code, num_rows, num_inputs, threads)
    values = [weight.data, x.data, y.data, num_inputs, num_tokens, num_rows, size]
    return Job(code.ceil_div(num_rows, size), values)


def _chunk_size(code: Code, num_rows: Value, num_inputs: Value, threads: Value) -> Value:
    """Rows of a chunk: whole tiles."""
    even = code.ceil_div(num_rows, code.mul(threads, CHUNKS_PER_THREAD))
    near = code.div(CHUNK_WEIGHTS, code.max(num_inputs, 1))
    return code.round_up(code.max(code.min(even, near), 1), 2 * 6)


_MANY_TOKENS = Operation("linear", 2, 1, _write_many, _plan_many)
