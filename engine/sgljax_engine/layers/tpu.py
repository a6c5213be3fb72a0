"""Computations on each token on TPUs: XLA's, and a kernel for heads. Imported on request."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from sgljax_engine.kernels.tpu.rotate import rotate_heads, tokens_tile
from sgljax_engine.layers.kernels import Options, XlaKernels
from sgljax_engine.layers.target import kv_axes

LANES = 128
"""Lanes of a vector register; a head fills some."""


@dataclasses.dataclass(frozen=True)
class TpuKernels(XlaKernels):
    """XLA's code; norm and rotary embedding of heads by a kernel, where tokens fill its tiles.

    Attributes:
        interpret: As of `pl.pallas_call`; for tests.
    """

    interpret: Any = False

    def rotate(
        self,
        x: jax.Array,
        norm: tuple[jax.Array, float, float] | None,
        sin: jax.Array,
        cos: jax.Array,
        options: Options,
    ) -> jax.Array:
        """Rotary embedding of heads, after their norm if there is one."""
        num_tokens, num_heads, head_dim = x.shape
        is_whole = num_tokens % tokens_tile(x.dtype) == 0 and head_dim % LANES == 0
        if options.is_batch_invariant or not is_whole:
            return super().rotate(x, norm, sin, cos, options)
        run = functools.partial(rotate_heads, interpret=self.interpret)
        if self.mesh is None:
            return run(x, norm, sin, cos)
        heads = P(None, kv_axes(self.mesh.shape, num_heads))
        weight, (eps, offset) = (None, (0.0, 0.0)) if norm is None else (norm[0], norm[1:])

        def call(x: Any, weight: Any, sin: Any, cos: Any) -> jax.Array:
            return run(x, None if weight is None else (weight, eps, offset), sin, cos)

        return jax.shard_map(
            call,
            mesh=self.mesh,
            in_specs=(heads, P(), P(), P()),
            out_specs=heads,
            check_vma=False,
        )(x, weight, sin, cos)
