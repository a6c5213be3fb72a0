"""Matrix products of few tokens on NVIDIA GPUs, with what comes after them.

Pallas kernels, compiled by Triton. A decode step multiplies some hundred tokens with every weight:
the weights' bytes take the time, and each kernel between two products costs as much as reading
some. So gates are part of the products that they combine, residuals of the products that are added
to them, and products of one input are one kernel. Norms are not: with anything between a load and
its product the loads of later steps are not under way while it multiplies.

Weights stay apart, each [in, out]: a program of the grid reads the one that its outputs belong to.
Those in int8 are read as they are and widened in registers; their factors multiply the sums.

With tiles that are `is_fixed`, the sums of a token have one order whatever it is computed with: a
tile has the same rows for any number of tokens, each of which is summed over inputs in steps.

Shape legend: T tokens, D inputs, N outputs of a weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

MAX_TOKENS = 256
"""For more tokens, libraries' products are as fast, and their parts need not be read together."""

DTYPES = (jnp.bfloat16, jnp.float32)
_MIN_ROWS, _MIN_OUTPUTS, _MIN_INPUTS = 16, 16, 32


class Scaled(NamedTuple):
    """A weight in int8, [D, N], with a float32 factor for each output; see `layers.int8`."""

    values: jax.Array
    scale: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape


Weight = jax.Array | Scaled
"""[D, N], in the dtype of the inputs or in int8."""


class Tile(NamedTuple):
    """What a program of the grid computes. Static; sizes are powers of two.

    A tile is tokens by outputs of a weight; `inputs` are those in a step of its loop, `num_stages`
    the steps whose loads are in flight, `num_warps` groups of 32 threads.
    """

    rows: int
    outputs: int
    inputs: int
    num_warps: int = 4
    num_stages: int = 4


JOINT, GATED, FLOAT = Tile(64, 64, 128), Tile(64, 64, 64), Tile(64, 32, 32)
"""Tiles of products of one input, of gated ones, and of both in float32."""

FEW_JOINT, FEW_GATED = Tile(64, 32, 128), Tile(64, 32, 64)
"""For the rows of one tile, so that there are about as many programs as multiprocessors."""

ADDED, ADDED_INT8, ADDED_FLOAT = Tile(64, 16, 256), Tile(64, 16, 256, 4, 3), Tile(32, 32, 64)
"""Tiles of products that are added: there are few outputs, and many inputs. Weights in int8 go
through shared memory a second time, widened, only for the instructions that take 64 rows; for those
that take fewer they would be widened one by one."""


def is_served(x: jax.Array, weights: Sequence[Weight]) -> bool:
    return x.dtype in DTYPES and all(
        (isinstance(weight, Scaled) or weight.dtype == x.dtype) and is_size_served(*weight.shape)
        for weight in weights
    )


def is_size_served(inputs: int, outputs: int) -> bool:
    """Whether the kernels take weights [inputs, outputs]."""
    return inputs % _MIN_INPUTS == 0 and outputs % _MIN_OUTPUTS == 0


def _read_tile(x: jax.Array, tile: Tile, few: Tile, is_fixed: bool) -> Tile:
    if x.dtype.itemsize > 2:
        return FLOAT
    return tile if is_fixed or x.shape[0] > few.rows else few


def _added_tile(x: jax.Array, weight: Weight) -> Tile:
    if x.dtype.itemsize > 2:
        return ADDED_FLOAT
    return ADDED_INT8 if isinstance(weight, Scaled) else ADDED


def _tile_for(x: jax.Array, weights: Sequence[Weight], tile: Tile, is_fixed: bool) -> Tile:
    """The tile, with parts of all weights' sizes; unless fixed, with no more rows than tokens."""
    rows = pl.next_power_of_2(x.shape[0])
    outputs = math.gcd(tile.outputs, *(weight.shape[1] for weight in weights))
    return tile._replace(
        rows=tile.rows if is_fixed else min(max(rows, _MIN_ROWS), tile.rows),
        outputs=outputs,
        inputs=math.gcd(tile.inputs, x.shape[1]),
    )


def linears(
    x: jax.Array,
    weights: Sequence[Weight],
    *,
    tile: Tile | None = None,
    is_fixed: bool = False,
    interpret: bool = False,
) -> tuple[jax.Array, ...]:
    """`x @ W` [T, N] of x [T, D] and several weights [D, N], in one kernel, in the dtype of x.

    Weights are such as `is_served` says. `is_fixed` keeps the tile's rows for fewer tokens too, so
    that bits do not depend on them. `interpret` runs plain JAX operations on any device; slow, for
    tests.
    """
    tile = tile or _read_tile(x, JOINT, FEW_JOINT, is_fixed)
    tile = _tile_for(x, weights, tile, is_fixed)
    starts = [0]
    for weight in weights:
        starts.append(starts[-1] + weight.shape[1] // tile.outputs)

    def kernel(x_ref: Any, *refs: Any) -> None:
        index, row = pl.program_id(1), tile_rows(tile)
        for i, (weight_ref, out_ref) in enumerate(
            zip(refs[: len(weights)], refs[len(weights) :], strict=True)
        ):

            @pl.when((index >= starts[i]) & (index < starts[i + 1]))
            def _(weight_ref: Any = weight_ref, out_ref: Any = out_ref, i: int = i) -> None:
                column = (index - starts[i]) * tile.outputs
                (product,) = _products(x_ref, [weight_ref], row, column, tile)
                _store(out_ref, product, row, column)

    out = pl.pallas_call(
        kernel,
        grid=(pl.cdiv(x.shape[0], tile.rows), starts[-1]),
        out_shape=tuple(
            jax.ShapeDtypeStruct((x.shape[0], weight.shape[1]), x.dtype) for weight in weights
        ),
        compiler_params=params_of(tile),
        interpret=interpret,
        name="linears",
    )(x, *weights)
    return tuple(out)


def gated(
    x: jax.Array,
    gate: Weight,
    up: Weight,
    activation: Callable[[jax.Array], jax.Array],
    *,
    tile: Tile | None = None,
    is_fixed: bool = False,
    interpret: bool = False,
) -> jax.Array:
    """`activation(x @ gate) * (x @ up)` [T, N] of x [T, D] and weights [D, N], in one kernel.

    The activation is elementwise; options are those of `linears`.
    """
    tile = tile or _read_tile(x, GATED, FEW_GATED, is_fixed)
    tile = _tile_for(x, (gate, up), tile, is_fixed)

    def kernel(x_ref: Any, gate_ref: Any, up_ref: Any, out_ref: Any) -> None:
        row, column = tile_rows(tile), pl.program_id(1) * tile.outputs
        gates, ups = _products(x_ref, [gate_ref, up_ref], row, column, tile)
        _store(out_ref, activation(gates) * ups, row, column)

    return pl.pallas_call(
        kernel,
        grid=(pl.cdiv(x.shape[0], tile.rows), gate.shape[1] // tile.outputs),
        out_shape=jax.ShapeDtypeStruct((x.shape[0], gate.shape[1]), x.dtype),
        compiler_params=params_of(tile),
        interpret=interpret,
        name="gated",
    )(x, gate, up)


def linear_add(
    x: jax.Array,
    weight: Weight,
    residual: jax.Array,
    *,
    tile: Tile | None = None,
    is_fixed: bool = False,
    interpret: bool = False,
) -> jax.Array:
    """`residual + x @ W` [T, N] of x [T, D] and a weight [D, N], in one kernel.

    Options are those of `linears`.
    """
    tile = _tile_for(x, (weight,), tile or _added_tile(x, weight), is_fixed)

    def kernel(x_ref: Any, weight_ref: Any, residual_ref: Any, out_ref: Any) -> None:
        row, column = tile_rows(tile), pl.program_id(1) * tile.outputs
        columns = column + jnp.arange(tile.outputs, dtype=jnp.int32)
        (product,) = _products(x_ref, [weight_ref], row, column, tile)
        at = residual_ref.at[row[:, None], columns[None, :]]
        mask = (row < x_ref.shape[0])[:, None]
        before = plgpu.load(at, mask=mask, other=0.0).astype(jnp.float32)
        _store(out_ref, before + product, row, column)

    return pl.pallas_call(
        kernel,
        grid=(pl.cdiv(x.shape[0], tile.rows), weight.shape[1] // tile.outputs),
        out_shape=jax.ShapeDtypeStruct((x.shape[0], weight.shape[1]), residual.dtype),
        compiler_params=params_of(tile),
        interpret=interpret,
        name="linear_add",
    )(x, weight, residual)


def _products(
    x_ref: Any, weight_refs: Sequence[Any], row: jax.Array, column: Any, tile: Tile
) -> tuple[jax.Array, ...]:
    """Products [rows, outputs] float32 of rows with the columns of each weight from `column` on."""
    mask = (row < x_ref.shape[0])[:, None]
    columns = column + jnp.arange(tile.outputs, dtype=jnp.int32)
    factors = [_load_factors(ref, columns) for ref in weight_refs]

    def step(index: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        inputs = index * tile.inputs + jnp.arange(tile.inputs, dtype=jnp.int32)
        part = plgpu.load(x_ref.at[row[:, None], inputs[None, :]], mask=mask, other=0.0)
        return tuple(
            total + dot(part, _load_weight(ref, inputs, columns, part.dtype))
            for total, ref in zip(sums, weight_refs, strict=True)
        )

    start = (jnp.zeros((tile.rows, tile.outputs), jnp.float32),) * len(weight_refs)
    sums = lax.fori_loop(0, x_ref.shape[1] // tile.inputs, step, start)
    return tuple(total * each for total, each in zip(sums, factors, strict=True))


def _load_weight(ref: Any, inputs: jax.Array, columns: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """A part of a weight, [inputs, outputs], in the dtype of what it is multiplied with."""
    values: Any = ref.values if isinstance(ref, Scaled) else ref
    return plgpu.load(values.at[inputs[:, None], columns[None, :]]).astype(dtype)


def _load_factors(ref: Any, columns: jax.Array) -> jax.Array | float:
    """Factors of a weight's outputs, [1, outputs] float32, or 1 if it has none.

    Loaded before the sums, whose loads then hide the time that these take.
    """
    if not isinstance(ref, Scaled):
        return 1.0
    scale: Any = ref.scale
    return plgpu.load(scale.at[columns])[None, :]


def dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """In the precision that the process has chosen for float32, as XLA's products."""
    return lax.dot_general(a, b, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)


def tile_rows(tile: Tile) -> jax.Array:
    return pl.program_id(0) * tile.rows + jnp.arange(tile.rows, dtype=jnp.int32)


def _store(out_ref: Any, values: jax.Array, row: jax.Array, column: Any) -> None:
    columns = column + jnp.arange(values.shape[1], dtype=jnp.int32)
    at = out_ref.at[row[:, None], columns[None, :]]
    plgpu.store(at, values.astype(out_ref.dtype), mask=(row < out_ref.shape[0])[:, None])


def params_of(tile: Tile) -> Any:
    """What the compiler is told of a tile."""
    return plgpu.CompilerParams(num_warps=tile.num_warps, num_stages=tile.num_stages)
