"""Projection, embedding, normalisation.

Shape legend of the suffixes: T tokens, D model dim, N heads, H head dim.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def linear(x_TD: jax.Array, weight: jax.Array) -> jax.Array:
    """`x @ W` over features, of a weight [in, out]."""
    return lax.dot_general(x_TD, weight, (((1,), (0,)), ((), ())))


def split_heads(x: jax.Array, head_dim: int) -> jax.Array:
    """Features [T, N * H] to [T, N, H]."""
    return x.reshape(x.shape[0], -1, head_dim)


def embed(table_VD: jax.Array, ids_T: jax.Array) -> jax.Array:
    """Rows of the embedding table. Ids must be in range (they are checked on the host)."""
    return jnp.take(table_VD, ids_T, axis=0, mode="clip")


def unembed(
    x_TD: jax.Array, table_VD: jax.Array, dtype: jax.typing.DTypeLike | None = None
) -> jax.Array:
    """Logits [T, V] float32 from a [V, D] table; products are rounded to `dtype`, or their own."""
    contract = (((1,), (1,)), ((), ()))
    found = lax.dot_general(x_TD, table_VD, contract, preferred_element_type=dtype)
    return found.astype(jnp.float32)


def soft_cap(x: jax.Array, cap: float | None) -> jax.Array:
    """`cap * tanh(x / cap)`, which stays within (-cap, cap); `x` itself without a cap."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def rms_norm(x: jax.Array, weight: jax.Array | None, eps: float, offset: float = 0.0) -> jax.Array:
    """Root-mean-square norm over the last axis, in float32 (Zhang and Sennrich, 2019).

    Args:
        x: Any shape.
        weight: [size of the last axis]; None for ones.
        eps: Added to the mean square.
        offset: Added to the weight; 1 for models that store their weights minus one (Gemma).
    """
    x32 = x.astype(jnp.float32)
    rms = jnp.sqrt(jnp.sum(x32 * x32, axis=-1, keepdims=True) / x.shape[-1] + eps)
    if weight is None:
        return (x32 / rms).astype(x.dtype)
    # All of one rank, for hosts that set jax_numpy_rank_promotion="raise".
    weight32 = weight.astype(jnp.float32).reshape((1,) * (x.ndim - weight.ndim) + weight.shape)
    if offset:
        weight32 = weight32 + offset
    return (weight32 * (x32 / rms)).astype(x.dtype)
