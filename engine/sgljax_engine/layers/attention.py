"""Attention over the paged KV cache.

Every backend implements `PagedAttention`. A batch consists of `N` *blocks* of `Q` query tokens,
each block of one request: prefill cuts its ragged tokens into such blocks, decode uses Q = 1.
So one function serves both.

Shape legend: N blocks, Q queries in a block, K kv heads, G query heads a kv head, H head dim,
S keys in a step of the loop, P pages of a request.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from sgljax_engine.cache.kv_pages import LayerKV
from sgljax_engine.errors import InvalidConfigError, unknown_name_message

_KEYS_PER_STEP = 64
_MASKED = -1e30


class BlockTables(NamedTuple):
    """Where the keys of each query block are.

    Shape:
        page_table: [N, P] int32, ids of the request's pages in order; unused entries are 0.
        positions: [N, Q] int32, position of each query in its request.
        kv_lens: [N] int32, keys that exist, the block's own included; 0 for an unused block.
    """

    page_table: jax.Array
    positions: jax.Array
    kv_lens: jax.Array


class PagedAttention(Protocol):
    """Causal attention of query blocks over their requests' pages."""

    def __call__(
        self, q_NQHd: jax.Array, layer: LayerKV, tables: BlockTables, page_size: int
    ) -> jax.Array:
        """Attends.

        Args:
            q_NQHd: [N, Q, num_heads, head_dim] queries.
            layer: The cache, which already holds the keys and values of these tokens.
            tables: Where each block's keys are.
            page_size: Tokens in a page.

        Returns:
            [N, Q, num_heads, head_dim], in the queries' dtype; unspecified where `kv_lens` is 0.
        """
        ...


def xla_attention(
    q_NQHd: jax.Array, layer: LayerKV, tables: BlockTables, page_size: int
) -> jax.Array:
    """The portable backend: a loop over pages with an online softmax, all blocks together.

    The loop ends at the longest context in the batch, so its cost does not depend on the width
    of the page table. Algorithm: online softmax of Milakov and Gimelshein (2018) as used in
    FlashAttention (Dao et al., 2022). Keys at or beyond `kv_lens` are never used, whatever the
    memory holds.
    """
    num_blocks, num_queries, num_heads, head_dim = q_NQHd.shape
    num_kv_heads = layer.k.shape[1]
    group = num_heads // num_kv_heads
    pages_per_step = min(max(_KEYS_PER_STEP // page_size, 1), tables.page_table.shape[1])
    keys_per_step = pages_per_step * page_size

    k_pages = layer.k.reshape(-1, page_size, num_kv_heads, head_dim)
    v_pages = layer.v.reshape(-1, page_size, num_kv_heads, head_dim)
    page_table = _pad_to_multiple(tables.page_table, pages_per_step)

    q = q_NQHd.astype(jnp.float32) * head_dim**-0.5
    q = q.reshape(num_blocks, num_queries, num_kv_heads, group, head_dim)
    q_NKRh = q.transpose(0, 2, 3, 1, 4).reshape(num_blocks, num_kv_heads, -1, head_dim)
    q_NKRh = q_NKRh.astype(layer.k.dtype)
    rows = group * num_queries
    num_loops = (jnp.max(tables.kv_lens) + keys_per_step - 1) // keys_per_step

    def load(pages: jax.Array, ids: jax.Array) -> jax.Array:
        taken = pages.at[ids].get(mode="promise_in_bounds")
        return taken.reshape(num_blocks, keys_per_step, num_kv_heads, head_dim)

    def body(
        carry: tuple[jax.Array, jax.Array, jax.Array, jax.Array],
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        step, peak, total, acc = carry
        ids = lax.dynamic_slice_in_dim(page_table, step * pages_per_step, pages_per_step, 1)
        key_pos_S = step * keys_per_step + jnp.arange(keys_per_step, dtype=jnp.int32)
        exists_NS = key_pos_S[None, :] < tables.kv_lens[:, None]
        seen_NQS = (key_pos_S[None, None, :] <= tables.positions[:, :, None]) & exists_NS[:, None]
        seen = jnp.broadcast_to(
            seen_NQS[:, None, None],
            (num_blocks, 1, group, num_queries, keys_per_step),
        ).reshape(num_blocks, 1, rows, keys_per_step)
        # Memory beyond kv_lens may hold anything, NaN included, and 0 * NaN is NaN.
        v = jnp.where(exists_NS[:, :, None, None], load(v_pages, ids), 0)
        scores = jnp.einsum(
            "nkrh,nskh->nkrs", q_NKRh, load(k_pages, ids), preferred_element_type=jnp.float32
        )
        scores = jnp.where(seen, scores, _MASKED)
        new_peak = jnp.maximum(peak, jnp.max(scores, axis=-1))
        # Once more, so that a row with no key so far adds nothing.
        weights = jnp.where(seen, jnp.exp(scores - new_peak[..., None]), 0.0)
        shrink = jnp.exp(peak - new_peak)
        acc = acc * shrink[..., None] + jnp.einsum(
            "nkrs,nskh->nkrh", weights.astype(v.dtype), v, preferred_element_type=jnp.float32
        )
        return step + 1, new_peak, total * shrink + jnp.sum(weights, axis=-1), acc

    shape = (num_blocks, num_kv_heads, rows)
    carry = (
        jnp.zeros((), jnp.int32),
        jnp.full(shape, _MASKED, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros((*shape, head_dim), jnp.float32),
    )
    _, _, total, acc = lax.while_loop(lambda c: c[0] < num_loops, body, carry)
    out = acc / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)[..., None]
    out = out.reshape(num_blocks, num_kv_heads, group, num_queries, head_dim)
    return out.transpose(0, 3, 1, 2, 4).reshape(q_NQHd.shape).astype(q_NQHd.dtype)


def _pad_to_multiple(page_table: jax.Array, multiple: int) -> jax.Array:
    return jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % multiple)))


def dense_attention(q_BLNH: jax.Array, k_BLKH: jax.Array, v_BLKH: jax.Array) -> jax.Array:
    """Causal attention within whole sequences, without a cache; used to score given tokens.

    Shape:
        q: [B, L, num_heads, head_dim]; k, v: [B, L, num_kv_heads, head_dim]; as q returned.
    """
    batch, length, num_heads, head_dim = q_BLNH.shape
    num_kv_heads = k_BLKH.shape[2]
    q = q_BLNH.reshape(batch, length, num_kv_heads, num_heads // num_kv_heads, head_dim)
    scores = jnp.einsum("blkgh,bskh->bkgls", q, k_BLKH, preferred_element_type=jnp.float32)
    causal = jnp.tril(jnp.ones((length, length), bool))
    scores = jnp.where(causal[None, None, None], scores * head_dim**-0.5, _MASKED)
    weights = jax.nn.softmax(scores, axis=-1).astype(v_BLKH.dtype)
    return jnp.einsum("bkgls,bskh->blkgh", weights, v_BLKH).reshape(q_BLNH.shape)


BACKENDS: dict[str, PagedAttention] = {"xla": xla_attention}
"""Paged attention implementations by name."""


def get_backend(name: str) -> PagedAttention:
    """The backend of that name; "auto" picks one; an unknown name raises InvalidConfigError."""
    if name == "auto":
        return xla_attention
    if name not in BACKENDS:
        raise InvalidConfigError(unknown_name_message("attention_backend", name, BACKENDS))
    return BACKENDS[name]
