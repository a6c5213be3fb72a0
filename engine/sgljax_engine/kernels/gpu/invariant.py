"""Kernels for deterministic sampling on NVIDIA GPUs: what `linear` has no part in.

Pallas kernels, compiled by Triton. A program computes whole rows, or whole tiles of a product, of a
size that does not depend on the number of tokens, so a token has the same bits whatever it is
computed with. Between them XLA only moves, rounds, adds and multiplies single numbers.

Shape legend: T tokens, D inputs, N outputs, V vocabulary; h head dim.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from sgljax_engine.kernels.gpu.decode_attention import HeadNorms, rotated_heads
from sgljax_engine.kernels.gpu.linear import Tile, dot, params_of, tile_rows

_MAX_HEADS = 16
"""Heads in a program."""


_HALF, _FLOAT = Tile(64, 64, 64), Tile(32, 64, 32)
"""Tiles of products; outputs and inputs beyond the last count as 0."""


def linear(x: jax.Array, weight: jax.Array, *, interpret: bool = False) -> jax.Array:
    """`x @ W` [T, N] in the dtype of `x`.

    Args:
        x: [T, D].
        weight: [D, N].
        interpret: Run the kernel as plain JAX operations on any device. Slow; for tests.
    """
    return _product(x, weight, x.dtype, is_table=False, interpret=interpret)


def unembed(x: jax.Array, table: jax.Array, *, interpret: bool = False) -> jax.Array:
    """`x @ table.T` [T, V] float32, of x [T, D] and a table [V, D]."""
    return _product(x, table, jnp.float32, is_table=True, interpret=interpret)


def _product(
    x: jax.Array, weight: jax.Array, dtype: Any, *, is_table: bool, interpret: bool
) -> jax.Array:
    tile = _HALF if x.dtype.itemsize == 2 else _FLOAT
    (num_rows, num_inputs), num_outputs = x.shape, weight.shape[0 if is_table else 1]

    def kernel(x_ref: Any, weight_ref: Any, out_ref: Any) -> None:
        row = tile_rows(tile)
        column = pl.program_id(1) * tile.outputs + jnp.arange(tile.outputs, dtype=jnp.int32)
        is_row, is_column = (row < num_rows)[:, None], column < num_outputs

        def step(index: jax.Array, total: jax.Array) -> jax.Array:
            at = index * tile.inputs + jnp.arange(tile.inputs, dtype=jnp.int32)
            exists = at < num_inputs
            part = plgpu.load(
                x_ref.at[row[:, None], at[None, :]], mask=is_row & exists[None, :], other=0.0
            )
            if is_table:
                mask = is_column[:, None] & exists[None, :]
                found = plgpu.load(
                    weight_ref.at[column[:, None], at[None, :]], mask=mask, other=0.0
                ).T
            else:
                mask = exists[:, None] & is_column[None, :]
                found = plgpu.load(
                    weight_ref.at[at[:, None], column[None, :]], mask=mask, other=0.0
                )
            return total + dot(part, found)

        start = jnp.zeros((tile.rows, tile.outputs), jnp.float32)
        total = lax.fori_loop(0, pl.cdiv(num_inputs, tile.inputs), step, start)
        at_out = out_ref.at[row[:, None], column[None, :]]
        plgpu.store(at_out, total.astype(dtype), mask=is_row & is_column[None, :])

    return pl.pallas_call(
        kernel,
        grid=(pl.cdiv(num_rows, tile.rows), pl.cdiv(num_outputs, tile.outputs)),
        out_shape=jax.ShapeDtypeStruct((num_rows, num_outputs), dtype),
        compiler_params=params_of(tile),
        interpret=interpret,
        name="unembed" if is_table else "linear",
    )(x, weight)


def rms_norm(
    x: jax.Array,
    weight: jax.Array | None,
    eps: float,
    offset: float,
    *,
    interpret: bool = False,
) -> jax.Array:
    """`basic.rms_norm` over the last axis; of any shape, with weight [D] or None.

    A program reads a row twice, in steps.
    """
    size = x.shape[-1]
    rows, step_size = x.reshape(-1, size), min(pl.next_power_of_2(size), 1024)
    steps = pl.cdiv(size, step_size)

    def kernel(*refs: Any) -> None:
        x_ref, out_ref = refs[0], refs[-1]
        row = pl.program_id(0)

        def load(index: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
            at = index * step_size + jnp.arange(step_size, dtype=jnp.int32)
            exists = at < size
            found = plgpu.load(x_ref.at[row, at], mask=exists, other=0.0)
            return found.astype(jnp.float32), at, exists

        def add(index: jax.Array, total: jax.Array) -> jax.Array:
            part = load(index)[0]
            return total + part * part

        squares = lax.fori_loop(0, steps, add, jnp.zeros((step_size,), jnp.float32))
        scale = 1.0 / jnp.sqrt(jnp.sum(squares) / size + eps)

        def put(index: jax.Array, carry: int) -> int:
            part, at, exists = load(index)
            part *= scale
            if weight is not None:
                found = plgpu.load(refs[1].at[at], mask=exists, other=0.0)
                part *= found.astype(jnp.float32) + offset
            plgpu.store(out_ref.at[row, at], part.astype(out_ref.dtype), mask=exists)
            return carry

        lax.fori_loop(0, steps, put, 0)

    out = pl.pallas_call(
        kernel,
        grid=(rows.shape[0],),
        out_shape=jax.ShapeDtypeStruct(rows.shape, x.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=4),
        interpret=interpret,
        name="rms_norm",
    )(*(each for each in (rows, weight) if each is not None))
    return out.reshape(x.shape)


def sines(angles: jax.Array, *, interpret: bool = False) -> tuple[jax.Array, jax.Array]:
    """Sines and cosines [T, n] float32 of angles [T, n] float32."""
    size = angles.shape[1]

    def kernel(angles_ref: Any, sin_ref: Any, cos_ref: Any) -> None:
        token, at = pl.program_id(0), jnp.arange(pl.next_power_of_2(size), dtype=jnp.int32)
        exists = at < size
        angle = plgpu.load(angles_ref.at[token, at], mask=exists, other=0.0)
        plgpu.store(sin_ref.at[token, at], jnp.sin(angle), mask=exists)
        plgpu.store(cos_ref.at[token, at], jnp.cos(angle), mask=exists)

    table = jax.ShapeDtypeStruct(angles.shape, jnp.float32)
    sin, cos = pl.pallas_call(
        kernel,
        grid=angles.shape[:1],
        out_shape=(table, table),
        compiler_params=plgpu.CompilerParams(num_warps=1),
        interpret=interpret,
        name="sines",
    )(angles)
    return sin, cos


class Slots(NamedTuple):
    """Pages [num_pages, num_kv_heads, page_size, h], and where in them keys and values go.

    `slots` is [T] int32, page times page size plus offset; a token whose slot is not there is not
    kept.
    """

    k_pages: jax.Array
    v_pages: jax.Array
    slots: jax.Array


def prepare_heads(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    rope: tuple[jax.Array, jax.Array],
    norms: HeadNorms | None,
    into: Slots,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Norms, if any, and the rotary embedding of queries and keys, in one kernel.

    Keys and values are written to their pages in place; returns queries, and the pages.

    Shape: q: [T, num_heads, h]. k, v: [T, num_kv_heads, h]. rope: sines and cosines [T, h // 2]
    float32.
    """
    (num_tokens, num_heads, head_dim), num_kv_heads = q.shape, k.shape[1]
    q_rows, kv_rows = (min(pl.next_power_of_2(n), _MAX_HEADS) for n in (num_heads, num_kv_heads))
    q_tiles = pl.cdiv(num_heads, q_rows)
    eps, offset = (0.0, 0.0) if norms is None else (norms.eps, norms.offset)
    args = [q, k, v, *rope, *into]
    num_before = len(args)
    args += [] if norms is None else [norms.q, norms.k]

    def kernel(*refs: Any) -> None:
        q_ref, k_ref, v_ref, sin_ref, cos_ref = refs[:5]
        q_out, k_out, v_out = refs[len(args) :]
        q_norm, k_norm = (None, None) if norms is None else refs[num_before : len(args)]
        token, tile = pl.program_id(0), pl.program_id(1)
        angles = (sin_ref, cos_ref)
        dim = jnp.arange(head_dim, dtype=jnp.int32)

        @pl.when(tile < q_tiles)
        def _() -> None:
            head = tile * q_rows + jnp.arange(q_rows, dtype=jnp.int32)
            mask = (head < num_heads)[:, None]
            out = rotated_heads(q_ref, q_norm, angles, token, head[:, None], mask, eps, offset)
            at = q_out.at[token, head[:, None], dim[None, :]]
            plgpu.store(at, out.astype(q_out.dtype), mask=mask)

        @pl.when(tile >= q_tiles)
        def _() -> None:
            head = (tile - q_tiles) * kv_rows + jnp.arange(kv_rows, dtype=jnp.int32)
            mask = (head < num_kv_heads)[:, None]
            keys = rotated_heads(k_ref, k_norm, angles, token, head[:, None], mask, eps, offset)
            at: Any = (token, head[:, None], dim[None, :])
            values = plgpu.load(v_ref.at[at], mask=mask, other=0.0)
            slot, (num_pages, _, page_size, _) = refs[7][token], k_out.shape
            is_kept = (slot >= 0) & (slot < num_pages * page_size)
            mask, slot = mask & is_kept, jnp.where(is_kept, slot, 0)
            page, place = lax.div(slot, page_size), lax.rem(slot, page_size)
            at = (page, head[:, None], place, dim[None, :])
            plgpu.store(k_out.at[at], keys.astype(k_out.dtype), mask=mask)
            plgpu.store(v_out.at[at], values.astype(v_out.dtype), mask=mask)

    out, *kv = pl.pallas_call(
        kernel,
        grid=(num_tokens, q_tiles + pl.cdiv(num_kv_heads, kv_rows)),
        out_shape=tuple(
            jax.ShapeDtypeStruct(each.shape, each.dtype) for each in (q, into.k_pages, into.v_pages)
        ),
        compiler_params=plgpu.CompilerParams(num_warps=4),
        input_output_aliases={5: 1, 6: 2},
        interpret=interpret,
        name="prepare_heads",
    )(*args)
    return out, (kv[0], kv[1])
