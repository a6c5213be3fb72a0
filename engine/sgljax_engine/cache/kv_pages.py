"""The device arrays of the paged KV cache.

Each layer with its own keys has one K and one V array of shape [num_pages, num_kv_heads, page_size,
head_dim], whose heads may differ from layer to layer; of latents, which are keys and values in one,
K alone. Slot `page * page_size + offset` holds one token. Heads come before tokens, so that
attention contracts a page without transposing it. An attention backend may ask for several heads in
one row (`PageLayout`); then only it reads and writes the pages. Every program that writes the
arrays takes them donated and returns them, so the pool exists once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sgljax_engine.cache.layer_states import LayerState
from sgljax_engine.cache.zeros import MakeZeros

_LANES = 128
"""Lanes of a TPU's vector register."""


class LayerKV(NamedTuple):
    """One layer's cache.

    Shape:
        k, v: [num_pages, num_kv_heads, page_size, head_dim], or as a `PageLayout` says; v is None
            where keys are values too.
    """

    k: jax.Array
    v: jax.Array | None

    @property
    def values(self) -> jax.Array:
        """Values in pages."""
        return self.k if self.v is None else self.v

    @property
    def page_size(self) -> int:
        return self.k.shape[2]


class PageLayout(NamedTuple):
    """Where the heads of a token are in a page. Static and hashable.

    Pages are [num_pages, num_rows, page_size, row_size]. With one head a row, these are the heads.
    With several, a row holds neighbouring heads of one device, one after another; the rest of a
    device's last row is zero. Without values, keys are values too.
    """

    num_kv_heads: int
    head_dim: int
    heads_per_row: int = 1
    num_shards: int = 1
    has_values: bool = True

    @property
    def num_rows(self) -> int:
        """Rows of a token, on all devices."""
        return self.num_shards * -(-self.num_kv_heads // (self.num_shards * self.heads_per_row))

    @property
    def row_size(self) -> int:
        return self.heads_per_row * self.head_dim


class KVPages(NamedTuple):
    """The whole cache, a pytree.

    Attributes:
        layers: One for each of `ModelConfig.cached_layers`; none while nothing is allocated.
        routed: [num_pages, page_size, W] unsigned, the experts of each token: k for each layer, by
            descending probability, then zeros up to `routed_width`. None if they are not kept.
        states: One for each of `ModelConfig.state_layers`.
    """

    layers: tuple[LayerKV, ...] = ()
    routed: jax.Array | None = None
    states: tuple[LayerState, ...] = ()


def allocate_kv_pages(
    layouts: Sequence[PageLayout],
    shardings: Sequence[jax.sharding.Sharding],
    *,
    num_pages: Sequence[int],
    page_size: int,
    dtype: jnp.dtype,
    make_zeros: MakeZeros,
) -> tuple[LayerKV, ...]:
    """Makes zeroed pages: one layer for each layout and sharding. Engine thread only."""

    def layer(layout: PageLayout, sharding: jax.sharding.Sharding, count: int) -> LayerKV:
        shape = (count, layout.num_rows, page_size, layout.row_size)
        k = make_zeros(shape, dtype, sharding)
        return LayerKV(k, make_zeros(shape, dtype, sharding) if layout.has_values else None)

    return tuple(map(layer, layouts, shardings, num_pages))


def kv_bytes_per_token(layouts: Iterable[PageLayout], dtype: jnp.dtype) -> int:
    """Bytes of K and V that one token takes in all layers, counting each head once."""
    numbers = sum((1 + layout.has_values) * layout.num_rows * layout.row_size for layout in layouts)
    return numbers * np.dtype(dtype).itemsize


def write_kv(layer: LayerKV, k: jax.Array, v: jax.Array | None, slots: jax.Array) -> LayerKV:
    """Writes one token's K and V to each slot; slots beyond the pool are dropped.

    Shape:
        k, v: [T, num_kv_heads, head_dim]; v is None for pages without values
        slots: [T] int32
    """
    pages, offsets = slots // layer.page_size, slots % layer.page_size

    def write(kept: jax.Array, new: jax.Array) -> jax.Array:
        return kept.at[pages, :, offsets].set(new.astype(kept.dtype), mode="drop")

    return LayerKV(write(layer.k, k), None if layer.v is None or v is None else write(layer.v, v))


def routed_width(num_ids: int) -> int:
    """Columns that a token's experts take: whole vectors of a TPU.

    With other widths its compiler copies the array at both ends of each program.
    """
    return -(-num_ids // _LANES) * _LANES


def write_routed(routed: jax.Array, ids: jax.Array, slots: jax.Array) -> jax.Array:
    """Writes the experts of one token to each slot; slots beyond the pool are dropped.

    Shape:
        routed: as in `KVPages`
        ids: [T, num_layers * k] of the same dtype
        slots: [T] int32
    """
    _, page_size, width = routed.shape
    ids = jnp.pad(ids, ((0, 0), (0, width - ids.shape[1])))
    return routed.at[slots // page_size, slots % page_size].set(ids, mode="drop")
