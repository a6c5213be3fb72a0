"""Attention in portable JAX: one loop over the keys, or one per tile of query blocks.

Shape legend: that of `attention.base`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sgljax_engine.attention.base import MASKED, AttentionOptions, BlockTables, map_tiles
from sgljax_engine.cache.kv_pages import LayerKV
from sgljax_engine.layers.basic import soft_cap

_KEYS_PER_STEP = 64
_BLOCKS_PER_TILE = 8

_LONG_KEYS_PER_STEP = 256
"""Step for many blocks of one request on a CPU, with products large enough to keep it busy."""


class _Softmax(NamedTuple):
    """Running state of an online softmax over rows of queries.

    The algorithm is that of Milakov and Gimelshein (2018), as used in FlashAttention (Dao et al.,
    2022): `acc / total` is the attention output over the keys so far.

    Shape:
        peak, total: [..., R]; acc: [..., R, H]; float32.
    """

    peak: jax.Array
    total: jax.Array
    acc: jax.Array

    @classmethod
    def start(cls, shape: tuple[int, ...], head_dim: int) -> _Softmax:
        """The state before any key."""
        return cls(
            peak=jnp.full(shape, MASKED, jnp.float32),
            total=jnp.zeros(shape, jnp.float32),
            acc=jnp.zeros((*shape, head_dim), jnp.float32),
        )

    def add(
        self, q: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array, softcap: float | None
    ) -> _Softmax:
        """Adds S keys: q [..., R, H], k and v [..., S, H], seen [..., R, S]."""
        scores = jnp.einsum("...rh,...sh->...rs", q, k, preferred_element_type=jnp.float32)
        scores = jnp.where(seen, soft_cap(scores, softcap), MASKED)
        peak = jnp.maximum(self.peak, jnp.max(scores, axis=-1))
        # Masked again, so that a row that has seen no key yet adds nothing.
        weights = jnp.where(seen, jnp.exp(scores - peak[..., None]), 0.0)
        shrink = jnp.exp(self.peak - peak)
        new = jnp.einsum(
            "...rs,...sh->...rh", weights.astype(v.dtype), v, preferred_element_type=jnp.float32
        )
        total = self.total * shrink + jnp.sum(weights, axis=-1)
        return _Softmax(peak, total, self.acc * shrink[..., None] + new)

    def result(self) -> jax.Array:
        """[..., R, H]; 0 for rows that saw no key."""
        return self.acc / jnp.maximum(self.total, jnp.finfo(jnp.float32).tiny)[..., None]


def _group_queries(q_NQDh: jax.Array, layer: LayerKV, scale: float) -> jax.Array:
    """[N, Q, heads, H] to scaled [N, K, R, H] with R = query heads of a kv head times Q."""
    num_blocks, num_queries, num_heads, head_dim = q_NQDh.shape
    num_kv_heads = layer.k.shape[1]
    q = (q_NQDh.astype(jnp.float32) * scale).astype(layer.k.dtype)
    q = q.reshape(num_blocks, num_queries, num_kv_heads, num_heads // num_kv_heads, head_dim)
    return q.transpose(0, 2, 3, 1, 4).reshape(num_blocks, num_kv_heads, -1, head_dim)


def _ungroup(out_NKRh: jax.Array, like: jax.Array) -> jax.Array:
    """The inverse of `_group_queries`, in the shape and dtype of the queries."""
    num_blocks, num_queries, num_heads, head_dim = like.shape
    num_kv_heads = out_NKRh.shape[1]
    shape = (num_blocks, num_kv_heads, num_heads // num_kv_heads, num_queries, head_dim)
    out = out_NKRh.reshape(shape).transpose(0, 3, 1, 2, 4)
    return out.reshape(like.shape).astype(like.dtype)


def _pad_tables(tables: BlockTables, multiple: int) -> jax.Array:
    table = tables.page_table
    return jnp.pad(table, ((0, 0), (0, -table.shape[1] % multiple)))


def _first_step(tables: BlockTables, window: int | None, keys_per_step: int) -> jax.Array:
    """The first step of the loop with a key that some query of the batch sees."""
    if window is None:
        return jnp.zeros((), jnp.int32)
    first_key = jnp.maximum(tables.positions[:, 0] - window + 1, 0)
    unused = jnp.iinfo(jnp.int32).max
    return jnp.min(jnp.where(tables.kv_lens > 0, first_key, unused)) // keys_per_step


def xla_attention(
    q_NQDh: jax.Array,
    layer: LayerKV,
    tables: BlockTables,
    options: AttentionOptions,
    keys_per_step: int = _KEYS_PER_STEP,
) -> jax.Array:
    """The portable backend: a loop over the context, all blocks together in each step.

    A step takes `keys_per_step` keys, or a page if that is more. The loop ends at the longest
    context in the batch, so its cost does not depend on the width of the page table; with a window
    it begins at the oldest key that a query of the batch sees.
    """
    window = options.sliding_window
    q_NKRh = _group_queries(q_NQDh, layer, options.scale)
    num_blocks, num_kv_heads, num_rows, head_dim = q_NKRh.shape
    num_queries = q_NQDh.shape[1]
    group = num_rows // num_queries
    count = max(keys_per_step // layer.page_size, 1)
    keys_per_step = count * layer.page_size
    page_table = _pad_tables(tables, count)
    num_loops = (jnp.max(tables.kv_lens) + keys_per_step - 1) // keys_per_step
    # [N, 1, R]: rows of a block are its queries, repeated for each query head of the group.
    positions = jnp.tile(tables.positions, (1, group))[:, None]

    def load(pages: jax.Array, ids: jax.Array) -> jax.Array:
        taken = pages.at[ids].get(mode="promise_in_bounds")
        return taken.swapaxes(1, 2).reshape(num_blocks, num_kv_heads, keys_per_step, head_dim)

    def body(carry: tuple[jax.Array, _Softmax]) -> tuple[jax.Array, _Softmax]:
        step, softmax = carry
        ids = lax.dynamic_slice_in_dim(page_table, step * count, count, axis=1)
        key_pos = step * keys_per_step + jnp.arange(keys_per_step, dtype=jnp.int32)
        exists_NS = key_pos[None, :] < tables.kv_lens[:, None]
        seen = (key_pos[None, None, None] <= positions[..., None]) & exists_NS[:, None, None]
        if window is not None:
            seen &= key_pos[None, None, None] > positions[..., None] - window
        # Memory beyond kv_lens may hold anything, NaN included, and 0 * NaN is NaN.
        v = jnp.where(exists_NS[:, None, :, None], load(layer.v, ids), 0)
        k = load(layer.k, ids)
        if num_queries > 1:
            # Nor may a later token that overflowed reach the queries before it: its key is NaN
            # instead, which masks hide.
            is_finite = jnp.all(jnp.isfinite(v), axis=-1, keepdims=True)
            k, v = jnp.where(is_finite, k, jnp.nan), jnp.where(is_finite, v, 0)
        softmax = softmax.add(q_NKRh, k, v, seen, options.logit_softcap)
        return step + 1, softmax

    first = _first_step(tables, window, keys_per_step)
    start = (first, _Softmax.start(q_NKRh.shape[:3], head_dim))
    _, softmax = lax.while_loop(lambda carry: carry[0] < num_loops, body, start)
    return _ungroup(softmax.result(), q_NQDh)


def xla_tiles_attention(
    q_NQDh: jax.Array, layer: LayerKV, tables: BlockTables, options: AttentionOptions
) -> jax.Array:
    """The CPU backend: `xla_attention` over a few blocks at a time, one tile after another.

    A tile's keys fit the caches, and each tile loops only over the keys that its blocks see. But if
    many blocks all belong to one request, its keys are loaded once for all of them.
    """
    num_blocks, num_queries = q_NQDh.shape[:2]

    def one_tile(args: tuple[jax.Array, BlockTables]) -> jax.Array:
        return xla_attention(args[0], layer, args[1], options)

    def in_tiles() -> jax.Array:
        tile = min(num_blocks, _BLOCKS_PER_TILE)
        return map_tiles(one_tile, (q_NQDh, tables), num_blocks, tile)

    def as_one() -> jax.Array:
        merged = BlockTables(
            page_table=tables.page_table[:1],
            positions=tables.positions.reshape(1, -1),
            kv_lens=jnp.max(tables.kv_lens, keepdims=True),
        )
        q = q_NQDh.reshape(1, -1, *q_NQDh.shape[2:])
        out = xla_attention(q, layer, merged, options, _LONG_KEYS_PER_STEP)
        return out.reshape(q_NQDh.shape)

    if num_queries == 1 or num_blocks <= _BLOCKS_PER_TILE:  # decode rows: one per request
        return in_tiles()
    has_same_pages = jnp.all(tables.page_table == tables.page_table[:1], axis=1)
    comes_later = tables.positions[:, 0] >= tables.positions[0, 0]
    is_one = jnp.all((has_same_pages & comes_later) | (tables.kv_lens == 0))
    return lax.cond(is_one, as_one, in_tiles)
