"""Decode attention over `LayerContiguousKV`, the CPU backend.

Products of queries and keys are written term by term, not as a dot: XLA then fuses the slices of
the cache into the arithmetic, reads them in place and vectorises over keys (over head channels for
the values), at the machine's memory bandwidth and on all cores. Dots of this shape (a few queries
against a chunk of keys) would copy their operands and run on one core.

The arithmetic is that of `attention.batch_invariant`. Rows that share their first pages, as in a
GRPO group, read these keys from one of the rows, which takes less memory bandwidth and gives the
same bits.

Shape legend: B rows, t rows of a tile, U units of u neighbouring rows, D query heads, K kv heads,
R query heads of a kv head, h head dim, S keys of a chunk.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sgljax_engine.attention.base import AttentionOptions, map_tiles
from sgljax_engine.attention.batch_invariant import Parts, Softmax, add_keys, first_keys
from sgljax_engine.cache.contiguous_kv import (
    CHUNK,
    LANES,
    ROW_TILE,
    SHARING_UNIT,
    LayerContiguousKV,
)


def shared_keys(page_table_BP: jax.Array, kv_lens_B: jax.Array, page_size: int) -> jax.Array:
    """The number of first keys that each row shares by pages with the first row of its unit.

    Counts whole chunks, attention's smallest step. Valid for a whole dispatch, during which rows
    only gain pages.

    Args:
        page_table_BP: [B, P] int32.
        kv_lens_B: [B] int32, tokens that are in pages before the first step; 0 for unused rows.
        page_size: Tokens of a page.

    Returns:
        [B] int32, equal for all rows of a unit; 0 where fewer than two of them are used.
    """
    num_rows, num_pages = page_table_BP.shape
    padding = -num_rows % SHARING_UNIT
    table_UuP = jnp.pad(page_table_BP, ((0, padding), (0, 0))).reshape(-1, SHARING_UNIT, num_pages)
    lens_Uu = jnp.pad(kv_lens_B, (0, padding)).reshape(-1, SHARING_UNIT)
    used_Uu = lens_Uu > 0
    is_same = jnp.all((table_UuP == table_UuP[:, :1]) | ~used_Uu[..., None], axis=1)
    leading = jnp.cumprod(is_same, axis=1, dtype=jnp.int32)
    num_same = jnp.sum(leading, axis=1, dtype=jnp.int32)
    shortest = jnp.min(jnp.where(used_Uu, lens_Uu, jnp.iinfo(jnp.int32).max), axis=1)
    keys = jnp.minimum(num_same * page_size, shortest) // CHUNK * CHUNK
    # Keys of an unused row are not there to be read.
    keys = jnp.where(used_Uu[:, 0] & (jnp.sum(used_Uu, axis=1) > 1), keys, 0)
    return jnp.repeat(keys, SHARING_UNIT)[:num_rows]


def contiguous_attention(
    q_BDh: jax.Array,
    contiguous: LayerContiguousKV,
    kv_lens_B: jax.Array,
    shared_B: jax.Array,
    options: AttentionOptions,
) -> jax.Array:
    """Attention of each row's newest token over its first `kv_lens` keys.

    Keep rows of similar length together: a tile of rows takes as long as its longest row.

    Args:
        q_BDh: [B, num_heads, head_dim].
        contiguous: The cache, which already holds these tokens' keys and values.
        kv_lens_B: [B] int32; 0 for unused rows.
        shared_B: [B] int32; see `shared_keys`.
        options: Options of the layer's attention.

    Returns:
        [B, num_heads, head_dim] in the queries' dtype; unspecified where `kv_lens` is 0.
    """
    batch, num_heads, head_dim = q_BDh.shape
    num_kv_heads = contiguous.k.shape[2]
    tile = min(batch, ROW_TILE)
    q = q_BDh.astype(jnp.float32) * options.scale
    q = q.reshape(batch, num_kv_heads, num_heads // num_kv_heads, head_dim)
    softcap = options.logit_softcap

    def one_tile(args: tuple[jax.Array, jax.Array, jax.Array, jax.Array]) -> jax.Array:
        q_tKRh, ends_t, shared_t, row_t = args
        source = _Tile(contiguous, row_t[0], tile)
        firsts_t = first_keys(ends_t, options)
        state = Softmax.start(q_tKRh.shape[:-1], source.value_shape)
        if tile % SHARING_UNIT == 0:
            shared_t = jnp.minimum(shared_t, ends_t)
            split = jax.tree.map(_in_units, state)
            limits = _in_units(firsts_t), _in_units(shared_t)
            split = add_keys(split, _in_units(q_tKRh), _Leaders(source), *limits, softcap)
            state = jax.tree.map(_joined, split)
            firsts_t = jnp.maximum(firsts_t, shared_t)
        return add_keys(state, q_tKRh, source, firsts_t, ends_t, softcap).result()

    row_B = jnp.arange(batch, dtype=jnp.int32)
    args = (q, kv_lens_B, shared_B, row_B)
    out = one_tile(args) if batch == tile else map_tiles(one_tile, args, batch, tile)
    return out.reshape(-1, num_heads, head_dim).astype(q_BDh.dtype)


class _Tile(NamedTuple):
    """`size` rows of the cache from `start` on."""

    contiguous: LayerContiguousKV
    start: jax.Array
    size: int

    @property
    def value_shape(self) -> tuple[int, ...]:
        """Channels, split into lanes."""
        return self.contiguous.v.shape[3], LANES

    def keys(self, chunk: jax.Array) -> Parts:
        """The keys of a chunk, float32, by channel."""
        return lambda channel: self._slice(self.contiguous.k, chunk, channel)

    def values(self, chunk: jax.Array) -> Parts:
        """The values of a chunk, float32, by key."""
        return lambda key: self._slice(self.contiguous.v, chunk, key)

    def _slice(self, x: jax.Array, chunk: jax.Array, index: int) -> jax.Array:
        _, _, num_kv_heads, groups, _, width = x.shape
        zero = np.int32(0)  # all of one type, also where Python's integers become 64-bit ones
        place = (chunk, self.start, zero, zero, np.int32(index), zero)
        sizes = (1, self.size, num_kv_heads, groups, 1, width)
        # There are hundreds of these; XLA would take seconds to handle negative indices.
        found = lax.dynamic_slice(x, place, sizes, allow_negative_indices=False)
        return found[0, :, :, None, :, 0].astype(jnp.float32)


class _Leaders(NamedTuple):
    """The keys of each unit's first row, for all rows of the unit."""

    tile: _Tile

    @property
    def value_shape(self) -> tuple[int, ...]:
        """Shape of a value's channels, that of the tile."""
        return self.tile.value_shape

    def keys(self, chunk: jax.Array) -> Parts:
        """The keys of a chunk, float32, by channel."""
        parts = self.tile.keys(chunk)
        return lambda channel: _in_units(parts(channel))[:, :1]

    def values(self, chunk: jax.Array) -> Parts:
        """The values of a chunk, float32, by key."""
        parts = self.tile.values(chunk)
        return lambda key: _in_units(parts(key))[:, :1]


def _in_units(x: jax.Array) -> jax.Array:
    """[t, ...] to [U, u, ...]."""
    return x.reshape(-1, SHARING_UNIT, *x.shape[1:])


def _joined(x: jax.Array) -> jax.Array:
    """[U, u, ...] to [t, ...]."""
    return x.reshape(-1, *x.shape[2:])
