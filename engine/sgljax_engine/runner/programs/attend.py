"""How the layers of a pass reach keys in pages, and in contiguous KV."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from sgljax_engine.attention.base import (
    AttentionOptions,
    BlockTables,
    DecodeAttention,
    PrefillAttention,
    PrepareHeads,
    Projections,
)
from sgljax_engine.attention.contiguous import contiguous_attention
from sgljax_engine.cache.contiguous_kv import DecodeCache, write_contiguous_kv
from sgljax_engine.cache.kv_pages import LayerKV, write_kv
from sgljax_engine.models.spec import Attend, LayerCache, NewKV, ProjectionAttend
from sgljax_engine.runner.batches.page_ids import NO_SLOT
from sgljax_engine.runner.programs.context import ProgramContext


class Pages(NamedTuple):
    """Page tables of a pass and slots of its new keys; for sliding layers, in window pages.

    `windows` is for these; None where they have the pages of the other layers.
    """

    tables: BlockTables
    slots: jax.Array
    windows: Pages | None = None

    def of(self, options: AttentionOptions) -> Pages:
        """Tables and slots of a layer with these options."""
        if self.windows is None or options.sliding_window is None:
            return self
        return self.windows

    @classmethod
    def make(
        cls,
        tables: BlockTables,
        slots: jax.Array,
        window_table: jax.Array | None,
        window_slots: jax.Array | None,
    ) -> Pages:
        """From tables and slots of both kinds; the window's are None without window pages."""
        if window_table is None or window_slots is None:
            return cls(tables, slots)
        # What lies before a window gets no weight; the null page has nothing that could spoil it.
        there = tables._replace(page_table=jnp.maximum(window_table, 0))
        windows = cls(there, window_slots)
        return cls(tables, slots, windows)


def slots_at(
    page_table: jax.Array, positions: jax.Array, is_used: jax.Array, page_size: int
) -> jax.Array:
    """The slots [T] int32 of tokens at positions [T], by the pages [T, P] of their requests.

    `NO_SLOT` for those that are not used.
    """
    page = jnp.minimum(positions // page_size, page_table.shape[1] - 1)
    page_id = jnp.take_along_axis(page_table, page[:, None], axis=1)[:, 0]
    return jnp.where(is_used, page_id * page_size + positions % page_size, NO_SLOT)


def paged_attend(
    static: ProgramContext, pages: Pages, write_and_attend: PrefillAttention | None
) -> Attend:
    """An `attend` of blocks over pages: by `write_and_attend`, or by `static.attention`.

    New keys are written to slots before the latter, as before every read of another layer's keys.
    """
    num_blocks, num_queries = pages.tables.positions.shape

    def split(x: jax.Array) -> jax.Array:
        return x.reshape(num_blocks, num_queries, *x.shape[1:])

    def attend(
        q: jax.Array, new: NewKV | None, layer: LayerCache | None, options: AttentionOptions
    ) -> tuple[jax.Array, LayerKV]:
        assert isinstance(layer, LayerKV)
        tables, slots, _ = pages.of(options)
        if write_and_attend is not None and new is not None:
            k, v = map(split, new)
            out, layer = write_and_attend(split(q), k, v, layer, tables, options)
            return out.reshape(q.shape), layer
        if new is not None:
            k, v = new
            layer = static.write_kv(layer, k, v, slots)
        return static.attention(split(q), layer, tables, options).reshape(q.shape), layer

    prepare = static.prepare
    if prepare is None:
        return attend

    def from_projections(
        new: Projections, layer: LayerCache | None, options: AttentionOptions
    ) -> tuple[jax.Array, LayerCache]:
        assert isinstance(layer, LayerKV)
        q, layer = prepare(new, layer, pages.of(options).slots)
        return attend(q, None, layer, options)

    return ProjectionAttend(attend, from_projections)


def own_attend(prepare: PrepareHeads | None, attend: Attend) -> Attend:
    """An `attend` without pages, whose new keys are all there are; of projections too."""
    if prepare is None:
        return attend

    def from_projections(
        new: Projections, layer: LayerCache | None, options: AttentionOptions
    ) -> tuple[jax.Array, LayerCache]:
        q, (k, v) = prepare(new, None, None)
        return attend(q, (k, v), layer, options)

    return ProjectionAttend(attend, from_projections)


def decode_attend(static: ProgramContext, pages: Pages) -> Attend:
    """An `attend` of one token per row over pages."""
    own = static.decode_attention
    attend = paged_attend(static, pages, None if own is None else of_blocks(own))
    attend_to_projections = static.projection_attention
    if attend_to_projections is None:
        return attend

    def from_projections(
        new: Projections, layer: LayerCache | None, options: AttentionOptions
    ) -> tuple[jax.Array, LayerKV]:
        assert isinstance(layer, LayerKV)
        tables = pages.of(options).tables
        return attend_to_projections(new, layer, tables, options)

    return ProjectionAttend(attend, from_projections)


def contiguous_attend(pages: Pages, active: jax.Array, shared: jax.Array) -> Attend:
    """An `attend` of one token per row that writes its key to both caches and reads contiguous KV.

    `shared` is the result of `contiguous.shared_keys`.
    """

    def attend(
        q: jax.Array, new: NewKV | None, layer: LayerCache | None, options: AttentionOptions
    ) -> tuple[jax.Array, DecodeCache]:
        assert isinstance(layer, DecodeCache)
        tables, slots, _ = pages.of(options)
        if new is not None:
            k, v = (x.astype(layer.pages.k.dtype) for x in new)
            contiguous = write_contiguous_kv(layer.contiguous, k, v, tables.positions[:, 0], active)
            layer = DecodeCache(write_kv(layer.pages, k, v, slots), contiguous)
        return contiguous_attention(q, layer.contiguous, tables.kv_lens, shared, options), layer

    return attend


def of_blocks(attention: DecodeAttention) -> PrefillAttention:
    """Attention of one token per row, for blocks of one token."""

    def attend(
        q_NQDh: jax.Array,
        k_NQKh: jax.Array,
        v_NQKh: jax.Array,
        layer: LayerKV,
        tables: BlockTables,
        options: AttentionOptions,
    ) -> tuple[jax.Array, LayerKV]:
        q, k, v = q_NQDh[:, 0], k_NQKh[:, 0], v_NQKh[:, 0]
        return attention(q, k, v, layer, tables, options)

    return attend
