"""Decode attention over `LayerRows`, the CPU backend.

Products of queries and keys are written out term by term, not as a dot: XLA then fuses the slices
of the cache into the arithmetic, reads them where they lie and vectorises over keys (over head
channels for the values), at the machine's memory bandwidth and on all cores. Dots of this shape
(a few queries against a chunk of keys) would copy their operands and run on one core.

The arithmetic is that of `layers.ordered_attention`.

Shape legend: B rows, t rows of a tile, D query heads, K kv heads, R query heads of a kv head, h
head dim, S keys of a chunk.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sgljax_engine.cache.kv_rows import LANES, ROW_TILE, LayerRows
from sgljax_engine.layers.attention import AttentionOptions, map_tiles
from sgljax_engine.layers.ordered_attention import Parts, attend_in_order


def row_attention(
    q_BDh: jax.Array, rows: LayerRows, kv_lens_B: jax.Array, options: AttentionOptions
) -> jax.Array:
    """Attention of each row's newest token over its first `kv_lens` keys.

    Rows with neighbours of like length are cheap: a tile of rows goes as far as its longest.

    Args:
        q_BDh: [B, num_heads, head_dim].
        rows: The cache, which already holds these tokens' keys and values.
        kv_lens_B: [B] int32; 0 for unused rows.
        options: How the layer attends.

    Returns:
        [B, num_heads, head_dim] in the queries' dtype; unspecified where `kv_lens` is 0.
    """
    batch, num_heads, head_dim = q_BDh.shape
    num_kv_heads = rows.k.shape[2]
    tile = min(batch, ROW_TILE)
    q = q_BDh.astype(jnp.float32) * options.scale
    q = q.reshape(batch, num_kv_heads, num_heads // num_kv_heads, head_dim)

    def one_tile(args: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        q_tKRh, kv_lens_t, row_t = args
        return attend_in_order(q_tKRh, _Tile(rows, row_t[0], tile), kv_lens_t, options)

    row_B = jnp.arange(batch, dtype=jnp.int32)
    if batch == tile:
        out = one_tile((q, kv_lens_B, row_B))
    else:
        out = map_tiles(one_tile, (q, kv_lens_B, row_B), batch, tile)
    return out.reshape(-1, num_heads, head_dim).astype(q_BDh.dtype)


class _Tile(NamedTuple):
    """`size` rows of the cache from `start` on."""

    rows: LayerRows
    start: jax.Array
    size: int

    @property
    def value_shape(self) -> tuple[int, ...]:
        """Channels in lanes."""
        return self.rows.v.shape[3], LANES

    def keys(self, chunk: jax.Array) -> Parts:
        """See `KeySource`."""
        return lambda channel: self._slice(self.rows.k, chunk, channel)

    def values(self, chunk: jax.Array) -> Parts:
        """See `KeySource`."""
        return lambda key: self._slice(self.rows.v, chunk, key)

    def _slice(self, x: jax.Array, chunk: jax.Array, index: int) -> jax.Array:
        _, _, num_kv_heads, groups, _, width = x.shape
        zero = np.int32(0)  # all of one type, also where Python's integers become 64-bit ones
        place = (chunk, self.start, zero, zero, np.int32(index), zero)
        sizes = (1, self.size, num_kv_heads, groups, 1, width)
        # There are hundreds of these: handling negative indices would take XLA seconds.
        found = lax.dynamic_slice(x, place, sizes, allow_negative_indices=False)
        return found[0, :, :, None, :, 0].astype(jnp.float32)
