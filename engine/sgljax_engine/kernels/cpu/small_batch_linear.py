"""Products with the inputs in vector lanes, on CPUs, in float32.

They serve small batches, which take as long as reading the weight.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from sgljax_engine.kernels.cpu.emit import (
    F32,
    I64,
    PTR,
    VOID,
    Code,
    Module,
    Number,
    Value,
    vector,
)
from sgljax_engine.kernels.cpu.ffi import Buffer, Job, Operation, read_values, register
from sgljax_engine.kernels.cpu.machine import Vectors
from sgljax_engine.kernels.cpu.math import sum_each

SMALL_BATCH = 8
"""Up to this many tokens, products are faster with the inputs in vector lanes."""

CHUNKS_PER_THREAD = 4

_ROWS = {16: {8: 3, 4: 6, 2: 8, 1: 8}, 8: {8: 1, 4: 3, 2: 4, 1: 8}}
"""Rows of the weight processed together, by lanes and tokens: their sums fill the registers.

Tokens are in descending order.
"""

_RowTile = Callable[[Value, int], None]
"""Takes the first row of a tile, and its number of rows."""


def small_batch_linear(
    weight: jax.Array, x: jax.Array, *, is_token_major: bool = False
) -> jax.Array:
    """`weight @ x.T`, or its transpose.

    Args:
        weight: [out, in] float32.
        x: [T, in] float32.
        is_token_major: Return `x @ weight.T`.

    Returns:
        [out, T] float32, or [T, out] if token-major.
    """
    shape = (weight.shape[0], x.shape[0])
    result = jax.ShapeDtypeStruct(shape[::-1] if is_token_major else shape, jnp.float32)
    return jax.ffi.ffi_call(register(_operation(is_token_major)), result)(weight, x)


@functools.cache
def _operation(is_token_major: bool) -> Operation:
    plan = functools.partial(_plan, is_token_major=is_token_major)
    name = "small_batch_linear_token_major" if is_token_major else "small_batch_linear"
    return Operation(name, 2, 1, _write_chunk, plan)


def _plan(code: Code, buffers: Sequence[Buffer], threads: Value, *, is_token_major: bool) -> Job:
    weight, x, y = buffers
    num_rows, num_inputs, num_tokens = weight.dim(0), weight.dim(1), x.dim(0)
    even = code.ceil_div(num_rows, code.mul(threads, CHUNKS_PER_THREAD))
    size = code.round_up(code.max(even, 1), 24)  # whole tiles, whatever the rows of a tile
    one = Value(I64, "1")
    strides = (one, num_rows) if is_token_major else (num_tokens, one)
    sizes = [num_inputs, num_tokens, num_rows, size, *strides]
    return Job(code.ceil_div(num_rows, size), [weight.data, x.data, y.data, *sizes])


def _write_chunk(module: Module, vectors: Vectors) -> Value:
    """Writes f(values, chunk): rows of the weight with all tokens, a few tokens at a time."""
    tiles = write_tiles(module, vectors)
    with Code(module, "chunk", VOID, [PTR, I64]) as code:
        values, chunk = code.arguments
        weight, x, y, *sizes = read_values(code, values, 3, 6)
        num_inputs, num_tokens, num_rows, size, row_stride, token_stride = sizes
        first = code.mul(chunk, size)
        last = code.min(code.add(first, size), num_rows)
        arrays = Arrays(weight, x, y, num_inputs, row_stride, token_stride)
        multiply(code, tiles, arrays, (first, last), (0, num_tokens))
    return code.function


class Arrays(NamedTuple):
    """The arrays of a product, in the code of its chunk function.

    Attributes:
        weight: Address of [out, in].
        x: Address of [T, in].
        y: Address of the result.
        num_inputs: Inputs of a row.
        row_stride: Floats between two rows of a token in the result.
        token_stride: Floats between two tokens of a row in the result.
    """

    weight: Value
    x: Value
    y: Value
    num_inputs: Value
    row_stride: Value
    token_stride: Value


class Tiles(NamedTuple):
    """Functions that compute tiles of a result.

    Attributes:
        rows: Rows of a tile by its number of tokens, in descending order.
        functions: Functions by rows and tokens.
    """

    rows: Mapping[int, int]
    functions: Mapping[tuple[int, int], Value]


def write_tiles(module: Module, vectors: Vectors) -> Tiles:
    """Writes the functions of all tiles. A sum has the same bits in each."""
    row_tiles = _ROWS[vectors.lanes]
    functions = {
        (rows, count): _write_tile(module, vectors.lanes, rows, count)
        for count, tile in row_tiles.items()
        for rows in {tile, 1}
    }
    return Tiles(row_tiles, functions)


def multiply(
    code: Code,
    tiles: Tiles,
    arrays: Arrays,
    rows: tuple[Value, Value],
    tokens: tuple[Number, Value],
) -> None:
    """Multiplies a range of rows with a range of tokens, a few tokens at a time."""
    token = code.variable(tokens[0])
    for count, tile in tiles.rows.items():

        def is_enough(count: int = count) -> Value:
            return code.less(code.add(token.get(), count - 1), tokens[1])

        with code.repeat(is_enough):

            def one(row: Value, num_rows: int, count: int = count) -> None:
                across = code.mul(token.get(), arrays.token_stride)
                places = [
                    code.at(arrays.weight, code.mul(row, arrays.num_inputs)),
                    code.at(arrays.x, code.mul(token.get(), arrays.num_inputs)),
                    code.at(arrays.y, code.add(code.mul(row, arrays.row_stride), across)),
                ]
                sizes = [arrays.num_inputs, arrays.row_stride, arrays.token_stride]
                code.call(tiles.functions[num_rows, count], VOID, [*places, *sizes])

            in_row_tiles(code, *rows, tile, one)
            token.set(code.add(token.get(), count))


def in_row_tiles(code: Code, first: Value, last: Value, tile: int, one: _RowTile) -> None:
    """Calls `one` for tiles of rows; a last partial tile is moved to overlap the one before."""
    is_narrow = code.less(code.sub(last, first), tile)
    with code.when(is_narrow), code.loop(first, last) as row:
        one(row, 1)
    with code.unless(is_narrow), code.loop(first, last, tile) as row:
        one(code.min(row, code.sub(last, tile)), tile)


def _write_tile(module: Module, lanes: int, rows: int, count: int) -> Value:
    """Writes f(weight, x, y, inputs, row_stride, token_stride): `rows` by `count` sums."""
    with Code(module, f"tile_{rows}_{count}", VOID, [PTR, PTR, PTR, I64, I64, I64]) as code:
        weight, x, y, num_inputs, row_stride, token_stride = code.arguments
        sums = [[code.variable(code.zeros(lanes)) for _ in range(count)] for _ in range(rows)]
        weights = [code.at(weight, code.mul(num_inputs, row)) for row in range(rows)]
        tokens = [code.at(x, code.mul(num_inputs, token)) for token in range(count)]

        def add_up(load: Callable[[Value], Value]) -> None:
            loaded = [load(token) for token in tokens]
            for row in range(rows):
                factor = load(weights[row])
                for i in range(count):
                    sums[row][i].set(code.fma(factor, loaded[i], sums[row][i].get()))

        whole = code.mul(code.div(num_inputs, lanes), lanes)
        with code.loop(0, whole, lanes) as index:
            add_up(lambda base: code.load(code.at(base, index), vector(lanes), 4))
        left = code.sub(num_inputs, whole)
        with code.when(code.less(0, left)):
            there = code.first_lanes(left, lanes)
            add_up(lambda base: code.load_lanes(code.at(base, whole), there, lanes))
        totals = code.stack(f"[{rows * count} x float]")
        sum_each(code, [total.get() for row in sums for total in row], totals, lanes)
        for row in range(rows):
            for i in range(count):
                place = code.add(code.mul(row_stride, row), code.mul(token_stride, i))
                total = code.load(code.at(totals, row * count + i), F32)
                code.store(total, code.at(y, place))
    return code.function
