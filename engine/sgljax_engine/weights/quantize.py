"""Weight-only int8: a weight as whole numbers from -127 to 127, and a factor for each output.

The factor is the output's largest weight over 127, so that rounding errs by at most half of it.
Both are made at each weight sync, from the trainer's weights.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

_LARGEST = 127


class Quantized(NamedTuple):
    """The part of a quantised weight that an array stores. Hashable.

    Attributes:
        shape: Logical shape of the weight.
        output_axis: Axis of its outputs.
        is_scale: Whether the array holds the factors; else the whole numbers.
    """

    shape: tuple[int, ...]
    output_axis: int
    is_scale: bool

    def of(self, weight: jax.Array) -> jax.Array:
        """The array, of a weight of the logical shape. Traced by JAX."""
        x = weight.astype(jnp.float32)
        axes = tuple(axis for axis in range(x.ndim) if axis != self.output_axis)
        peaks = jnp.max(jnp.abs(x), axis=axes, keepdims=True)
        scales = jnp.where(peaks == 0, 1.0, peaks / _LARGEST)
        if self.is_scale:
            return scales.reshape(-1)
        return jnp.clip(jnp.round(x / scales), -_LARGEST, _LARGEST).astype(jnp.int8)
