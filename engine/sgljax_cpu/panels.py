"""The layout of weights for JIT-compiled CPU kernels: panels of 16 outputs.

A weight [in, out] becomes [panels, in, 16], the last panel filled up with zeros: a vector holds
what one input adds to 16 neighbouring outputs, and a panel is read from start to end.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

PANEL = 16
"""Outputs of a panel: a cache line of float32."""


def num_panels(num_outputs: int) -> int:
    """Panels of a weight."""
    return -(-num_outputs // PANEL)


def pack(weight: jax.Array) -> jax.Array:
    """[..., in, out] to [..., panels, in, 16]."""
    *stacked, num_inputs, num_outputs = weight.shape
    count = num_panels(num_outputs)
    padding = [(0, 0)] * (weight.ndim - 1) + [(0, count * PANEL - num_outputs)]
    panels = jnp.pad(weight, padding).reshape(*stacked, num_inputs, count, PANEL)
    return panels.swapaxes(-2, -3)


def unpack(panels: jax.Array, num_outputs: int) -> jax.Array:
    """The inverse of `pack`."""
    *stacked, count, num_inputs, _ = panels.shape
    rows = panels.swapaxes(-2, -3).reshape(*stacked, num_inputs, count * PANEL)
    return rows[..., :num_outputs]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Panels:
    """A weight in panels, inside a program.

    Attributes:
        array: [..., panels, in, 16].
        num_outputs: Outputs of the weight.
        scale: [num_outputs] float32, factors of an int8 weight; None of others.
    """

    array: jax.Array
    num_outputs: int = dataclasses.field(metadata={"static": True})
    scale: jax.Array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape, [..., in, out]."""
        *stacked, _, num_inputs, _ = self.array.shape
        return (*stacked, num_inputs, self.num_outputs)

    def astype(self, dtype: jnp.dtype) -> Panels:
        """The weight in another dtype."""
        return Panels(self.array.astype(dtype), self.num_outputs, self.scale)
