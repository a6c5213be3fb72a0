"""Batch-invariant attention: the arithmetic of a query does not depend on the rest of the batch.

Scores are summed over channels one by one, and values over keys one by one, in the order of their
positions. Even and odd ones have separate sums, so that a CPU adds to one while it waits for the
other. An online softmax runs over chunks of `CHUNK` keys that begin at multiples of it. All of this
is elementwise over queries, heads and batch: there is no matrix product whose blocking could change
with the batch shape, and no reduction in an order of the compiler's choice. So a query has the same
bits whatever else is in the batch, in decode and in prefill, and whichever pages hold its keys.

Rows of decode tokens (`attention.contiguous`) and blocks of pages (`ordered_attention`) differ only
in where they read keys. Once a query has seen a key, hidden keys add exact zeros; what they add
before that is multiplied by an exact zero at the first key that it sees.

Shape legend: D query heads, K kv heads, R query heads of a kv head, h head dim, S keys of a chunk,
L lanes, N blocks, Q queries of a block; `lead` are the axes of queries.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from sgljax_engine.attention.base import (
    MASKED,
    AttentionOptions,
    BlockTables,
    PagedAttention,
    map_tiles,
)
from sgljax_engine.cache.contiguous_kv import CHUNK, LANES, load_chunk
from sgljax_engine.cache.kv_pages import LayerKV
from sgljax_engine.layers.basic import soft_cap

_QUERIES_PER_TILE = 16

Parts = Callable[[int], jax.Array]
"""One channel of a chunk's keys [*lead, K, 1, S // L, L], or one key's values [*lead, K, 1, ...].

`lead` equals or broadcasts to that of the queries.
"""


class KeySource(Protocol):
    """Source of the keys and values of a tile of queries."""

    @property
    def value_shape(self) -> tuple[int, ...]:
        """Shape of the channels of a value."""
        ...

    def keys(self, chunk: jax.Array) -> Parts:
        """The keys of a chunk, float32, by channel."""
        ...

    def values(self, chunk: jax.Array) -> Parts:
        """The values of a chunk, float32, by key; finite where no key is."""
        ...


class Softmax(NamedTuple):
    """State of attention for some queries: an online softmax over the keys so far.

    Shape:
        peak: [*lead, K, R]; total: [*lead, K, R, L], by lane; acc: [*lead, K, R, *value_shape].
        float32.
    """

    peak: jax.Array
    total: jax.Array
    acc: jax.Array

    @classmethod
    def start(cls, shape: tuple[int, ...], value_shape: tuple[int, ...]) -> Softmax:
        """The state before any key, for queries [*lead, K, R]."""
        return cls(
            peak=jnp.full(shape, MASKED, jnp.float32),
            total=jnp.zeros((*shape, LANES), jnp.float32),
            acc=jnp.zeros((*shape, *value_shape), jnp.float32),
        )

    def result(self) -> jax.Array:
        """[*lead, K, R, *value_shape]; unspecified where no key was seen."""
        total = self.total[..., 0]
        for lane in range(1, LANES):
            total = total + self.total[..., lane]
        total = jnp.maximum(total, jnp.finfo(jnp.float32).tiny)
        return self.acc / total.reshape(*total.shape, *[1] * (self.acc.ndim - total.ndim))


def attend_in_order(
    q: jax.Array, source: KeySource, ends: jax.Array, options: AttentionOptions
) -> jax.Array:
    """Attention of each query over its first `ends` keys.

    Args:
        q: [*lead, K, R, h] float32, scaled.
        source: The keys and values.
        ends: [*lead] int32, keys up to the query's own; 0 for unused queries.
        options: Options of the layer's attention.

    Returns:
        [*lead, K, R, *value_shape] float32; unspecified where `ends` is 0.
    """
    start = Softmax.start(q.shape[:-1], source.value_shape)
    firsts = first_keys(ends, options)
    return add_keys(start, q, source, firsts, ends, options.logit_softcap).result()


def first_keys(ends: jax.Array, options: AttentionOptions) -> jax.Array:
    """The oldest key that each query sees; `ends` as in `attend_in_order`."""
    window = options.sliding_window
    return jnp.zeros_like(ends) if window is None else jnp.maximum(ends - window, 0)


def add_keys(
    state: Softmax,
    q: jax.Array,
    source: KeySource,
    firsts: jax.Array,
    ends: jax.Array,
    softcap: float | None,
) -> Softmax:
    """Adds keys [firsts, ends) of each query to the state, chunk by chunk.

    Args:
        state: State of these queries.
        q: [*lead, K, R, h] float32, scaled.
        source: The keys and values.
        firsts: [*lead] int32.
        ends: [*lead] int32; at most `firsts` where there is nothing to add.
        softcap: See `AttentionOptions.logit_softcap`.
    """
    far = jnp.iinfo(jnp.int32).max
    has_keys = ends > firsts
    first = jnp.min(jnp.where(has_keys, firsts, far)) // CHUNK
    end = (jnp.max(jnp.where(has_keys, ends, 0)) + CHUNK - 1) // CHUNK
    over_values = (..., *[None] * len(source.value_shape))

    def scores(chunk: jax.Array) -> jax.Array:
        keys = source.keys(chunk)
        out = _sum_in_order(
            q[..., channel, None, None] * keys(channel) for channel in range(q.shape[-1])
        )
        key = chunk * CHUNK + jnp.arange(CHUNK, dtype=jnp.int32)
        key = key.reshape((1,) * ends.ndim + (-1, LANES))
        seen = (key < ends[..., None, None]) & (key >= firsts[..., None, None])
        seen = seen[..., None, None, :, :]
        return jnp.where(seen, soft_cap(out, softcap), MASKED)

    def no_scores(_: jax.Array) -> jax.Array:
        return jnp.zeros((*q.shape[:-1], CHUNK // LANES, LANES), jnp.float32)

    def body(carry: tuple[jax.Array, Softmax]) -> tuple[jax.Array, Softmax]:
        chunk, state = carry
        # A branch returns its result in memory. Without it, the compiler would fuse the scores into
        # both of their uses and compute them twice. It cannot see that the condition always holds.
        found = lax.cond(chunk < end, scores, no_scores, chunk)
        peak = jnp.maximum(state.peak, jnp.max(found, axis=(-2, -1)))
        # Without lanes, since LLVM would vectorise over groups of lanes and gather adjacent
        # elements.
        weights = jnp.exp(found.reshape(*peak.shape, CHUNK) - peak[..., None])
        shrink = jnp.exp(state.peak - peak)
        values = source.values(chunk)
        acc = _sum_in_order(weights[..., key][over_values] * values(key) for key in range(CHUNK))
        total = state.total * shrink[..., None]
        for lane in range(0, CHUNK, LANES):
            total = total + weights[..., lane : lane + LANES]
        return chunk + 1, Softmax(peak, total, state.acc * shrink[over_values] + acc)

    return lax.while_loop(lambda carry: carry[0] < end, body, (first, state))[1]


def _sum_in_order(terms: Iterable[jax.Array]) -> jax.Array:
    """The sum of the even terms, one by one, plus that of the odd ones."""
    terms = list(terms)
    even_and_odd = (
        functools.reduce(operator.add, part) for part in (terms[::2], terms[1::2]) if part
    )
    return functools.reduce(operator.add, even_and_odd)


class _PagedKeys(NamedTuple):
    """The keys of blocks, read from their pages chunk by chunk.

    Shape:
        page_table: [N, P] int32; kv_lens: [N] int32.
    """

    layer: LayerKV
    page_table: jax.Array
    kv_lens: jax.Array

    @property
    def value_shape(self) -> tuple[int, ...]:
        """One contiguous run of channels."""
        return self.layer.v.shape[-1:]

    def keys(self, chunk: jax.Array) -> Parts:
        """The keys of a chunk, float32, by channel."""
        # Transposed, so that a channel's keys are adjacent. Computed once, not at each use.
        loaded = lax.optimization_barrier(self._load(self.layer.k, chunk).swapaxes(-2, -1))
        shaped = loaded.reshape(*loaded.shape[:-1], CHUNK // LANES, LANES)
        return lambda channel: shaped[:, None, :, None, channel].astype(jnp.float32)

    def values(self, chunk: jax.Array) -> Parts:
        """The values of a chunk, float32, by key."""
        loaded = lax.optimization_barrier(self._load(self.layer.v, chunk))
        return lambda key: loaded[:, None, :, None, key].astype(jnp.float32)

    def _load(self, pages: jax.Array, chunk: jax.Array) -> jax.Array:
        return load_chunk(pages, self.page_table, self.kv_lens, chunk)


def ordered_attention(
    q_NQDh: jax.Array, layer: LayerKV, tables: BlockTables, options: AttentionOptions
) -> jax.Array:
    """Attention of blocks over their pages, all blocks together; for accelerators."""
    num_heads, head_dim = q_NQDh.shape[2:]
    num_kv_heads = layer.k.shape[1]
    q = q_NQDh.astype(jnp.float32) * options.scale
    q = q.reshape(*q.shape[:2], num_kv_heads, num_heads // num_kv_heads, head_dim)
    ends = jnp.minimum(tables.positions + 1, tables.kv_lens[:, None])
    source = _PagedKeys(layer, tables.page_table, tables.kv_lens)
    out = attend_in_order(q, source, ends, options)
    return out.reshape(q_NQDh.shape).astype(q_NQDh.dtype)


def ordered_tiles_attention(
    q_NQDh: jax.Array, layer: LayerKV, tables: BlockTables, options: AttentionOptions
) -> jax.Array:
    """`ordered_attention` over a few queries at a time, one tile after another; for CPUs."""
    num_blocks, num_queries = q_NQDh.shape[:2]
    tile = min(num_blocks, max(_QUERIES_PER_TILE // num_queries, 1))

    def one_tile(args: tuple[jax.Array, BlockTables]) -> jax.Array:
        return ordered_attention(args[0], layer, args[1], options)

    return map_tiles(one_tile, (q_NQDh, tables), num_blocks, tile)


def ordered_backend(platform: str) -> PagedAttention:
    """The ordered backend for a JAX platform."""
    return ordered_tiles_attention if platform == "cpu" else ordered_attention
