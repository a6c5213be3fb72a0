"""Heads on TPUs, by a kernel. Imported on request."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from sgljax_engine.kernels.tpu.rotate import rotate_heads, tokens_tile
from sgljax_engine.layers.target import kv_axes

LANES = 128
"""Lanes of a vector register; a head fills some."""


@dataclasses.dataclass(frozen=True)
class TpuHeads:
    """Norm and rotary embedding of heads. Static and hashable.

    Attributes:
        mesh: Axes over which heads are sharded; None on one device. Kv heads are sharded over those
            that `kv_axes` says, and copied over the others.
        interpret: As of `pl.pallas_call`; for tests.
    """

    mesh: jax.sharding.AbstractMesh | None = None
    interpret: Any = False

    def serves(self, x_TNH: jax.Array) -> bool:
        """Whether the heads, and their tokens, fill tiles of memory on the chip."""
        num_tokens, _, head_dim = x_TNH.shape
        return num_tokens % tokens_tile(x_TNH.dtype) == 0 and head_dim % LANES == 0

    def rotate(
        self,
        x_TNH: jax.Array,
        norm: tuple[jax.Array, float, float] | None,
        sin: jax.Array,
        cos: jax.Array,
    ) -> jax.Array:
        """Rotary embedding of heads, after their norm if there is one; see `rotate_heads`."""
        run = functools.partial(rotate_heads, interpret=self.interpret)
        if self.mesh is None:
            return run(x_TNH, norm, sin, cos)
        heads = P(None, kv_axes(self.mesh.shape, x_TNH.shape[1]))
        weight, (eps, offset) = (None, (0.0, 0.0)) if norm is None else (norm[0], norm[1:])

        def call(x: Any, weight: Any, sin: Any, cos: Any) -> jax.Array:
            return run(x, None if weight is None else (weight, eps, offset), sin, cos)

        return jax.shard_map(
            call,
            mesh=self.mesh,
            in_specs=(heads, P(), P(), P()),
            out_specs=heads,
            check_vma=False,
        )(x_TNH, weight, sin, cos)
