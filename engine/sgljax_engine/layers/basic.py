"""Projection, embedding, normalisation and rotary position embedding.

Shape legend of the suffixes: T tokens, D model dim, N heads, H head dim.
"""

from __future__ import annotations

import enum

import jax
import jax.numpy as jnp
from jax import lax


class Layout(enum.Enum):
    """How projection weights lie in memory; it belongs to the backend, not to the model.

    `OUT_IN` contracts the last axis of both operands. On CPUs it runs decode-sized batches about
    twice as fast as `IN_OUT`, which is what TPU and GPU matrix units like.
    """

    IN_OUT = "in_out"
    OUT_IN = "out_in"


def default_layout(platform: str) -> Layout:
    """The layout to use on a JAX platform."""
    return Layout.OUT_IN if platform == "cpu" else Layout.IN_OUT


def linear(x_TI: jax.Array, weight: jax.Array, layout: Layout) -> jax.Array:
    """`x @ W` for a weight stored as [in, out] or, in layout OUT_IN, as [out, in]."""
    axis = 1 if layout is Layout.OUT_IN else 0
    return lax.dot_general(x_TI, weight, (((1,), (axis,)), ((), ())))


def embed(table_VD: jax.Array, ids_T: jax.Array) -> jax.Array:
    """Rows of the embedding table. Ids must be in range (they are checked on the host)."""
    return jnp.take(table_VD, ids_T, axis=0, mode="clip")


def unembed(x_TD: jax.Array, table_VD: jax.Array) -> jax.Array:
    """Logits [T, V] float32 from a [V, D] table."""
    return lax.dot_general(x_TD, table_VD, (((1,), (1,)), ((), ()))).astype(jnp.float32)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm over the last axis, in float32 (Zhang and Sennrich, 2019)."""
    x32 = x.astype(jnp.float32)
    rms = jnp.sqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    weight32 = weight.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + weight.shape)
    return (weight32 * (x32 / rms)).astype(x.dtype)


def rope_tables(positions_T: jax.Array, head_dim: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """Sines and cosines [T, 1, head_dim // 2] float32 of the rotary angles (Su et al., 2021)."""
    fraction = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
    angles = positions_T.astype(jnp.float32)[:, None, None] / (theta**fraction)[None, None, :]
    return jnp.sin(angles), jnp.cos(angles)


def apply_rope(x_TNH: jax.Array, sin: jax.Array, cos: jax.Array) -> jax.Array:
    """Rotates the first half of each head against its second half (the "NeoX" pairing)."""
    sin, cos = sin.astype(x_TNH.dtype), cos.astype(x_TNH.dtype)
    first, second = jnp.split(x_TNH, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
