"""Attention over the paged KV cache.

Every backend implements `PagedAttention`. A batch consists of `N` *blocks* of `Q` query tokens,
each block of one request: prefill cuts its ragged tokens into such blocks, decode uses Q = 1.
So one function serves both.

Shape legend: N blocks, Q queries in a block, D query heads, K kv heads, R rows of queries that
share a kv head, h head dim, S keys in a step of the loop, P pages of a request.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from sgljax_engine.cache.kv_pages import LayerKV, write_kv

T = TypeVar("T")

MASKED = -1e30


class AttentionOptions(NamedTuple):
    """Options of one layer's attention. Static and hashable: programs are compiled for them.

    Attributes:
        scale: Multiplies the products of queries and keys.
        sliding_window: A query sees this many newest keys, its own included; None sees all.
        logit_softcap: Scaled products s become `cap * tanh(s / cap)` (Gemma 2, 2024); None for
            no cap.
    """

    scale: float
    sliding_window: int | None = None
    logit_softcap: float | None = None


class BlockTables(NamedTuple):
    """Pages of the keys of each query block.

    Shape: page_table: [N, P] int32, ids of the request's pages in order; unused entries are 0.
        positions: [N, Q] int32, position of each query in its request; no used query of a block
        comes before the block's first. kv_lens: [N] int32, keys that exist, the block's own
        included; 0 for an unused block.
    """

    page_table: jax.Array
    positions: jax.Array
    kv_lens: jax.Array


class PagedAttention(Protocol):
    """Causal attention of query blocks over their requests' pages.

    Keys at or beyond `kv_lens` must never be used, whatever the memory holds; nor must keys that
    have left the window.
    """

    def __call__(
        self, q_NQDh: jax.Array, layer: LayerKV, tables: BlockTables, options: AttentionOptions
    ) -> jax.Array:
        """Attends.

        Args:
            q_NQDh: [N, Q, num_heads, head_dim] queries.
            layer: The cache, which already holds the keys and values of these tokens.
            tables: Where each block's keys are.
            options: How the layer attends.

        Returns:
            [N, Q, num_heads, head_dim], in the queries' dtype; unspecified where `kv_lens` is 0.
        """
        ...


WriteKV = Callable[[LayerKV, jax.Array, jax.Array, jax.Array], LayerKV]
"""`write_kv(layer, k[T, K, h], v[T, K, h], slots[T]) -> layer`, see `kv_pages.write_kv`."""


class DecodeAttention(Protocol):
    """Attention of one token per row; writes the token's key and value to its page first."""

    def __call__(
        self,
        q_BDh: jax.Array,
        k_BKh: jax.Array,
        v_BKh: jax.Array,
        layer: LayerKV,
        tables: BlockTables,
        options: AttentionOptions,
    ) -> tuple[jax.Array, LayerKV]:
        """Attends.

        Args:
            q_BDh: [B, num_heads, head_dim] queries.
            k_BKh: [B, num_kv_heads, head_dim] keys of the same tokens.
            v_BKh: Their values.
            layer: The cache without these tokens.
            tables: Tables for blocks of one token; the token is the last of its `kv_lens`.
            options: How the layer attends.

        Returns:
            [B, num_heads, head_dim], unspecified where `kv_lens` is 0, and the cache with these
            tokens.
        """
        ...


class Prologue(NamedTuple):
    """What makes queries and keys of projections.

    Shape: sin, cos: [T, 1, h // 2] float32, see `layers.rope`. q_norm, k_norm: [h], weights of the
        norms of each head before the rotary embedding; None without.

    Attributes:
        eps: Of these norms. Static.
        offset: Added to their weights. Static.
    """

    sin: jax.Array
    cos: jax.Array
    q_norm: jax.Array | None = None
    k_norm: jax.Array | None = None
    eps: float = 0.0
    offset: float = 0.0


class Projections(NamedTuple):
    """What attention is made of, as projections give it.

    Shape: q: [T, num_heads, h]; k, v: [T, num_kv_heads, h].

    Attributes:
        prologue: What makes queries and keys of them.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    prologue: Prologue

    def of_tokens(self, places: jax.Array) -> Projections:
        """Those of the tokens at some places."""
        q, k, v, prologue = self
        q, k, v, sin, cos = (x[places] for x in (q, k, v, prologue.sin, prologue.cos))
        return Projections(q, k, v, prologue._replace(sin=sin, cos=cos))


class PrepareHeads(Protocol):
    """What makes queries and keys of projections, with the same bits in any batch."""

    def __call__(
        self, new: Projections, layer: LayerKV | None, slots: jax.Array | None
    ) -> tuple[jax.Array, LayerKV]:
        """Prepares tokens.

        Args:
            new: The tokens' projections.
            layer: The cache without these tokens; None to write none.
            slots: [T] int32, as for `WriteKV`; None without a cache.

        Returns:
            The queries, and the cache with these tokens; without a cache, keys and values as [T,
            num_kv_heads, head_dim].
        """
        ...


class ProjectionAttention(Protocol):
    """Attention of one token per row from its projections on."""

    def __call__(
        self, new: Projections, layer: LayerKV, tables: BlockTables, options: AttentionOptions
    ) -> tuple[jax.Array, LayerKV]:
        """As `DecodeAttention`, of projections."""
        ...


class PrefillAttention(Protocol):
    """Attention of query blocks; writes their keys and values to their pages first."""

    def __call__(
        self,
        q_NQDh: jax.Array,
        k_NQKh: jax.Array,
        v_NQKh: jax.Array,
        layer: LayerKV,
        tables: BlockTables,
        options: AttentionOptions,
    ) -> tuple[jax.Array, LayerKV]:
        """Attends.

        Args:
            q_NQDh: [N, Q, num_heads, head_dim] queries.
            k_NQKh: [N, Q, num_kv_heads, head_dim] keys of the same tokens.
            v_NQKh: Their values.
            layer: The cache without these tokens.
            tables: Where each block's keys are. Positions of a block follow each other, and a
                block may use keys of blocks before it.
            options: How the layer attends.

        Returns:
            [N, Q, num_heads, head_dim], unspecified for tokens at or beyond `kv_lens`, and the
            cache with these tokens.
        """
        ...


def map_tiles(function: Callable[[T], jax.Array], args: T, size: int, tile: int) -> jax.Array:
    """Applies `function` to tiles of a leading axis of `size`, one after another; padding is 0."""

    def split(x: jax.Array) -> jax.Array:
        padded = jnp.pad(x, ((0, -size % tile), *((0, 0) for _ in x.shape[1:])))
        return padded.reshape(-1, tile, *x.shape[1:])

    out = lax.map(function, jax.tree.map(split, args))
    return out.reshape(-1, *out.shape[2:])[:size]


ContiguousKV = Literal["never", "if_it_fits", "always"]


class FusedAttention(NamedTuple):
    """What an engine with fused products uses instead.

    Attributes:
        attend: Of `AttentionBackend.attend`.
        projections: Of decode, from projections on.
    """

    attend: PagedAttention
    projections: ProjectionAttention


class AttentionBackend(NamedTuple):
    """Functions and facts of a choice of attention.

    Attributes:
        name: Name of `attend`, for reports.
        attend: Attention over pages, for prefill and scoring, and for decode without its own.
        batch_invariant: `attend` for an engine with deterministic sampling.
        decode: Attention that decode uses instead, if any.
        prefill: Attention that prefill uses instead, if any.
        prepare: What is before `batch_invariant`, if it has a kernel.
        fused: Attention of an engine with fused products, if it has its own.
        write_kv: Writes keys and values into pages, for `attend`.
        contiguous_kv: Whether decode copies its rows' keys into contiguous KV
            (`attention.contiguous`).
        contiguous_name: Name of decode attention over contiguous KV, for reports.
        heads_per_row: Kv heads in a row of the pages that `decode` and `prefill` take, see
            `cache.kv_pages.PageLayout`. `attend` and `batch_invariant` take one.
        verifies_blocks: Whether a row's newest token and drafts are best one block, and not each a
            block of its own: a block reads its keys once, but tokens must be copied into it.
        why_not_native: Why "auto" did not pick "native" on a CPU; None elsewhere.
    """

    name: str
    attend: PagedAttention
    batch_invariant: PagedAttention
    decode: DecodeAttention | None = None
    prefill: PrefillAttention | None = None
    prepare: PrepareHeads | None = None
    fused: FusedAttention | None = None
    write_kv: WriteKV = write_kv
    contiguous_kv: ContiguousKV = "never"
    contiguous_name: str = ""
    heads_per_row: int = 1
    verifies_blocks: bool = True
    why_not_native: str | None = None

    def for_engine(self, *, is_deterministic: bool) -> AttentionBackend:
        """The engine's choice: with deterministic sampling, kernels that sum in one order."""
        if not is_deterministic or self.batch_invariant is self.attend:
            return self
        return self._replace(
            name="ordered",
            attend=self.batch_invariant,
            decode=None,
            prefill=None,
            fused=None,
            write_kv=write_kv,
            contiguous_name="ordered",
            heads_per_row=1,
            verifies_blocks=True,
        )
