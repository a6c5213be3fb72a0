"""Decode attention over `LayerRows`, the CPU backend.

Products of queries and keys are written out term by term, not as a dot: XLA then fuses the slices
of the cache into the arithmetic, reads them where they lie and vectorises over keys (over head
channels for the values), at the machine's memory bandwidth and on all cores. Dots of this shape
(a few queries against a chunk of keys) would copy their operands and run on one core.

Shape legend: B rows, t rows of a tile, D query heads, K kv heads, R query heads of a kv head, h
head dim, S keys of a chunk.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sgljax_engine.cache.kv_rows import CHUNK, LANES, ROW_TILE, LayerRows
from sgljax_engine.layers.attention import MASKED, AttentionOptions
from sgljax_engine.layers.basic import soft_cap


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

    def split(x: jax.Array) -> jax.Array:
        padded = jnp.pad(x, ((0, -batch % tile), *((0, 0) for _ in x.shape[1:])))
        return padded.reshape(-1, tile, *x.shape[1:])

    def one_tile(args: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        q_tKRh, kv_lens_t, first_row = args
        return _attend_tile(q_tKRh, _Tile(rows, first_row, tile), kv_lens_t, options)

    num_tiles = -(-batch // tile)
    starts = jnp.arange(num_tiles, dtype=jnp.int32) * tile
    if num_tiles == 1:
        out = one_tile((q, kv_lens_B, starts[0]))
    else:
        out = lax.map(one_tile, (split(q), split(kv_lens_B), starts))
    return out.reshape(-1, num_heads, head_dim)[:batch].astype(q_BDh.dtype)


class _Tile(NamedTuple):
    """`size` rows of the cache from `start` on."""

    rows: LayerRows
    start: jax.Array
    size: int

    def keys(self, chunk: jax.Array, channel: int) -> jax.Array:
        """One channel of a chunk's keys, [t, K, 1, S]."""
        return self._slice(self.rows.k, chunk, channel)

    def values(self, chunk: jax.Array, key: int) -> jax.Array:
        """One key's values, [t, K, 1, h]."""
        return self._slice(self.rows.v, chunk, key)

    def _slice(self, x: jax.Array, chunk: jax.Array, index: int) -> jax.Array:
        _, _, num_kv_heads, groups, _, width = x.shape
        zero = np.int32(0)  # all of one type, also where Python's integers become 64-bit ones
        place = (chunk, self.start, zero, zero, np.int32(index), zero)
        sizes = (1, self.size, num_kv_heads, groups, 1, width)
        # There are hundreds of these: handling negative indices would take XLA seconds.
        found = lax.dynamic_slice(x, place, sizes, allow_negative_indices=False)
        return found[0, :, :, None, :, 0].astype(jnp.float32)


class _State(NamedTuple):
    """A loop over chunks with an online softmax, whose scores are computed one chunk ahead.

    What a loop carries is in memory. Computed where they are used, the scores would be fused into
    each of their two uses: twice the work.
    """

    chunk: jax.Array
    scores: jax.Array
    peak: jax.Array
    total: jax.Array
    acc: jax.Array


def _attend_tile(
    q_tKRh: jax.Array, tile: _Tile, kv_lens_t: jax.Array, options: AttentionOptions
) -> jax.Array:
    """[t, K, R, h] float32."""
    window = options.sliding_window
    first_key = jnp.zeros_like(kv_lens_t)
    if window is not None:
        first_key = jnp.maximum(kv_lens_t - window, 0)
    in_use = kv_lens_t > 0
    far = jnp.iinfo(jnp.int32).max
    first = jnp.min(jnp.where(in_use, first_key, far)) // CHUNK
    end = (jnp.max(kv_lens_t) + CHUNK - 1) // CHUNK

    def scores(chunk: jax.Array) -> jax.Array:
        out = jnp.zeros((), jnp.float32)
        for channel in range(q_tKRh.shape[-1]):
            out = out + q_tKRh[..., channel, None, None] * tile.keys(chunk, channel)
        key = (chunk * CHUNK + jnp.arange(CHUNK, dtype=jnp.int32)).reshape(-1, LANES)
        seen = (key[None] < kv_lens_t[:, None, None]) & (key[None] >= first_key[:, None, None])
        return jnp.where(seen[:, None, None], soft_cap(out, options.logit_softcap), MASKED)

    def body(state: _State) -> _State:
        peak = jnp.maximum(state.peak, jnp.max(state.scores, axis=(-2, -1)))
        weights = jnp.exp(state.scores - peak[..., None, None])
        shrink = jnp.exp(state.peak - peak)
        acc = state.acc * shrink[..., None, None]
        for key in range(CHUNK):
            acc = acc + weights[..., key // LANES, key % LANES, None, None] * tile.values(
                state.chunk, key
            )
        return _State(
            chunk=state.chunk + 1,
            scores=lax.cond(state.chunk + 1 < end, scores, lambda _: state.scores, state.chunk + 1),
            peak=peak,
            total=state.total * shrink + jnp.sum(weights, axis=(-2, -1)),
            acc=acc,
        )

    shape = q_tKRh.shape[:3]
    start = _State(
        chunk=first,
        scores=scores(first),
        peak=jnp.full(shape, MASKED, jnp.float32),
        total=jnp.zeros(shape, jnp.float32),
        acc=jnp.zeros((*shape, q_tKRh.shape[-1] // LANES, LANES), jnp.float32),
    )
    state = lax.while_loop(lambda state: state.chunk < end, body, start)
    return state.acc / jnp.maximum(state.total, jnp.finfo(jnp.float32).tiny)[..., None, None]
