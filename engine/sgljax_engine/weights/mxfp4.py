"""MXFP4 weights, as gpt-oss stores its experts: blocks of 32 numbers of 4 bits, and their scales.

Format: OCP Microscaling Formats (MX) Specification 1.0. A number has a sign, two bits of exponent
and one of mantissa; a byte has two of them, the lower half first. A block's scale is a power of
two. All values are exact in bfloat16.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sgljax_engine.errors import WeightLoadError

_BLOCKS, _SCALES = "_blocks", "_scales"
_BLOCK_BYTES = 16
_BIAS = 127
"""Added to the exponent of a scale."""

_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def join_blocks(arrays: dict[str, Any]) -> None:
    """Puts the scales of quantised weights behind their blocks, in place, one after another.

    A weight is then one array, uint8 [experts, out, blocks, 17], called as its blocks are.

    Raises:
        WeightLoadError: for blocks without scales, or of another shape.
    """
    for name in [name for name in arrays if name.endswith(_BLOCKS)]:
        blocks = arrays[name]
        if np.shape(blocks)[-1:] == (_BLOCK_BYTES + 1,):  # joined already
            continue
        scales = arrays.pop(name.removesuffix(_BLOCKS) + _SCALES, None)
        if scales is None:
            raise WeightLoadError(f"{name!r} has no scales beside it, called *{_SCALES}")
        if np.shape(blocks) != (*np.shape(scales), _BLOCK_BYTES):
            raise WeightLoadError(
                f"{name!r} must be of shape [..., {_BLOCK_BYTES}] for scales of shape "
                f"{list(np.shape(scales))}, got {list(np.shape(blocks))}"
            )
        joined = jnp if isinstance(blocks, jax.Array) else np
        arrays[name] = joined.concatenate([blocks, scales[..., None]], axis=-1)
        del blocks, scales  # before the next ones are made


def dequantize(joined: jax.Array) -> jax.Array:
    """The weight [experts, in, out] bfloat16 of an array as of `join_blocks`. Traced by JAX."""
    blocks, exponents = joined[..., :_BLOCK_BYTES], joined[..., _BLOCK_BYTES:]
    halves = jnp.stack([blocks & 15, blocks >> 4], axis=-1)
    values = jnp.asarray(_VALUES, jnp.float32)[halves & 7]
    values = jnp.where(halves > 7, -values, values)
    values = jnp.ldexp(values, exponents[..., None].astype(jnp.int32) - _BIAS)
    *stacked, _, _ = joined.shape
    return values.astype(jnp.bfloat16).reshape(*stacked, -1).swapaxes(-1, -2)


def dequantize_even(joined: jax.Array) -> jax.Array:
    """The outputs of even number; as `dequantize`."""
    return dequantize(joined[:, 0::2])


def dequantize_odd(joined: jax.Array) -> jax.Array:
    """The outputs of odd number; as `dequantize`."""
    return dequantize(joined[:, 1::2])
