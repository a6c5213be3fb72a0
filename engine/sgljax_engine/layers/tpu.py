"""Heads on TPUs, by kernels. Imported on request."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from sgljax_engine.kernels.tpu.delta_step import SUBLANES, delta_step
from sgljax_engine.kernels.tpu.paged_sizes import LANES
from sgljax_engine.kernels.tpu.rotate import rotate_heads, tokens_tile
from sgljax_engine.layers.delta_net import Heads
from sgljax_engine.layers.target import kv_axes


@dataclasses.dataclass(frozen=True)
class TpuHeads:
    """Norm and rotary embedding of heads, and the delta rule of one token. Static and hashable."""

    mesh: jax.sharding.AbstractMesh | None = None
    interpret: Any = False

    def serves(self, x_TNH: jax.Array) -> bool:
        num_tokens, _, head_dim = x_TNH.shape
        return num_tokens % tokens_tile(x_TNH.dtype) == 0 and head_dim % LANES == 0

    def rotate(
        self,
        x_TNH: jax.Array,
        norm: tuple[jax.Array, float, float] | None,
        sin: jax.Array,
        cos: jax.Array,
    ) -> jax.Array:
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

    def serves_states(self, state: jax.Array) -> bool:
        _, num_heads, *sizes = state.shape
        num_heads //= self._num_shards(num_heads)
        is_whole = num_heads < SUBLANES or num_heads % SUBLANES == 0
        return is_whole and all(size % LANES == 0 for size in sizes)

    def delta_step(
        self,
        states: jax.Array,
        heads: Heads,
        decay: jax.Array,
        rate: jax.Array,
        slots: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        rows, (_, num_heads, _, width) = len(slots), states.shape
        q, k = (jnp.repeat(x, num_heads // x.shape[1], axis=1) for x in (heads.q, heads.k))
        run = functools.partial(delta_step, interpret=self.interpret)
        v = heads.v.reshape(rows, num_heads, width)
        arguments = states, slots, q, k, v, jnp.exp(decay), rate
        if self.mesh is None:
            return run(*arguments)
        shards = P(None, kv_axes(self.mesh.shape, num_heads))
        in_specs = shards, P(), *[shards] * 5
        return jax.shard_map(
            run, mesh=self.mesh, in_specs=in_specs, out_specs=shards, check_vma=False
        )(*arguments)

    def _num_shards(self, num_heads: int) -> int:
        if self.mesh is None:
            return 1
        return math.prod(self.mesh.shape[axis] for axis in kv_axes(self.mesh.shape, num_heads))
