"""How the engine stores a weight: the form that its products read fastest, and weight-only int8.

In int8 a weight is whole numbers from -127 to 127, and a factor for each output: the output's
largest weight over 127, so that rounding errs by at most half of it. Both are made at each weight
sync, from the trainer's weights.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

import jax
import jax.numpy as jnp

from sgljax_cpu import PANEL, num_panels, pack_panels, unpack_panels

_LARGEST = 127


class Form(enum.Enum):
    """The physical form of a weight whose logical shape is [..., in, out]."""

    LOGICAL = "logical"
    PANELS = "panels"
    """[..., panels, in, 16], see `sgljax_cpu.panels`."""

    TABLE_PANELS = "table_panels"
    """Likewise, of a table [out, in] whose rows are outputs."""

    @property
    def is_packed(self) -> bool:
        return self in (Form.PANELS, Form.TABLE_PANELS)

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        if self is Form.LOGICAL:
            return shape
        *stacked, rows, columns = shape
        num_inputs, num_outputs = (rows, columns) if self is Form.PANELS else (columns, rows)
        return (*stacked, num_panels(num_outputs), num_inputs, PANEL)

    def store(self, x: jax.Array) -> jax.Array:
        """A weight of the logical shape in this form. Traced by JAX."""
        if self is Form.LOGICAL:
            return x
        if self is Form.PANELS:
            return pack_panels(x)
        return pack_panels(x.swapaxes(-1, -2))

    def restore(self, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """The inverse of `store`, for a logical shape. Traced by JAX."""
        if self is Form.LOGICAL:
            return x
        if self is Form.PANELS:
            return unpack_panels(x, shape[-1])
        return unpack_panels(x, shape[-2]).swapaxes(-1, -2)


class Quantized(NamedTuple):
    """What a stored array is of a quantised weight: its factors, or the whole numbers. Hashable."""

    shape: tuple[int, ...]
    output_axis: int
    is_scale: bool

    def quantize(self, weight: jax.Array) -> jax.Array:
        x = weight.astype(jnp.float32)
        axes = tuple(axis for axis in range(x.ndim) if axis != self.output_axis)
        peaks = jnp.max(jnp.abs(x), axis=axes, keepdims=True)
        scales = jnp.where(peaks == 0, 1.0, peaks / _LARGEST)
        if self.is_scale:
            return scales.reshape(-1)
        return jnp.clip(jnp.round(x / scales), -_LARGEST, _LARGEST).astype(jnp.int8)
