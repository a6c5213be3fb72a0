"""Kernels of GPUs that are batch-invariant: a token has the same bits whatever it is computed with.

Imported where such kernels may run: Pallas takes a tenth of a second to import.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp

from sgljax_engine.kernels.gpu import invariant
from sgljax_engine.kernels.gpu import linear as fused
from sgljax_engine.layers.fused import FusedProducts
from sgljax_engine.layers.kernels import Weight, XlaKernels
from sgljax_engine.layers.rope import constant_timescales, rope_angles


@dataclasses.dataclass(frozen=True)
class InvariantKernels(XlaKernels):
    """`XlaKernels` whose sums are those of `kernels.gpu`, for models that `is_served` takes."""

    interpret: bool = False

    @classmethod
    def make(cls, *, interpret: bool = False) -> InvariantKernels:
        return cls(fused=FusedProducts(is_fixed=True, interpret=interpret), interpret=interpret)

    @property
    def is_batch_invariant(self) -> bool:
        return True

    def linear(self, weight: Weight, x: jax.Array) -> jax.Array:
        assert isinstance(weight, jax.Array)
        return invariant.linear(x, weight, interpret=self.interpret)

    def unembed(self, table_VD: Weight, hidden_TD: jax.Array) -> jax.Array:
        assert isinstance(table_VD, jax.Array)
        return invariant.unembed(hidden_TD, table_VD, interpret=self.interpret)

    def norm(self, x: jax.Array, weight: jax.Array | None, eps: float, offset: float) -> jax.Array:
        return invariant.rms_norm(x, weight, eps, offset, interpret=self.interpret)

    def rope_tables(
        self, positions: jax.Array, timescales: Callable[[], jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        constants = jnp.asarray(constant_timescales(timescales))
        angles = rope_angles(positions, constants)[:, 0]
        sin, cos = invariant.sines(angles, interpret=self.interpret)
        return sin[:, None], cos[:, None]


def is_served(sizes: Iterable[Sequence[int]], dtype: jnp.dtype) -> bool:
    """Whether the kernels take weights [in, out] of these sizes and this dtype, not quantised."""
    return dtype in fused.DTYPES and all(fused.is_size_served(*size) for size in sizes)
