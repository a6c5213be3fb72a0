"""Products of tokens with their expert's weight on NVIDIA GPUs: a Pallas kernel, by Triton.

XLA multiplies each token with all experts, of which it masks all but one, and copies the tokens for
that. Here a program of the grid takes tokens of one expert and some outputs of its weight; weights
of experts without tokens are not read.

Shape legend: T tokens, E experts, D inputs, N outputs.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from sgljax_engine.kernels.gpu.linear import is_size_served

_MIN_ROWS, _MAX_ROWS = 16, 128
_WIDE_TILE = 64 * 64
"""Above this many results a program has 8 warps instead of 4."""


class RaggedTile(NamedTuple):
    """What a program of the grid computes. Static; sizes are powers of two.

    A tile is tokens of one expert by outputs of its weight; `inputs` are those in a step of its
    loop, `num_stages` the steps whose loads are in flight.
    """

    rows: int
    outputs: int
    inputs: int
    num_stages: int = 4


class RowTiles(NamedTuple):
    """Tiles of tokens of one expert.

    Shape: expert, start, end: [R] int32; tokens from `start` up to a tile's rows, but before `end`,
        the expert's last; none for tiles that there are not.
    """

    expert: jax.Array
    start: jax.Array
    end: jax.Array


def is_served(x: jax.Array, weights: jax.Array) -> bool:
    """Whether the kernel takes these inputs [T, D] and weights [E, D, N]."""
    return (
        x.dtype == weights.dtype
        and x.dtype in (jnp.bfloat16, jnp.float16, jnp.float32)
        and is_size_served(*weights.shape[1:])
    )


def choose_ragged_tile(x: jax.Array, weights: jax.Array) -> RaggedTile:
    num_experts, num_inputs, num_outputs = weights.shape
    mean = max(x.shape[0] // num_experts, 1)
    is_float = x.dtype.itemsize > 2
    rows = min(max(pl.next_power_of_2(mean), _MIN_ROWS), 32 if is_float else _MAX_ROWS)
    outputs, inputs = (32, 32) if is_float else (64, 128) if rows <= 32 else (128, 64)
    return RaggedTile(rows, math.gcd(outputs, num_outputs), math.gcd(inputs, num_inputs))


def make_row_tiles(group_sizes: jax.Array, num_tokens: int, rows: int) -> RowTiles:
    """Cuts each expert's tokens into tiles; as many as there may be at most."""
    num_experts = group_sizes.shape[0]
    ends = jnp.cumsum(group_sizes, dtype=jnp.int32)
    counts = (group_sizes + rows - 1) // rows
    last = jnp.cumsum(counts, dtype=jnp.int32)
    tile = jnp.arange(min(num_experts, num_tokens) + num_tokens // rows, dtype=jnp.int32)
    # Comparisons with all experts: a search would be a loop of kernels.
    expert = jnp.sum(last[None] <= tile[:, None], axis=1, dtype=jnp.int32)
    exists = expert < num_experts
    expert = jnp.minimum(expert, num_experts - 1)
    start = ends[expert] - group_sizes[expert] + (tile - last[expert] + counts[expert]) * rows
    return RowTiles(expert, start, jnp.where(exists, ends[expert], start))


def _multiply_tile(
    x_ref: Any,
    weights_ref: Any,
    expert_ref: Any,
    start_ref: Any,
    end_ref: Any,
    out_ref: Any,
    *,
    tile: RaggedTile,
) -> None:
    """The kernel: a tile's tokens by some outputs. Refs are whole arrays in global memory."""
    first_column, index = pl.program_id(0) * tile.outputs, pl.program_id(1)
    expert, start, end = expert_ref[index], start_ref[index], end_ref[index]
    precision = lax.Precision.HIGHEST if x_ref.dtype == jnp.float32 else None

    @pl.when(start < end)
    def multiply() -> None:
        row = start + jnp.arange(tile.rows, dtype=jnp.int32)
        column = first_column + jnp.arange(tile.outputs, dtype=jnp.int32)
        is_row = (row < end)[:, None]

        def add_step(step: jax.Array, total: jax.Array) -> jax.Array:
            inputs = step * tile.inputs + jnp.arange(tile.inputs, dtype=jnp.int32)
            x = plgpu.load(x_ref.at[row[:, None], inputs[None, :]], mask=is_row, other=0.0)
            weight = plgpu.load(weights_ref.at[expert, inputs[:, None], column[None, :]])
            return total + jnp.dot(
                x, weight, precision=precision, preferred_element_type=jnp.float32
            )

        total = jnp.zeros((tile.rows, tile.outputs), jnp.float32)
        total = lax.fori_loop(0, x_ref.shape[1] // tile.inputs, add_step, total)
        at = out_ref.at[row[:, None], column[None, :]]
        plgpu.store(at, total.astype(out_ref.dtype), mask=is_row)


def ragged_linear(
    weights: jax.Array,
    x: jax.Array,
    group_sizes: jax.Array,
    *,
    tile: RaggedTile | None = None,
    interpret: bool = False,
) -> jax.Array:
    """`x[t] @ weights[e]` for each token t of each expert e.

    Args:
        weights: [E, D, N], see `is_served`.
        x: [T, D]: first the tokens of expert 0, then those of expert 1, and so on.
        group_sizes: [E] int32, tokens of each expert; together at most T.
        tile: Other than the default.
        interpret: Run the kernel as plain JAX operations on any device. Slow; for tests.

    Returns:
        [T, N] in the dtype of `x`; undefined for tokens beyond the last expert's.
    """
    num_tokens, num_outputs = x.shape[0], weights.shape[2]
    tile = tile or choose_ragged_tile(x, weights)
    tiles = make_row_tiles(group_sizes, num_tokens, tile.rows)
    return pl.pallas_call(
        functools.partial(_multiply_tile, tile=tile),
        grid=(num_outputs // tile.outputs, tiles.expert.shape[0]),
        out_shape=jax.ShapeDtypeStruct((num_tokens, num_outputs), x.dtype),
        compiler_params=plgpu.CompilerParams(
            num_warps=8 if tile.rows * tile.outputs > _WIDE_TILE else 4,
            num_stages=tile.num_stages,
        ),
        interpret=interpret,
        name="ragged_linear",
    )(x, weights, *tiles)
