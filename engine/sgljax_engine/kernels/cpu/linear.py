"""Products of tokens with a weight in panels, on CPUs.

Registers hold a tile of the result, some tokens by some panels, while it is summed over the inputs
(Goto and van de Geijn, 2008). Outputs lie in vector lanes; each weight is loaded once for all
tokens of the tile, and each input of a token once for all its panels. Every output is one chain of
fused multiply-adds over the inputs, in order, whatever the number of tokens, their tile and their
thread: so a token has the same bits in any batch. A few tokens take as long as reading the weight.

Weights may be stored in bfloat16 or float16: they are widened in registers, and sums are float32.
Those in int8 have a factor per output, which multiplies the sum.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from sgljax_engine.kernels.cpu.emit import (
    F32,
    I64,
    NULL,
    PTR,
    VOID,
    Code,
    Module,
    Number,
    Value,
    vector,
)
from sgljax_engine.kernels.cpu.machine import Vectors
from sgljax_engine.kernels.cpu.numbers import STORED, load_as_float
from sgljax_engine.kernels.cpu.operation import Operation, Plan, Shapes, read_values
from sgljax_engine.kernels.cpu.panels import PANEL
from sgljax_engine.kernels.cpu.primitive import run_one

_PANELS = {
    16: {1: 8, 2: 8, 3: 4, 4: 4, 5: 4, 6: 4, 7: 2, 8: 2, 9: 2, 10: 2},
    8: {1: 4, 2: 2, 3: 2, 4: 1, 5: 1, 6: 1},
}
"""Panels of a tile, a power of two, by lanes and tokens: their sums fill the registers."""

_MANY = 6
"""Tokens of a tile when a tile does not hold them all."""

_CHUNK_PANELS = 8
"""Panels of a chunk, unless there would be fewer than two chunks a thread."""

_UNROLLED = 4


def linear(
    weight: jax.Array, x: jax.Array, num_outputs: int, scale: jax.Array | None = None
) -> jax.Array:
    """`x @ W`, inside a program.

    Args:
        weight: [panels, in, 16] float32, bfloat16, float16 or int8.
        x: [T, in] float32.
        num_outputs: Outputs of the weight.
        scale: [num_outputs] float32, factors of the outputs of an int8 weight.

    Returns:
        [T, num_outputs] float32.
    """
    result = jax.ShapeDtypeStruct((x.shape[0], num_outputs), jnp.float32)
    assert x.dtype == jnp.float32, x.dtype
    assert (scale is not None) == (weight.dtype == jnp.int8), weight.dtype
    arrays = [weight, x] if scale is None else [weight, x, scale]
    return run_one(_operation(weight.dtype.name), arrays, result)


@functools.cache
def _operation(dtype: str) -> Operation:
    return Operation("linear", functools.partial(_write, dtype=dtype), _plan)


def chunk_panels(count: int, threads: int) -> int:
    """Panels of a chunk, of a weight with `count` panels."""
    size = _CHUNK_PANELS
    while size > 1 and count < 2 * threads * size:
        size //= 2
    return size


def _plan(arguments: Shapes, results: Shapes, threads: int) -> Plan:
    weight, x = arguments[:2]
    count, num_inputs, _ = weight.shape
    size = chunk_panels(count, threads)
    num_chunks = -(-count // size) if x.shape[0] else 0
    return Plan(num_chunks, (num_inputs, x.shape[0], results[0].shape[1], size))


def _write(module: Module, vectors: Vectors, *, dtype: str) -> Value:
    """Writes f(values, chunk): some panels with all tokens."""
    tiles = write_tiles(module, vectors, dtype)
    with Code(module, "chunk", VOID, [PTR, I64]) as code:
        values, chunk = code.arguments
        count = 4 if dtype == "int8" else 3
        weight, x, *scale, y, num_inputs, num_tokens, num_outputs, size = read_values(
            code, values, count, 4
        )
        first = code.mul(chunk, size)
        last = code.min(code.add(first, size), code.ceil_div(num_outputs, PANEL))
        arrays = Arrays(weight, x, y, num_inputs, num_outputs, scale[0] if scale else NULL)
        multiply(code, tiles, arrays, (first, last), (0, num_tokens))
    return code.function


class Arrays(NamedTuple):
    """The arrays of a product, in the code of its kernel.

    Attributes:
        weight: Address of the panels.
        x: Address of [T, in].
        y: Address of [T, out].
        num_inputs: Inputs.
        num_outputs: Outputs.
        scale: Address of the outputs' factors, of int8 weights.
    """

    weight: Value
    x: Value
    y: Value
    num_inputs: Value
    num_outputs: Value
    scale: Value = NULL


class Tiles(NamedTuple):
    """Functions that compute tiles of a result.

    Attributes:
        dtype: Name of the weight's dtype.
        panels: Panels of a tile by its number of tokens.
        functions: By tokens and panels.
    """

    dtype: str
    panels: Mapping[int, int]
    functions: Mapping[tuple[int, int], Value]


def write_tiles(module: Module, vectors: Vectors, dtype: str) -> Tiles:
    """Writes the functions of all tiles. A sum has the same bits in each."""
    panels = _PANELS[vectors.lanes]
    functions = {
        (tokens, count): _write_tile(module, vectors.lanes, dtype, tokens, count)
        for tokens, most in panels.items()
        for count in {most, 1}
    }
    return Tiles(dtype, panels, functions)


def multiply(
    code: Code,
    tiles: Tiles,
    arrays: Arrays,
    panels: tuple[Value, Value],
    tokens: tuple[Number, Number],
) -> None:
    """Emits the product of a range of panels with a range of tokens, at least one."""
    most = max(tiles.panels)
    count = code.sub(tokens[1], tokens[0])
    is_one_tile = code.less(count, most + 1)
    num_tiles = code.select(is_one_tile, 1, code.ceil_div(count, _MANY))
    # Tiles of two sizes, which differ by one token.
    size, longer = code.div(count, num_tiles), code.rem(count, num_tiles)

    def of_size(tokens_each: int, first: Value, end: Value) -> None:
        """Tiles of one size: they start at `first` and stop before `end`."""
        most_panels = tiles.panels[tokens_each]
        whole = code.sub(panels[1], code.rem(code.sub(panels[1], panels[0]), most_panels))

        def of_panels(begin: Value, stop: Value, num: int) -> None:
            with code.loop(begin, stop, num) as panel, code.loop(first, end, tokens_each) as token:
                _call(code, tiles, arrays, (panel, num), (token, tokens_each))

        # The last panel of the weight may be partly filled, which only tiles of one panel allow.
        is_partial = code.less(arrays.num_outputs, code.mul(whole, PANEL))
        whole = code.sub(whole, code.select(is_partial, most_panels, 0))
        of_panels(panels[0], whole, most_panels)
        of_panels(whole, panels[1], 1)

    border = code.add(tokens[0], code.mul(longer, code.add(size, 1)))
    for tokens_each in tiles.panels:
        with code.when(code.equal(code.add(size, 1), tokens_each)):
            of_size(tokens_each, code.add(tokens[0], 0), border)
        with code.when(code.equal(size, tokens_each)):
            of_size(tokens_each, border, code.add(tokens[1], 0))


def _call(
    code: Code, tiles: Tiles, arrays: Arrays, panel: tuple[Value, int], token: tuple[Value, int]
) -> None:
    first, count = panel
    lanes = code.min(code.sub(arrays.num_outputs, code.mul(first, PANEL)), PANEL)
    size = code.mul(arrays.num_inputs, PANEL)
    output = code.add(code.mul(token[0], arrays.num_outputs), code.mul(first, PANEL))
    places = [
        code.at(arrays.weight, code.mul(first, size), STORED[tiles.dtype]),
        code.at(arrays.x, code.mul(token[0], arrays.num_inputs)),
        code.at(arrays.y, output),
        code.at(arrays.scale, code.mul(first, PANEL)) if tiles.dtype == "int8" else NULL,
    ]
    sizes = [arrays.num_inputs, arrays.num_outputs, lanes]
    code.call(tiles.functions[token[1], count], VOID, [*places, *sizes])


def _write_tile(module: Module, lanes: int, dtype: str, tokens: int, panels: int) -> Value:
    """Writes f(weight, x, y, scale, inputs, outputs, lanes): `tokens` by `panels` of a result.

    With one panel, only so many lanes are stored.
    """
    name = f"tile_{tokens}_{panels}"
    with Code(module, name, VOID, [PTR, PTR, PTR, PTR, I64, I64, I64]) as code:
        weight, x, y, scale, num_inputs, num_outputs, used = code.arguments
        halves = range(0, PANEL, lanes)
        bases = [
            code.at(weight, code.mul(code.mul(num_inputs, PANEL), panel), STORED[dtype])
            for panel in range(panels)
        ]
        rows = [code.at(x, code.mul(num_inputs, token)) for token in range(tokens)]
        sums = [
            [code.variable(code.zeros(lanes)) for _ in range(panels) for _ in halves]
            for _ in range(tokens)
        ]

        def add_input(index: Value) -> None:
            at = code.mul(index, PANEL)
            weights = [
                load_as_float(code, code.at(base, code.add(at, half), STORED[dtype]), dtype, lanes)
                for base in bases
                for half in halves
            ]
            for row, of_token in zip(rows, sums, strict=True):
                factor = code.splat(code.load(code.at(row, index), F32), lanes)
                for total, part in zip(of_token, weights, strict=True):
                    total.set(code.fma(factor, part, total.get()))

        _unrolled(code, num_inputs, add_input)
        for token, of_token in enumerate(sums):
            for i, total in enumerate(of_token):
                place = code.at(y, code.add(code.mul(num_outputs, token), i * lanes))
                there = code.first_lanes(code.sub(used, i * lanes), lanes)
                found = total.get()
                if dtype == "int8":
                    factors = code.at(scale, i * lanes)
                    if panels > 1:
                        of_outputs = code.load(factors, vector(lanes), 4)
                    else:
                        of_outputs = code.load_lanes(factors, there, lanes)
                    found = code.float_op("fmul", found, of_outputs)
                if panels > 1:
                    code.store(found, place, 4)
                else:
                    code.store_lanes(found, place, there, lanes)
    return code.function


def _unrolled(code: Code, count: Value, one: Callable[[Value], None]) -> None:
    """Emits a loop over integers, several in one iteration."""
    whole = code.mul(code.div(count, _UNROLLED), _UNROLLED)
    with code.loop(0, whole, _UNROLLED) as index:
        for i in range(_UNROLLED):
            one(code.add(index, i))
    with code.loop(whole, count) as index:
        one(index)
