"""The device arrays of the paged KV cache.

Each layer has one K and one V array of shape [num_slots, num_kv_heads, head_dim], where slot
`page * page_size + offset` holds one token. The arrays are donated to every program that writes
them and come back as its output, so the pool exists once.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class LayerKV(NamedTuple):
    """One layer's cache.

    Shape:
        k, v: [num_slots, num_kv_heads, head_dim]
    """

    k: jax.Array
    v: jax.Array


KVPages = tuple[LayerKV, ...]
"""The whole cache, a pytree with one `LayerKV` a layer."""


def allocate_kv_pages(
    *,
    num_layers: int,
    num_slots: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: jnp.dtype,
    sharding: jax.sharding.Sharding,
) -> KVPages:
    """Allocates a zeroed cache on the sharding's devices. Engine thread only."""
    shape = (num_slots, num_kv_heads, head_dim)
    zeros = jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding)
    return tuple(LayerKV(zeros(), zeros()) for _ in range(num_layers))


def kv_bytes_per_token(num_layers: int, num_kv_heads: int, head_dim: int, dtype: jnp.dtype) -> int:
    """Bytes of K and V that one token takes in all layers."""
    return 2 * num_layers * num_kv_heads * head_dim * np.dtype(dtype).itemsize


def write_kv(layer: LayerKV, k: jax.Array, v: jax.Array, slots: jax.Array) -> LayerKV:
    """Writes one token's K and V to each slot; slots >= num_slots are dropped.

    Shape:
        k, v: [T, num_kv_heads, head_dim]
        slots: [T] int32
    """
    return LayerKV(
        layer.k.at[slots].set(k, mode="drop"),
        layer.v.at[slots].set(v, mode="drop"),
    )
