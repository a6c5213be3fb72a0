"""Products of tokens with a weight in panels, on CPUs.

Registers hold a tile of the result, some tokens by some panels, while it is summed over the inputs
(Goto and van de Geijn, 2008). Outputs lie in vector lanes; each weight is loaded once for all
tokens of the tile, and each input of a token once for all its panels. Every output is one chain of
fused multiply-adds over the inputs, in order, whatever the number of tokens, their tile and their
thread: so a token has the same bits in any batch. A few tokens take as long as reading the weight.
While several tiles of tokens are multiplied by some panels, those that follow are prefetched.

Weights may be stored in bfloat16 or float16: they are widened in registers, and sums are float32.
Those in int8 have a factor per output, which multiplies the sum.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from sgljax_cpu.emit import (
    I8,
    I64,
    NULL,
    PTR,
    VOID,
    Code,
    Module,
    Number,
    Value,
)
from sgljax_cpu.linear_tile import Tiles, write_tiles
from sgljax_cpu.machine import Vectors
from sgljax_cpu.numbers import STORED
from sgljax_cpu.operation import Operation, Plan, Shapes, read_values
from sgljax_cpu.panels import PANEL
from sgljax_cpu.primitive import run_one

_MANY = 6
"""Tokens of a tile when a tile does not hold them all."""

_FEW = 2
"""Largest number of tokens for which a tile has 8 panels."""

_CHUNK_PANELS, _CHUNK_PANELS_OF_MANY = 8, 4
"""Panels of a chunk, with few tokens and with more, unless there would be fewer than two chunks a
thread. A thread waits for the other one's last chunk, so they are as small as a tile allows."""

_AHEAD_BYTES = 1024
"""How far ahead a panel is prefetched while it is multiplied by the only tile of tokens."""


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


def chunk_panels(count: int, threads: int, num_tokens: int) -> int:
    """Panels of a chunk, of a weight with `count` panels."""
    size = _CHUNK_PANELS if num_tokens <= _FEW else _CHUNK_PANELS_OF_MANY
    while size > 1 and count < 2 * threads * size:
        size //= 2
    return size


def _plan(arguments: Shapes, results: Shapes, threads: int) -> Plan:
    weight, x = arguments[:2]
    count, num_inputs, _ = weight.shape
    size = chunk_panels(count, threads, x.shape[0])
    num_chunks = -(-count // size) if x.shape[0] else 0
    return Plan(num_chunks, (num_inputs, x.shape[0], results[0].shape[1], size, threads))


def _write(module: Module, vectors: Vectors, *, dtype: str) -> Value:
    """Writes f(values, chunk): some panels with all tokens."""
    tiles = write_tiles(module, vectors, dtype)
    with Code(module, "chunk", VOID, [PTR, I64]) as code:
        values, chunk = code.arguments
        count = 4 if dtype == "int8" else 3
        weight, x, *scale, y, num_inputs, num_tokens, num_outputs, size, threads = read_values(
            code, values, count, 5
        )
        arrays = Arrays(weight, x, y, num_inputs, num_outputs, scale[0] if scale else NULL)
        first = code.mul(chunk, size)
        last = code.min(code.add(first, size), code.ceil_div(num_outputs, PANEL))
        # Threads take chunks in turn.
        panels = PanelRange(first, last, following=code.mul(code.add(chunk, threads), size))
        multiply(code, tiles, arrays, panels, (0, num_tokens))
    return code.function


class PanelRange(NamedTuple):
    """A range of a weight's panels, in the code of its kernel.

    Attributes:
        first: The first one.
        last: Where the range ends.
        following: The panel at which this thread probably goes on.
    """

    first: Value
    last: Value
    following: Value


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


def multiply(
    code: Code, tiles: Tiles, arrays: Arrays, panels: PanelRange, tokens: tuple[Number, Number]
) -> None:
    """Emits the product of a range of panels with a range of tokens, at least one."""
    count = code.sub(tokens[1], tokens[0])
    is_one_tile = code.less(count, max(tiles.panels) + 1)
    num_tiles = code.select(is_one_tile, 1, code.ceil_div(count, _MANY))
    # Tiles of two sizes, which differ by one token: the longer ones first.
    rest = code.rem(count, num_tiles)
    num_long = code.select(code.equal(rest, 0), num_tiles, rest)
    longest = code.ceil_div(count, num_tiles)
    border = code.add(tokens[0], code.mul(num_long, longest))

    def of_panels(begin: Value, stop: Value, num: int, size: int) -> None:
        """Some panels at a time, with all tiles while the panels are in the cache."""
        with code.loop(begin, stop, num) as panel:
            ahead = _ahead(code, tiles, arrays, panels, (panel, num), num_tiles)
            for each, first, end, tiles_before in (
                (size, tokens[0], border, 0),
                (size - 1, border, tokens[1], num_long),
            ):
                if each:
                    with code.loop(first, end, each) as token:
                        tile = code.div(code.sub(token, first), each)
                        of_tile = ahead.of_tile(code, code.add(tile, tiles_before))
                        _call(code, tiles, arrays, (panel, num), (token, each), of_tile)

    for tokens_each, most_panels in tiles.panels.items():
        with code.when(code.equal(longest, tokens_each)):
            whole = code.sub(
                panels.last, code.rem(code.sub(panels.last, panels.first), most_panels)
            )
            # The weight's last panel may be partly filled, which only tiles of one panel allow.
            is_partial = code.less(arrays.num_outputs, code.mul(whole, PANEL))
            whole = code.sub(whole, code.select(is_partial, most_panels, 0))
            of_panels(panels.first, whole, most_panels, tokens_each)
            of_panels(whole, panels.last, 1, tokens_each)


class _Ahead(NamedTuple):
    """Memory to prefetch while some panels are multiplied.

    Attributes:
        address: Where it starts.
        step: Bytes for each input of a tile.
        tile_bytes: Bytes for a whole tile.
    """

    address: Value
    step: Value
    tile_bytes: Value

    def of_tile(self, code: Code, tile: Value) -> _Ahead:
        """The part that one tile prefetches."""
        return self._replace(address=code.at(self.address, code.mul(tile, self.tile_bytes), I8))


def _ahead(
    code: Code,
    tiles: Tiles,
    arrays: Arrays,
    panels: PanelRange,
    current: tuple[Value, int],
    num_tiles: Value,
) -> _Ahead:
    """The panels that follow the current ones, or with one tile the rest of the current one."""
    first, count = current
    following = code.add(first, count)
    following = code.select(code.less(following, panels.last), following, panels.following)
    is_there = code.less(code.mul(following, PANEL), arrays.num_outputs)
    following = code.select(is_there, following, first)
    size = code.mul(arrays.num_inputs, PANEL)
    here, there = (
        code.at(arrays.weight, code.mul(panel, size), STORED[tiles.dtype])
        for panel in (first, following)
    )
    row_bytes = PANEL * jnp.dtype(tiles.dtype).itemsize
    step = code.select(is_there, code.div(count * row_bytes, num_tiles), 0)
    near, near_step = (code.at(here, _AHEAD_BYTES, I8), row_bytes) if count == 1 else (here, 0)
    is_alone = code.less(num_tiles, 2)
    step = code.select(is_alone, near_step, step)
    return _Ahead(code.select(is_alone, near, there), step, code.mul(step, arrays.num_inputs))


def _call(
    code: Code,
    tiles: Tiles,
    arrays: Arrays,
    panel: tuple[Value, int],
    token: tuple[Value, int],
    ahead: _Ahead,
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
        ahead.address,
    ]
    sizes = [arrays.num_inputs, arrays.num_outputs, lanes, ahead.step]
    code.call(tiles.functions[token[1], count], VOID, [*places, *sizes])
