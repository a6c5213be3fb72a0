"""Norm and rotary embedding of heads on TPUs: a Pallas kernel.

XLA would put tokens into lanes, since half a head does not fill them, and transpose queries and
keys for the kernel of attention. Here a head stays where its projection puts it.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

_MAX_STEP_TOKENS = 256
_MAX_STEP_BYTES = 6 << 20
"""Bytes in VMEM of a step's heads before and after; both are there twice."""


def rotate_heads(
    x_TNH: jax.Array,
    norm: tuple[jax.Array, float, float] | None,
    sin: jax.Array,
    cos: jax.Array,
    *,
    interpret: Any = False,
) -> jax.Array:
    """Heads after their norm and the rotary embedding; as `layers.rope.apply_rope` pairs channels.

    Shape: x_TNH: projections; T is a multiple of `tokens_tile`, and H one of 128. sin, cos: [T, 1,
    H // 2] float32. norm: weight [H], eps and offset as of `layers.basic.rms_norm`; None without.
    """
    num_tokens, num_heads, head_dim = x_TNH.shape
    width, dtype = num_heads * head_dim, x_TNH.dtype
    sin, cos = (table[:, 0].astype(dtype).astype(jnp.float32) for table in (sin, cos))
    tables = jnp.concatenate([-sin, sin], axis=1), jnp.concatenate([cos, cos], axis=1)
    weights = [] if norm is None else [norm[0].astype(jnp.float32)[None]]
    tokens = _step_tokens(num_tokens, width * dtype.itemsize)

    def block(size: int) -> pl.BlockSpec:
        return pl.BlockSpec((tokens, size), lambda n: (n, 0))

    whole = pl.BlockSpec((1, head_dim), lambda n: (0, 0))
    num_bytes = 2 * x_TNH.size * dtype.itemsize + sum(table.size * 4 for table in tables)
    out = pl.pallas_call(
        functools.partial(_rotate, norm=None if norm is None else norm[1:], head_dim=head_dim),
        grid=(num_tokens // tokens,),
        in_specs=[block(width), block(head_dim), block(head_dim), *(whole for _ in weights)],
        out_specs=block(width),
        out_shape=jax.ShapeDtypeStruct((num_tokens, width), dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        cost_estimate=pl.CostEstimate(
            flops=10 * x_TNH.size,
            bytes_accessed=num_bytes,
            transcendentals=0 if norm is None else num_tokens * num_heads,
        ),
        interpret=interpret,
        name="rotate_heads",
    )(x_TNH.reshape(num_tokens, width), *tables, *weights)
    return out.reshape(x_TNH.shape)


def tokens_tile(dtype: jnp.dtype) -> int:
    return 8 * 4 // jnp.dtype(dtype).itemsize


def _step_tokens(num_tokens: int, token_bytes: int) -> int:
    most = min(_MAX_STEP_TOKENS, _MAX_STEP_BYTES // (4 * token_bytes))
    count = 1
    while num_tokens % (2 * count) == 0 and 2 * count <= most:
        count *= 2
    return count


def _rotate(
    x_ref: Any,
    sin_ref: Any,
    cos_ref: Any,
    *refs: Any,
    norm: tuple[float, float] | None,
    head_dim: int,
) -> None:
    *weight_refs, out_ref = refs
    sin, cos = sin_ref[...], cos_ref[...]
    for start in range(0, x_ref.shape[1], head_dim):
        x = x_ref[:, start : start + head_dim].astype(jnp.float32)
        if norm is not None:
            eps, offset = norm
            scale = lax.rsqrt(jnp.mean(x * x, axis=1, keepdims=True) + eps)
            x = (weight_refs[0][...] + offset) * (x * scale)
            x = x.astype(out_ref.dtype).astype(jnp.float32)
        rotated = x * cos + pltpu.roll(x, head_dim // 2, axis=1) * sin
        out_ref[:, start : start + head_dim] = rotated.astype(out_ref.dtype)
