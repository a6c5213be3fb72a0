"""Contiguous KV: keys and values by row. Decode attention on CPUs reads them instead of pages.

XLA on CPU cannot read scattered pages in place: each step would copy all pages that it needs. So a
decode dispatch copies them once, before its first step, into arrays with the keys of a row in
order. Its steps read slices of these in place. New tokens are written to both.

The arrays are allocated once, donated to every decode dispatch and returned by it. A dispatch of
the same requests reuses what the last one left (`runner.kv.contiguous_slots`); others copy all.

Shape legend: B rows of a dispatch, K kv heads, h head dim, P pages of a row, L lanes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sgljax_engine.cache.kv_pages import LayerKV
from sgljax_engine.cache.zeros import MakeZeros

CHUNK = 64
"""Adjacent keys of a row: attention takes one chunk of several rows at a time."""


def lanes_for(simd: Mapping[str, Any]) -> int:
    """Number of float32 in a CPU's vector, from the SIMD extensions that numpy reports.

    16 with AVX-512, under any of numpy's names; else 8, even if vectors are shorter or unknown.
    """
    known = {*simd.get("baseline", ()), *simd.get("found", ())}
    return 16 if known & {"X86_V4", "AVX512F", "AVX512_SKX"} else 8


LANES = lanes_for(np.show_config(mode="dicts").get("SIMD Extensions", {}))
"""Adjacent elements in memory: keys of one channel, or channels of one key. One vector of this CPU.

With more lanes, the sums of attention take as many steps with less work between them; with fewer,
vectors are not full.
"""

ROW_TILE = 16
"""Rows that attention processes together."""

SHARING_UNIT = 4
"""Neighbouring rows that read the keys of their common pages from their first row.

With more, groups would fill fewer units, since they lose rows as samples finish.
"""


class LayerContiguousKV(NamedTuple):
    """One layer's keys and values by row. The dtype is that of the pages.

    Shape:
        k: [num_chunks, num_rows, K, CHUNK // L, h, L]
        v: [num_chunks, num_rows, K, h // L, CHUNK, L]
    """

    k: jax.Array
    v: jax.Array


ContiguousKV = tuple[LayerContiguousKV, ...]
"""All layers; empty for attention backends that read pages."""


class DecodeCache(NamedTuple):
    """Both forms of one layer's cache, for a decode dispatch."""

    pages: LayerKV
    contiguous: LayerContiguousKV


class ContiguousShapes(NamedTuple):
    """Shapes of one layer's `LayerContiguousKV`."""

    k: tuple[int, ...]
    v: tuple[int, ...]


def contiguous_shapes(
    num_rows: int, max_len: int, num_kv_heads: int, head_dim: int
) -> ContiguousShapes:
    """Shapes of k and v for this many rows of at most `max_len` tokens.

    Rows are rounded up to whole tiles, and tokens to whole chunks. `head_dim` must be a multiple of
    `LANES`.
    """
    tile = min(num_rows, ROW_TILE)
    lead = (-(-max_len // CHUNK), -(-num_rows // tile) * tile, num_kv_heads)
    return ContiguousShapes(
        k=(*lead, CHUNK // LANES, head_dim, LANES), v=(*lead, head_dim // LANES, CHUNK, LANES)
    )


def allocate_contiguous_kv(
    shapes: Sequence[ContiguousShapes],
    shardings: Sequence[jax.sharding.Sharding],
    *,
    dtype: jnp.dtype,
    make_zeros: MakeZeros,
) -> ContiguousKV:
    """Makes the arrays of all layers on their shardings' devices. Engine thread only."""
    return tuple(
        LayerContiguousKV(*(make_zeros(shape, dtype, sharding) for shape in layer))
        for layer, sharding in zip(shapes, shardings, strict=True)
    )


class RowTable(NamedTuple):
    """Where the keys of a dispatch's rows are in one layer.

    Attributes:
        page_table: [B, P] int32.
        has_gaps: Whether entries may be negative, for missing pages. Static.
    """

    page_table: jax.Array
    has_gaps: bool = False


def gather_contiguous_kv(
    contiguous_kv: ContiguousKV,
    kv: Sequence[LayerKV],
    tables: Sequence[RowTable],
    kv_lens_B: jax.Array,
    end: jax.Array,
    num_ready: jax.Array,
) -> ContiguousKV:
    """Copies the keys and values of a dispatch's rows out of their pages.

    Args:
        contiguous_kv: Rows from B on stay unchanged. Donate it.
        kv: The pages of each layer.
        tables: Where the keys are, for each layer.
        kv_lens_B: [B] int32, tokens in the pages; what follows them becomes 0.
        end: Scalar int32; chunks up to this token are copied, later ones stay unchanged.
        num_ready: Scalar int32; this many chunks are ready already, and stay unchanged.
    """

    def body(chunk: jax.Array, contiguous_kv: ContiguousKV) -> ContiguousKV:
        return tuple(
            _gather_chunk(contiguous, layer, table, kv_lens_B, chunk)
            for contiguous, layer, table in zip(contiguous_kv, kv, tables, strict=True)
        )

    return lax.fori_loop(num_ready, (end + CHUNK - 1) // CHUNK, body, contiguous_kv)


def load_chunk(
    pages: jax.Array,
    page_table_BP: jax.Array,
    kv_lens_B: jax.Array,
    chunk: jax.Array,
    *,
    has_gaps: bool = False,
) -> jax.Array:
    """Loads a chunk of each row's keys or values from their pages, [B, K, CHUNK, h].

    Positions without a token become 0, since memory there may hold anything, NaN included. With
    `has_gaps`, so do the pages of negative entries.
    """
    batch, size = page_table_BP.shape[0], pages.shape[2]
    gaps_BP = page_table_BP < 0
    if has_gaps:
        page_table_BP = jnp.where(gaps_BP, 0, page_table_BP)
    at = chunk * CHUNK + jnp.arange(CHUNK, dtype=jnp.int32)
    if CHUNK % size:
        last = page_table_BP.shape[1] - 1
        ids = jnp.take(page_table_BP, jnp.minimum(at // size, last), axis=1)
        found = pages.at[ids, :, at[None] % size].get(mode="promise_in_bounds").swapaxes(1, 2)
    else:  # whole pages: runs of memory
        count = CHUNK // size
        table = jnp.pad(page_table_BP, ((0, 0), (0, -page_table_BP.shape[1] % count)))
        ids = lax.dynamic_slice_in_dim(table, chunk * count, count, axis=1)
        found = pages.at[ids].get(mode="promise_in_bounds").swapaxes(1, 2)
        found = found.reshape(batch, found.shape[1], CHUNK, -1)
    exists_BC = at[None] < kv_lens_B[:, None]
    if has_gaps:
        places = jnp.minimum(at // size, page_table_BP.shape[1] - 1)
        exists_BC &= ~jnp.take(gaps_BP, places, axis=1)
    return jnp.where(exists_BC[:, None, :, None], found, jnp.zeros((), found.dtype))


def _gather_chunk(
    contiguous: LayerContiguousKV,
    layer: LayerKV,
    table: RowTable,
    kv_lens_B: jax.Array,
    chunk: jax.Array,
) -> LayerContiguousKV:
    ids, has_gaps = table
    k, v = (load_chunk(x, ids, kv_lens_B, chunk, has_gaps=has_gaps) for x in layer)
    lead = k.shape[:2]
    k = k.reshape(*lead, CHUNK // LANES, LANES, -1).swapaxes(-2, -1)
    v = v.reshape(*lead, CHUNK, -1, LANES).swapaxes(-3, -2)
    # All of one type, also where Python's integers become 64-bit ones.
    place = (chunk, *[np.int32(0)] * 5)
    return LayerContiguousKV(
        lax.dynamic_update_slice(contiguous.k, k[None], place),
        lax.dynamic_update_slice(contiguous.v, v[None], place),
    )


def write_contiguous_kv(
    contiguous: LayerContiguousKV,
    k: jax.Array,
    v: jax.Array,
    positions_B: jax.Array,
    is_used_B: jax.Array,
) -> LayerContiguousKV:
    """Writes one token's K and V [B, K, h] to each used row, at its position [B]."""
    num_chunks = contiguous.k.shape[0]
    chunk = jnp.where(is_used_B, positions_B // CHUNK, num_chunks)
    row = jnp.arange(positions_B.shape[0], dtype=jnp.int32)
    key = positions_B % CHUNK
    lanes = v.reshape(*v.shape[:2], -1, LANES)
    return LayerContiguousKV(
        contiguous.k.at[chunk, row, :, key // LANES, :, key % LANES].set(k, mode="drop"),
        contiguous.v.at[chunk, row, :, :, key].set(lanes, mode="drop"),
    )
