"""Attention over the paged KV cache.

Every backend implements `Attention`. A batch consists of `N` *blocks* of `Q` query tokens, each
block of one request: prefill cuts its ragged tokens into such blocks, decode uses Q = 1. So the
same functions serve both.

Shape legend: N blocks, Q queries in a block, D query heads, K kv heads, R rows of queries that
share a kv head, h head dim, S keys in a step of the loop, P pages of a request, T = N Q tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from sgljax_engine.cache.kv_pages import LayerKV
from sgljax_engine.kernels.runs import SharedRuns

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

    Attributes:
        runs: Blocks whose first keys may be read together, all before their queries. None without,
            or for attention that does not share prompts.
    """

    page_table: jax.Array
    positions: jax.Array
    kv_lens: jax.Array
    runs: SharedRuns | None = None


class Prologue(NamedTuple):
    """What makes queries and keys of projections: a norm of each head, and the rotary embedding.

    Shape: sin, cos: [T, 1, h // 2] float32, see `layers.rope`. q_norm, k_norm: [h], weights of the
        norms; None without.

    Attributes:
        eps: Of the norms. Static.
        offset: Added to their weights. Static.
    """

    sin: jax.Array
    cos: jax.Array
    q_norm: jax.Array | None = None
    k_norm: jax.Array | None = None
    eps: float = 0.0
    offset: float = 0.0


class NewTokens(NamedTuple):
    """Queries, keys and values of a pass's tokens.

    Shape: q: [T, num_heads, h]. k, v: [T, num_kv_heads, h]. sinks: [num_heads] float32.

    Attributes:
        v: None where keys are values too.
        prologue: What is left to do to queries and keys; None for nothing. Only attention that
            `takes_projections` is given one.
        sinks: For each head the score of a key without a value, which every query sees (gpt-oss,
            2025); None without.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array | None
    prologue: Prologue | None = None
    sinks: jax.Array | None = None

    def map(self, function: Callable[[jax.Array], jax.Array]) -> NewTokens:
        """Other tokens, made from the arrays of these [T, ...]."""
        q, k, v = jax.tree.map(function, self[:3])
        prologue = self.prologue
        if prologue is not None:
            sin, cos = function(prologue.sin), function(prologue.cos)
            prologue = prologue._replace(sin=sin, cos=cos)
        return NewTokens(q, k, v, prologue, self.sinks)


class Attention(Protocol):
    """Causal attention of query blocks over their requests' pages.

    Hashable: programs are compiled for it. Keys at or beyond `kv_lens` must never be used, whatever
    the memory holds; nor must keys that have left the window.
    """

    @property
    def name(self) -> str:
        """Name of the backend, for reports."""
        ...

    @property
    def heads_per_row(self) -> int:
        """Kv heads in a row of the pages, see `cache.kv_pages.PageLayout`."""
        ...

    @property
    def takes_projections(self) -> bool:
        """Whether `write_and_attend` takes projections with their prologue.

        Of layers whose heads all turn as a whole.
        """
        ...

    @property
    def verifies_blocks(self) -> bool:
        """Whether a row's newest token and drafts are best one block, and not one each.

        A block reads its keys once, but tokens must be copied into it.
        """
        ...

    @property
    def shares_prompts(self) -> bool:
        """Whether it reads keys once for `BlockTables.runs`."""
        ...

    def attend(
        self,
        q_NQDh: jax.Array,
        layer: LayerKV,
        tables: BlockTables,
        options: AttentionOptions,
        sinks: jax.Array | None = None,
    ) -> jax.Array:
        """Attends to keys that are in the pages.

        Args:
            q_NQDh: [N, Q, num_heads, head_dim] queries.
            layer: The cache, which already holds the keys and values of these tokens.
            tables: Where each block's keys are.
            options: How the layer attends.
            sinks: As of `NewTokens`.

        Returns:
            [N, Q, num_heads, head_dim], in the queries' dtype; unspecified where `kv_lens` is 0.
        """
        ...

    def write_and_attend(
        self,
        new: NewTokens,
        layer: LayerKV,
        tables: BlockTables,
        slots: jax.Array,
        options: AttentionOptions,
    ) -> tuple[jax.Array, LayerKV]:
        """Writes the tokens' keys and values to their pages, then attends.

        Args:
            new: The tokens, those of block after block.
            layer: The cache without these tokens.
            tables: Where each block's keys are. Positions of a block follow each other, and a
                block may use keys of blocks before it.
            slots: [T] int32, the slot of each token, as for `kv_pages.write_kv`.
            options: How the layer attends.

        Returns:
            [T, num_heads, head_dim], unspecified for tokens at or beyond `kv_lens`, and the cache
            with these tokens.
        """
        ...


def in_blocks(x: jax.Array, tables: BlockTables) -> jax.Array:
    """[T, ...] as [N, Q, ...]."""
    return x.reshape(*tables.positions.shape, *x.shape[1:])


def attend_to_tokens(
    attention: Attention,
    q_TDh: jax.Array,
    layer: LayerKV,
    tables: BlockTables,
    options: AttentionOptions,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """`Attention.attend` for queries of block after block, [T, num_heads, head_dim]."""
    out = attention.attend(in_blocks(q_TDh, tables), layer, tables, options, sinks)
    return out.reshape(q_TDh.shape)


def map_tiles(function: Callable[[T], jax.Array], args: T, size: int, tile: int) -> jax.Array:
    """Applies `function` to tiles of a leading axis of `size`, one after another; padding is 0."""

    def split(x: jax.Array) -> jax.Array:
        padded = jnp.pad(x, ((0, -size % tile), *((0, 0) for _ in x.shape[1:])))
        return padded.reshape(-1, tile, *x.shape[1:])

    out = lax.map(function, jax.tree.map(split, args))
    return out.reshape(-1, *out.shape[2:])[:size]
