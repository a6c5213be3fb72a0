"""The dtype of products in attention."""

from __future__ import annotations

import jax.numpy as jnp


def computed_dtype(queries: jnp.dtype, keys: jnp.dtype) -> jnp.dtype:
    """The dtype in which queries are multiplied with keys, and weights with values.

    Numbers of 8 bits are exact in bfloat16. Weights times their scales may be too small for
    float16.
    """
    if keys != jnp.int8:
        return keys
    return queries if queries == jnp.float32 else jnp.dtype(jnp.bfloat16)
