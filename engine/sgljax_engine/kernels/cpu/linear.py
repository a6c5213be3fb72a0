"""Products `W @ x` of projections, on CPUs, in float32.

Registers hold a tile of the result, some rows of the weight by some vectors of tokens, while it is
summed over the inputs (Goto and van de Geijn, 2008). Each weight is loaded once for all tokens of
the tile, and each vector of tokens once for all its rows. The weight is read in place. A result is
summed over the inputs one by one, whatever the number of tokens and their split among threads. A
token-major result, such as logits, is transposed in registers before it is stored.

`small_batch_linear` computes products of small batches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from sgljax_engine.kernels.cpu.emit import (
    F32,
    I64,
    PTR,
    VOID,
    Code,
    Module,
    Value,
    lanes_of,
    vector,
)
from sgljax_engine.kernels.cpu.ffi import Buffer, Job, Operation, read_values, register
from sgljax_engine.kernels.cpu.machine import Vectors
from sgljax_engine.kernels.cpu.small_batch_linear import (
    CHUNKS_PER_THREAD,
    SMALL_BATCH,
    in_row_tiles,
    small_batch_linear,
)
from sgljax_engine.kernels.cpu.transpose import transpose_tile

_CHUNK_WEIGHTS = 1 << 15
"""Weights in a chunk: they are read once for each tile of tokens."""

_FEW_ROWS = 128
"""Up to this many rows, as in a LoRA adapter, low tiles split better among threads."""

_LOW_TILE = 4

_TOKEN_MAJOR_TILES = {16: (8, 2), 8: (6, 2)}
"""Rows and vectors of tokens in a token-major tile, by lanes.

More rows would give longer runs, but their addresses would fill the registers.
"""


def linear(
    weight: jax.Array, x: jax.Array, *, is_token_major: bool = False, is_deterministic: bool = False
) -> jax.Array:
    """`weight @ x`, or its transpose.

    Args:
        weight: [out, in] float32.
        x: [in, T] float32.
        is_token_major: Return `(weight @ x).T`.
        is_deterministic: Give a token the same bits whatever T is; small batches take longer.

    Returns:
        [out, T] float32, or [T, out] if token-major.
    """
    if x.shape[1] <= SMALL_BATCH and not is_deterministic:
        return small_batch_linear(weight, x.T, is_token_major=is_token_major)
    shape = (weight.shape[0], x.shape[1])
    result = jax.ShapeDtypeStruct(shape[::-1] if is_token_major else shape, jnp.float32)
    operation = _of_many(is_token_major, weight.shape[0] <= _FEW_ROWS and not is_token_major)
    return jax.ffi.ffi_call(register(operation), result)(weight, x)


@functools.cache
def _of_many(is_token_major: bool, is_low: bool) -> Operation:
    name = "linear_token_major" if is_token_major else "linear_low" if is_low else "linear"
    write = functools.partial(_write_many, is_token_major=is_token_major, is_low=is_low)
    rows = 24 if is_token_major else _LOW_TILE if is_low else 12  # whole tiles of each processor
    return Operation(name, 2, 1, write, functools.partial(_plan_many, rows=rows))


def _write_many(module: Module, vectors: Vectors, *, is_token_major: bool, is_low: bool) -> Value:
    """Writes f(values, chunk): rows of the weight with all tokens."""
    row_tile, token_vectors = vectors.row_tile, vectors.token_vectors
    if is_token_major:
        row_tile, token_vectors = _TOKEN_MAJOR_TILES[vectors.lanes]
    elif is_low:
        row_tile = _LOW_TILE
    write_tile = functools.partial(
        _write_tile, module, vectors.lanes, is_token_major=is_token_major
    )
    tiles = {
        (rows, width, is_partial): write_tile(rows, width, is_partial)
        for rows in (row_tile, 1)
        for width in range(1, token_vectors + 1)
        for is_partial in (False, True)
    }
    with Code(module, "many", VOID, [PTR, I64]) as code:
        values, chunk = code.arguments
        weight, x, y, *sizes = read_values(code, values, 3, 4)
        num_inputs, num_tokens, num_rows, size = sizes
        stride = num_rows if is_token_major else num_tokens
        first = code.mul(chunk, size)
        last = code.min(code.add(first, size), num_rows)
        per_tile = vectors.lanes * token_vectors

        def all_rows(width: int, is_partial: bool, token: Value, last_lanes: Value) -> None:
            def one(row: Value, rows: int) -> None:
                outer, inner = (token, row) if is_token_major else (row, token)
                place = code.add(code.mul(outer, stride), inner)
                places = [
                    code.at(weight, code.mul(row, num_inputs)),
                    code.at(x, token),
                    code.at(y, place),
                ]
                sizes = [num_inputs, num_tokens, stride, last_lanes]
                code.call(tiles[rows, width, is_partial], VOID, [*places, *sizes])

            in_row_tiles(code, first, last, row_tile, one)

        whole = code.mul(code.div(num_tokens, per_tile), per_tile)
        with code.loop(0, whole, per_tile) as token:
            all_rows(token_vectors, False, token, num_tokens)
        width = code.ceil_div(code.sub(num_tokens, whole), vectors.lanes)
        last_lanes = code.rem(num_tokens, vectors.lanes)
        for count in range(1, token_vectors + 1):
            with code.when(code.equal(width, count)):
                for is_partial in (False, True):
                    with code.when(code.compare("ne" if is_partial else "eq", last_lanes, 0)):
                        all_rows(count, is_partial, whole, last_lanes)
    return code.function


def _write_tile(
    module: Module, lanes: int, rows: int, width: int, is_partial: bool, *, is_token_major: bool
) -> Value:
    """Writes f(weight, x, y, inputs, tokens, stride, last_lanes): a tile of the result.

    `stride` is that of the result's rows. With `is_partial`, the last vector has only `last_lanes`
    lanes.
    """
    name = f"tile_{rows}_{width}{'_partial' if is_partial else ''}"
    with Code(module, name, VOID, [PTR, PTR, PTR, I64, I64, I64, I64]) as code:
        weight, x, y, num_inputs, num_tokens, stride, last_lanes = code.arguments
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
        for i in range(width):
            found = [row[i].get() for row in sums]
            is_last_partial = is_partial and i == width - 1
            if is_token_major:
                first = code.at(y, code.mul(stride, i * lanes))
                _store_by_token(code, found, first, stride, last_lanes if is_last_partial else None)
                continue
            for row, total in enumerate(found):
                place = code.at(y, code.add(code.mul(stride, row), i * lanes))
                if there is not None and is_last_partial:
                    code.store_lanes(total, place, there, lanes)
                else:
                    code.store(total, place, 4)
    return code.function


def _store_by_token(
    code: Code, rows: Sequence[Value], place: Value, stride: Value, num_tokens: Value | None
) -> None:
    """Stores one vector of tokens per row as one run of rows per token.

    `num_tokens` is the number of tokens; None if all lanes are used.
    """
    lanes = lanes_of(rows[0].type)
    columns = transpose_tile(code, [*rows, *[code.zeros(lanes)] * (lanes - len(rows))])
    there = code.first_lanes(Value(I64, str(len(rows))), lanes)

    def one(token: int) -> None:
        code.store_lanes(columns[token], code.at(place, code.mul(stride, token)), there, lanes)

    for token in range(lanes):
        if num_tokens is None:
            one(token)
            continue
        with code.when(code.less(token, num_tokens)):
            one(token)


def _unrolled(code: Code, count: Value, one: Callable[[Value], None], times: int = 4) -> None:
    whole = code.mul(code.div(count, times), times)
    with code.loop(0, whole, times) as index:
        for i in range(times):
            one(code.add(index, i))
    with code.loop(whole, count) as index:
        one(index)


def _plan_many(code: Code, buffers: Sequence[Buffer], threads: Value, *, rows: int) -> Job:
    """Plans chunks of a multiple of `rows` rows."""
    weight, x, y = buffers
    num_rows, num_inputs, num_tokens = weight.dim(0), weight.dim(1), x.dim(1)
    even = code.ceil_div(num_rows, code.mul(threads, CHUNKS_PER_THREAD))
    near = code.div(_CHUNK_WEIGHTS, code.max(num_inputs, 1))
    size = code.round_up(code.max(code.min(even, near), 1), rows)
    values = [weight.data, x.data, y.data, num_inputs, num_tokens, num_rows, size]
    return Job(code.ceil_div(num_rows, size), values)
