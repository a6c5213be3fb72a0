"""The attention backend "tpu": a Pallas kernel that also writes the cache. Imported on request."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from sgljax_engine.attention.base import AttentionBackend, AttentionOptions, BlockTables
from sgljax_engine.attention.batch_invariant import ordered_backend
from sgljax_engine.cache.kv_pages import LayerKV
from sgljax_engine.errors import InvalidConfigError
from sgljax_engine.kernels.tpu.paged_attention import Scores, paged_attention
from sgljax_engine.layers.target import Target

LANES = 128
"""A head_dim is a multiple of the lanes of a vector register."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TpuAttention:
    """All three forms of attention, by one kernel. Static and hashable.

    Attributes:
        mesh: Axes over which query heads are sharded; None on one device. Kv heads are sharded over
            the first, and copied over the second if there is one.
        interpret: As of `pl.pallas_call`; for tests.
    """

    mesh: jax.sharding.AbstractMesh | None = None
    interpret: Any = False

    def attend(
        self, q_NQDh: jax.Array, layer: LayerKV, tables: BlockTables, options: AttentionOptions
    ) -> jax.Array:
        """See `base.PagedAttention`."""
        return self._call(q_NQDh, None, layer, tables, options)[0]

    def write_and_attend(
        self,
        q_NQDh: jax.Array,
        k_NQKh: jax.Array,
        v_NQKh: jax.Array,
        layer: LayerKV,
        tables: BlockTables,
        options: AttentionOptions,
    ) -> tuple[jax.Array, LayerKV]:
        """See `base.PrefillAttention`."""
        new = k_NQKh.astype(layer.k.dtype), v_NQKh.astype(layer.v.dtype)
        return self._call(q_NQDh, new, layer, tables, options)

    def decode(
        self,
        q_BDh: jax.Array,
        k_BKh: jax.Array,
        v_BKh: jax.Array,
        layer: LayerKV,
        tables: BlockTables,
        options: AttentionOptions,
    ) -> tuple[jax.Array, LayerKV]:
        """See `base.DecodeAttention`."""
        q, k, v = (x[:, None] for x in (q_BDh, k_BKh, v_BKh))
        out, layer = self.write_and_attend(q, k, v, layer, tables, options)
        return out[:, 0], layer

    def _call(
        self,
        q: jax.Array,
        new: tuple[jax.Array, jax.Array] | None,
        layer: LayerKV,
        tables: BlockTables,
        options: AttentionOptions,
    ) -> tuple[jax.Array, LayerKV]:
        def call(
            q: Any, new: Any, k: Any, v: Any, table: Any, starts: Any, kv_lens: Any
        ) -> tuple[jax.Array, jax.Array, jax.Array]:
            scores = Scores(*options)
            return paged_attention(
                q, new, k, v, table, starts, kv_lens, scores, interpret=self.interpret
            )

        run: Callable[..., Any] = call
        if self.mesh is not None:
            axes = self.mesh.axis_names
            heads, pages = P(None, None, axes), P(None, axes[0])
            fresh = None if new is None else (P(None, None, axes[0]),) * 2
            run = jax.shard_map(
                call,
                mesh=self.mesh,
                in_specs=(heads, fresh, pages, pages, P(), P(), P()),
                out_specs=(heads, pages, pages),
                check_vma=False,
            )
        starts = tables.positions[:, 0]
        out, k, v = run(q, new, layer.k, layer.v, tables.page_table, starts, tables.kv_lens)
        return out, LayerKV(k, v)


def tpu_problem(target: Target, head_dim: int) -> str | None:
    """Why the kernel cannot be used; None if it can."""
    if target.platform != "tpu":
        return f"it is for TPUs, the engine's devices are of kind {target.platform!r}"
    if head_dim % LANES:
        return f"it needs a head_dim that is a multiple of {LANES}, got {head_dim}"
    return None


def tpu_backend(target: Target, head_dim: int) -> AttentionBackend:
    """The backend "tpu".

    Raises:
        InvalidConfigError: when it is not available.
    """
    problem = tpu_problem(target, head_dim)
    if problem is not None:
        raise InvalidConfigError(f"attention_backend 'tpu' cannot be had here: {problem}")
    return backend_of(attention_for(target))


@functools.cache
def attention_for(target: Target, interpret: Any = False) -> TpuAttention:
    """The attention of an engine's devices; the same object for equal ones, as JAX's caches need.

    Args:
        target: What the engine runs on.
        interpret: As of `pl.pallas_call`; for tests.
    """
    mesh = target.mesh if target.num_tensor_shards > 1 else None
    return TpuAttention(mesh=mesh, interpret=interpret)


def backend_of(attention: TpuAttention) -> AttentionBackend:
    """What the attention implies."""
    return AttentionBackend(
        "tpu",
        attention.attend,
        ordered_backend("tpu"),
        attention.decode,
        prefill=attention.write_and_attend,
    )
