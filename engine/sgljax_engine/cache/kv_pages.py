"""The device arrays of the paged KV cache.

Each layer has one K and one V array of shape [num_pages, num_kv_heads, page_size, head_dim]; slot
`page * page_size + offset` holds one token. Heads come before tokens, so that attention contracts a
page without transposing it. Every program that writes the arrays takes them donated and returns
them, so the pool exists once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class LayerKV(NamedTuple):
    """One layer's cache.

    Shape:
        k, v: [num_pages, num_kv_heads, page_size, head_dim]
    """

    k: jax.Array
    v: jax.Array

    @property
    def page_size(self) -> int:
        """Tokens in a page."""
        return self.k.shape[2]


KVPages = tuple[LayerKV, ...]
"""The whole cache, a pytree with one `LayerKV` per layer."""

MakeZeros = Callable[[tuple[int, ...], jnp.dtype, jax.sharding.Sharding], Any]
"""Makes an array of zeros, or its shape where programs are only compiled."""


def allocate_kv_pages(
    *,
    num_layers: int,
    num_pages: int,
    page_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: jnp.dtype,
    sharding: jax.sharding.Sharding,
    make_zeros: MakeZeros,
) -> KVPages:
    """Makes a zeroed cache on the sharding's devices. Engine thread only."""
    shape = (num_pages, num_kv_heads, page_size, head_dim)
    return tuple(
        LayerKV(make_zeros(shape, dtype, sharding), make_zeros(shape, dtype, sharding))
        for _ in range(num_layers)
    )


def zeros(shape: tuple[int, ...], dtype: jnp.dtype, sharding: jax.sharding.Sharding) -> jax.Array:
    """An array of zeros; takes its memory."""
    return _zeros_program(shape, dtype, sharding)()


def shape_of_zeros(
    shape: tuple[int, ...], dtype: jnp.dtype, sharding: jax.sharding.Sharding
) -> jax.ShapeDtypeStruct:
    """What a program needs to know of `zeros` to be compiled."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


@functools.lru_cache(maxsize=64)
def _zeros_program(
    shape: tuple[int, ...], dtype: jnp.dtype, sharding: jax.sharding.Sharding
) -> Callable[[], jax.Array]:
    """A program that makes a zeroed array. Compiled once, however often it runs."""
    return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding)


def kv_bytes_per_token(num_layers: int, num_kv_heads: int, head_dim: int, dtype: jnp.dtype) -> int:
    """Bytes of K and V that one token takes in all layers."""
    return 2 * num_layers * num_kv_heads * head_dim * np.dtype(dtype).itemsize


def write_kv(layer: LayerKV, k: jax.Array, v: jax.Array, slots: jax.Array) -> LayerKV:
    """Writes one token's K and V to each slot; slots beyond the pool are dropped.

    Shape:
        k, v: [T, num_kv_heads, head_dim]
        slots: [T] int32
    """
    pages, offsets = slots // layer.page_size, slots % layer.page_size
    return LayerKV(
        layer.k.at[pages, :, offsets].set(k, mode="drop"),
        layer.v.at[pages, :, offsets].set(v, mode="drop"),
    )
