"""The attention backend "xla": one loop over the keys. Shape legend: that of `attention.base`."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sgljax_engine.attention.base import (
    MASKED,
    AttentionOptions,
    BlockTables,
    NewTokens,
    attend_to_tokens,
)
from sgljax_engine.cache.kv_pages import LayerKV, write_kv
from sgljax_engine.kernels.dtypes import computed_dtype
from sgljax_engine.layers.basic import soft_cap

_KEYS_PER_STEP = 64


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
    def start(
        cls, shape: tuple[int, ...], head_dim: int, sinks: jax.Array | None = None
    ) -> _Softmax:
        """With the keys that every row sees: none, or the sinks, which broadcast to the shape."""
        acc = jnp.zeros((*shape, head_dim), jnp.float32)
        if sinks is not None:
            return cls(jnp.broadcast_to(sinks, shape), jnp.ones(shape, jnp.float32), acc)
        return cls(
            peak=jnp.full(shape, MASKED, jnp.float32),
            total=jnp.zeros(shape, jnp.float32),
            acc=acc,
        )

    def add(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        seen: jax.Array,
        softcap: float | None,
        scales: tuple[jax.Array, jax.Array] | None = None,
    ) -> _Softmax:
        """Adds S keys: q [..., R, H], k and v [..., S, H], seen [..., R, S].

        `scales` [..., S] are by what k and v are multiplied.
        """
        scores = jnp.einsum("...rh,...sh->...rs", q, k, preferred_element_type=jnp.float32)
        if scales is not None:
            scores = scores * scales[0][..., None, :]
        scores = jnp.where(seen, soft_cap(scores, softcap), MASKED)
        peak = jnp.maximum(self.peak, jnp.max(scores, axis=-1))
        # Masked again, so that a row that has seen no key yet adds nothing.
        weights = jnp.where(seen, jnp.exp(scores - peak[..., None]), 0.0)
        shrink = jnp.exp(self.peak - peak)
        factors = weights if scales is None else weights * scales[1][..., None, :]
        new = jnp.einsum(
            "...rs,...sh->...rh", factors.astype(v.dtype), v, preferred_element_type=jnp.float32
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
    dtype = computed_dtype(q_NQDh.dtype, layer.k.dtype)
    q = (q_NQDh.astype(jnp.float32) * scale).astype(dtype)
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
    sinks: jax.Array | None = None,
) -> jax.Array:
    """A loop over the context, all blocks together in each step.

    A step takes `_KEYS_PER_STEP` keys, or a page if that is more. The loop ends at the longest
    context in the batch, so its cost does not depend on the width of the page table; with a window
    it begins at the oldest key that a query of the batch sees.
    """
    window = options.sliding_window
    q_NKRh = _group_queries(q_NQDh, layer, options.scale)
    num_blocks, num_kv_heads, num_rows, head_dim = q_NKRh.shape
    num_queries = q_NQDh.shape[1]
    group = num_rows // num_queries
    count = max(_KEYS_PER_STEP // layer.page_size, 1)
    keys_per_step = count * layer.page_size
    page_table = _pad_tables(tables, count)
    num_loops = (jnp.max(tables.kv_lens) + keys_per_step - 1) // keys_per_step
    # [N, 1, R]: rows of a block are its queries, repeated for each query head of the group.
    positions = jnp.tile(tables.positions, (1, group))[:, None]

    def load(pages: jax.Array, ids: jax.Array) -> jax.Array:
        taken = pages.at[ids].get(mode="promise_in_bounds").swapaxes(1, 2)
        return taken.reshape(num_blocks, num_kv_heads, keys_per_step, *pages.shape[3:])

    def body(carry: tuple[jax.Array, _Softmax]) -> tuple[jax.Array, _Softmax]:
        step, softmax = carry
        ids = lax.dynamic_slice_in_dim(page_table, step * count, count, axis=1)
        key_pos = step * keys_per_step + jnp.arange(keys_per_step, dtype=jnp.int32)
        exists_NS = key_pos[None, :] < tables.kv_lens[:, None]
        seen = (key_pos[None, None, None] <= positions[..., None]) & exists_NS[:, None, None]
        if window is not None:
            seen &= key_pos[None, None, None] > positions[..., None] - window
        # Memory beyond kv_lens may hold anything, NaN included, and 0 * NaN is NaN.
        k = load(layer.k, ids)
        v = k if layer.v is None else load(layer.v, ids)
        v = jnp.where(exists_NS[:, None, :, None], v, 0)
        scales = None
        if layer.scales is not None:
            k, v = k.astype(q_NKRh.dtype), v.astype(q_NKRh.dtype)
            k_scale, v_scale = (load(each, ids) for each in layer.scales)
            scales = k_scale, jnp.where(exists_NS[:, None], v_scale, 0)
        elif num_queries > 1:
            # Nor may a later token that overflowed reach the queries before it: its key is NaN
            # instead, which masks hide.
            is_finite = jnp.all(jnp.isfinite(v), axis=-1, keepdims=True)
            k, v = jnp.where(is_finite, k, jnp.nan), jnp.where(is_finite, v, 0)
        softmax = softmax.add(q_NKRh, k, v, seen, options.logit_softcap, scales)
        return step + 1, softmax

    first = _first_step(tables, window, keys_per_step)
    if sinks is not None:  # [K, R]: rows are queries, repeated for each query head of the group
        sinks = jnp.repeat(sinks.reshape(num_kv_heads, group), num_queries, axis=1)
    start = (first, _Softmax.start(q_NKRh.shape[:3], head_dim, sinks))
    _, softmax = lax.while_loop(lambda carry: carry[0] < num_loops, body, start)
    return _ungroup(softmax.result(), q_NQDh)


@dataclasses.dataclass(frozen=True)
class XlaAttention:
    name: str = "xla"
    heads_per_row: int = 1
    takes_projections: bool = False
    verifies_blocks: bool = True
    shares_prompts: bool = False

    def attend(
        self,
        q_NQDh: jax.Array,
        layer: LayerKV,
        tables: BlockTables,
        options: AttentionOptions,
        sinks: jax.Array | None = None,
    ) -> jax.Array:
        return xla_attention(q_NQDh, layer, tables, options, sinks)

    def write_and_attend(
        self,
        new: NewTokens,
        layer: LayerKV,
        tables: BlockTables,
        slots: jax.Array,
        options: AttentionOptions,
    ) -> tuple[jax.Array, LayerKV]:
        layer = write_kv(layer, new.k, new.v, slots)
        return attend_to_tokens(self, new.q, layer, tables, options, new.sinks), layer
