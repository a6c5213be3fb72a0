"""Projection, embedding, normalisation.

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
    if layout is Layout.OUT_IN:
        return _weight_first(x_TI, weight)
    return lax.dot_general(x_TI, weight, (((1,), (0,)), ((), ())))


def _weight_first(x_TI: jax.Array, weight_OI: jax.Array) -> jax.Array:
    """`(W @ x.T).T`: up to a fifth faster than `x @ W.T` for 4 to 32 tokens on CPUs.

    The barrier keeps XLA from turning the product around again.
    """
    product_OT = lax.dot_general(weight_OI, x_TI, (((1,), (1,)), ((), ())))
    return lax.optimization_barrier(product_OT).T


def add_bias(x_TO: jax.Array, bias_O: jax.Array) -> jax.Array:
    """`x + b` for every token."""
    return x_TO + bias_O[None, :]


def embed(table_VD: jax.Array, ids_T: jax.Array) -> jax.Array:
    """Rows of the embedding table. Ids must be in range (they are checked on the host)."""
    return jnp.take(table_VD, ids_T, axis=0, mode="clip")


def unembed(x_TD: jax.Array, table_VD: jax.Array) -> jax.Array:
    """Logits [T, V] float32 from a [V, D] table."""
    return lax.dot_general(x_TD, table_VD, (((1,), (1,)), ((), ()))).astype(jnp.float32)


def soft_cap(x: jax.Array, cap: float | None) -> jax.Array:
    """`cap * tanh(x / cap)`, which stays within (-cap, cap); `x` itself without a cap."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float, offset: float = 0.0) -> jax.Array:
    """Root-mean-square norm over the last axis, in float32 (Zhang and Sennrich, 2019).

    Args:
        x: [..., D].
        weight: [D].
        eps: Added to the mean square.
        offset: Added to the weight; 1 for models that store their weights minus one (Gemma).
    """
    x32 = x.astype(jnp.float32)
    rms = jnp.sqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    weight32 = weight.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + weight.shape)
    if offset:
        weight32 = weight32 + offset
    return (weight32 * (x32 / rms)).astype(x.dtype)
