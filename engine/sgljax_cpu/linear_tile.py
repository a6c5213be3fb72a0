"""Tiles of a product of tokens with panels of a weight, on CPUs, each held in registers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from sgljax_cpu.emit import F32, I8, I64, PTR, VOID, Code, Module, Value, vector
from sgljax_cpu.machine import Vectors
from sgljax_cpu.numbers import STORED, load_as_float
from sgljax_cpu.panels import PANEL

_PANELS = {
    16: {1: 8, 2: 8, 3: 4, 4: 4, 5: 4, 6: 4, 7: 2, 8: 2, 9: 2, 10: 2},
    8: {1: 4, 2: 2, 3: 2, 4: 1, 5: 1, 6: 1},
}
"""Panels of a tile, a power of two, by lanes and tokens: their sums fill the registers."""

_UNROLLED = 4

_FEWEST_AHEAD = 3
"""Tokens of a tile from which on it prefetches: fewer have panels enough to load at once."""

_LINE_BYTES = 64


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
        for count in {most, panels.get(tokens + 1, 1), 1}  # a longer tile's, beside it
    }
    return Tiles(dtype, panels, functions)


def _write_tile(module: Module, lanes: int, dtype: str, tokens: int, panels: int) -> Value:
    """Writes a function for `tokens` by `panels` of a result.

    It is f(weight, x, y, scale, ahead, inputs, outputs, lanes, step). With one panel, only so many
    lanes are stored. Each input prefetches a cache line at `ahead`, or half as many as panels, and
    moves on by `step` bytes: more in a row would hold up the loads of the product.
    """
    name = f"tile_{tokens}_{panels}"
    with Code(module, name, VOID, [PTR] * 5 + [I64] * 4) as code:
        weight, x, y, scale, ahead, num_inputs, num_outputs, used, step = code.arguments
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
        next_line = code.variable(ahead)

        def add_input(index: Value) -> None:
            if tokens >= _FEWEST_AHEAD:
                for line in range(max(panels // 2, 1)):
                    code.prefetch(code.at(next_line.get(), line * _LINE_BYTES, I8))
                next_line.set(code.at(next_line.get(), step, I8))
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

        whole = code.sub(num_inputs, code.rem(num_inputs, _UNROLLED))
        with code.loop(0, whole, _UNROLLED) as index:
            for i in range(_UNROLLED):
                add_input(code.add(index, i))
        with code.loop(whole, num_inputs) as index:
            add_input(index)
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
