"""Projections with weights in int8 and a factor for each output; see `weights.forms`."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from sgljax_engine.layers.basic import embed, linear, unembed

SCALE_SUFFIX = "_scale"
"""Suffix of a quantised weight's name, for its factors among the engine's weights."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Int8Weight:
    """A quantised weight inside a program.

    Shape: values: int8, [in, out]. scale: [outputs] float32.
    """

    values: jax.Array
    scale: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def astype(self, dtype: jnp.dtype) -> Int8Weight:
        """The weight itself: products choose their dtype."""
        del dtype
        return self


def int8_linear(x: jax.Array, weight: Int8Weight) -> jax.Array:
    """`x @ W` over features; the factors multiply the result."""
    product = linear(x, weight.values.astype(x.dtype))
    return product * weight.scale[None].astype(x.dtype)


def int8_unembed(
    x_TD: jax.Array, table_VD: Int8Weight, dtype: jax.typing.DTypeLike | None = None
) -> jax.Array:
    """Logits [T, V] float32; products are rounded as `unembed` does."""
    return unembed(x_TD, table_VD.values.astype(x_TD.dtype), dtype) * table_VD.scale[None, :]


def int8_embed(table_VD: Int8Weight, ids_T: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Rows [T, D] of a table."""
    rows = embed(table_VD.values, ids_T).astype(jnp.float32)
    return (rows * embed(table_VD.scale, ids_T)[:, None]).astype(dtype)
