"""How the layers of a pass reach keys in pages."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from sgljax_engine.attention.base import (
    Attention,
    AttentionOptions,
    BlockTables,
    NewTokens,
    attend_to_tokens,
)
from sgljax_engine.cache.kv_pages import LayerKV
from sgljax_engine.models.spec import Attend, LayerCache
from sgljax_engine.runner.batches.page_ids import NO_SLOT


class Pages(NamedTuple):
    """Page tables of a pass and slots of its new keys; for sliding layers, in window pages.

    `windows` is for these; None where they have the pages of the other layers.
    """

    tables: BlockTables
    slots: jax.Array
    windows: Pages | None = None

    def for_layer(self, options: AttentionOptions) -> Pages:
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
        there = tables._replace(page_table=jnp.maximum(window_table, 0), runs=None)
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


def paged_attend(attention: Attention, pages: Pages) -> Attend:
    """An `attend` of blocks over pages."""

    def attend(
        tokens: jax.Array | NewTokens, layer: LayerCache, options: AttentionOptions
    ) -> tuple[jax.Array, LayerCache]:
        assert isinstance(layer, LayerKV)
        tables, slots, _ = pages.for_layer(options)
        if isinstance(tokens, NewTokens):
            return attention.write_and_attend(tokens, layer, tables, slots, options)
        return attend_to_tokens(attention, tokens, layer, tables, options), layer

    return attend
