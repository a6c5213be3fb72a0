"""The device arrays of the paged KV cache.

Each layer with its own keys has one K and one V array of shape [num_pages, num_kv_heads, page_size,
head_dim], whose heads may differ from layer to layer; of latents, which are keys and values in one,
K alone. Slot `page * page_size + offset` holds one token. Heads come before tokens, so that
attention contracts a page without transposing it. An attention backend may ask for several heads in
one row (`PageLayout`); then only it reads and writes the pages. Every program that writes the
arrays takes them donated and returns them, so the pool exists once.

Pages of 8 bits hold whole numbers from -127 to 127, with a float32 scale for each token and kv
head. A scale for a whole page would change as tokens join it, and a token's bits would then depend
on how its request was batched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sgljax_engine.cache.layer_states import LayerState
from sgljax_engine.cache.zeros import MakeZeros

_LANES = 128
"""Lanes of a TPU's vector register."""

_INT8_MAX = 127
"""The largest magnitude of a stored number of 8 bits; -128 is not used."""


class LayerKV(NamedTuple):
    """One layer's cache.

    Shape:
        k, v: [num_pages, num_kv_heads, page_size, head_dim], or as a `PageLayout` says; v is None
            where keys are values too.
        k_scale, v_scale: [num_pages, num_kv_heads, page_size] float32, by which numbers of 8 bits
            are multiplied; None for pages of floating-point numbers.
    """

    k: jax.Array
    v: jax.Array | None
    k_scale: jax.Array | None = None
    v_scale: jax.Array | None = None

    @property
    def values(self) -> jax.Array:
        """Values in pages."""
        return self.k if self.v is None else self.v

    @property
    def scales(self) -> tuple[jax.Array, jax.Array] | None:
        """Scales of keys and of values; None for pages of floating-point numbers."""
        if self.k_scale is None or self.v_scale is None:
            return None
        return self.k_scale, self.v_scale

    @property
    def page_size(self) -> int:
        return self.k.shape[2]


class PageLayout(NamedTuple):
    """Where the heads of a token are in a page. Static and hashable.

    Pages are [num_pages, num_rows, page_size, row_size]. With one head a row, these are the heads.
    With several, a row holds neighbouring heads of one device, one after another; the rest of a
    device's last row is zero. Without values, keys are values too. `is_int8`: numbers are stored
    in 8 bits, one head a row.
    """

    num_kv_heads: int
    head_dim: int
    heads_per_row: int = 1
    num_shards: int = 1
    has_values: bool = True
    is_int8: bool = False

    @property
    def num_rows(self) -> int:
        """Rows of a token, on all devices."""
        return self.num_shards * -(-self.num_kv_heads // (self.num_shards * self.heads_per_row))

    @property
    def row_size(self) -> int:
        return self.heads_per_row * self.head_dim

    def make_layer(
        self,
        num_pages: int,
        page_size: int,
        dtype: jnp.dtype,
        make: Callable[[tuple[int, ...], jnp.dtype], jax.Array],
    ) -> LayerKV:
        """A layer of arrays from `make(shape, dtype)`; `dtype` is of numbers without scales."""
        per_token = (num_pages, self.num_rows, page_size)
        if not self.is_int8:
            pages = [make((*per_token, self.row_size), dtype) for _ in range(1 + self.has_values)]
            return LayerKV(pages[0], pages[1] if self.has_values else None)
        k, v = (make((*per_token, self.row_size), jnp.dtype(jnp.int8)) for _ in range(2))
        return LayerKV(k, v, *(make(per_token, jnp.dtype(jnp.float32)) for _ in range(2)))


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
        def make(shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
            return make_zeros(shape, dtype, sharding)

        return layout.make_layer(count, page_size, dtype, make)

    return tuple(map(layer, layouts, shardings, num_pages))


def kv_bytes_per_token(layouts: Iterable[PageLayout], dtype: jnp.dtype) -> int:
    """Bytes of K and V that one token takes in all layers, counting each head once."""

    def row_bytes(layout: PageLayout) -> int:
        if layout.is_int8:
            return layout.row_size + 4  # and a scale
        return layout.row_size * np.dtype(dtype).itemsize

    return sum((1 + each.has_values) * each.num_rows * row_bytes(each) for each in layouts)


def write_kv(layer: LayerKV, k: jax.Array, v: jax.Array | None, slots: jax.Array) -> LayerKV:
    """Writes one token's K and V to each slot; slots beyond the pool are dropped.

    Shape:
        k, v: [T, num_kv_heads, head_dim]; v is None for pages without values
        slots: [T] int32
    """
    pages, offsets = slots // layer.page_size, slots % layer.page_size

    def write(kept: jax.Array, new: jax.Array) -> jax.Array:
        return kept.at[pages, :, offsets].set(new.astype(kept.dtype), mode="drop")

    return jax.tree.map(write, layer, stored_tokens(layer, k, v))


def stored_tokens(layer: LayerKV, k: jax.Array, v: jax.Array | None) -> LayerKV:
    """Tokens' K and V [T, num_kv_heads, head_dim] as a layer stores them, up to the dtype.

    Numbers of 8 bits are rounded to the nearest even, and scales are the largest magnitude by 127.
    The key of a token that overflowed becomes NaN and its value 0, so that the token spoils those
    that see it and no others.

    Shape: scales: [T, num_kv_heads] float32.
    """
    if layer.v is None or v is None:
        return LayerKV(k, None)
    if layer.k_scale is None:
        return LayerKV(k, v)
    is_finite = jnp.all(jnp.isfinite(k) & jnp.isfinite(v), axis=-1)

    def rounded(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = jnp.where(is_finite[..., None], x.astype(jnp.float32), 0)
        scale = jnp.max(jnp.abs(x), axis=-1) * (1 / _INT8_MAX)
        numbers = jnp.round(x / jnp.where(scale > 0, scale, 1)[..., None])
        # The scale of subnormal numbers is coarse.
        return jnp.clip(numbers, -_INT8_MAX, _INT8_MAX).astype(jnp.int8), scale

    (k, k_scale), (v, v_scale) = rounded(k), rounded(v)
    return LayerKV(k, v, jnp.where(is_finite, k_scale, jnp.nan), v_scale)


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
