"""The attention backend "pallas": a Pallas kernel for NVIDIA GPUs. Imported where it may run."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from sgljax_engine.attention.base import (
    AttentionBackend,
    AttentionOptions,
    BlockTables,
    FusedAttention,
    Projections,
    Prologue,
    map_tiles,
)
from sgljax_engine.cache.kv_pages import LayerKV
from sgljax_engine.kernels.gpu.decode_attention import HeadNorms, decode_attention
from sgljax_engine.kernels.gpu.invariant import Slots, prepare_heads
from sgljax_engine.kernels.gpu.paged_attention import (
    HEAD_DIMS,
    Scores,
    most_invariant_blocks,
    paged_attention,
)
from sgljax_engine.kernels.gpu.prefill_attention import fills_gpu, prefill_attention
from sgljax_engine.layers.target import Target, kv_axes, require_backend


@dataclasses.dataclass(frozen=True, kw_only=True)
class PallasAttention:
    """The `PagedAttention` backend "pallas", for prefill and decode. Static and hashable.

    Attributes:
        joins_blocks: Take prompts that fill the GPU by `prefill_attention`.
        is_invariant: Give a query the same bits in any batch; then it joins no blocks.
        mesh: Axes over which query heads are sharded; None on one device. Kv heads are sharded over
            those that `kv_axes` says, and copied over the others.
        interpret: Run the kernel as plain JAX operations on any device. Slow; for tests.
    """

    joins_blocks: bool = True
    is_invariant: bool = False
    mesh: jax.sharding.AbstractMesh | None = None
    interpret: bool = False

    def __call__(
        self, q_NQDh: jax.Array, layer: LayerKV, tables: BlockTables, options: AttentionOptions
    ) -> jax.Array:
        """Attends; `head_dim` is one of `HEAD_DIMS`. The output is 0 where `kv_lens` is 0."""

        def call(q: jax.Array, layer: LayerKV, tables: BlockTables) -> jax.Array:
            if self.joins_blocks and not self.is_invariant and fills_gpu(q.shape, layer.k):
                scores = Scores(*options)
                return prefill_attention(
                    q, layer.k, layer.v, *tables, scores, interpret=self.interpret
                )
            attend = functools.partial(self._attend_to_pages, layer=layer, options=options)
            if not self.is_invariant:
                return attend((q, tables))
            # Each split of a long context has outputs of its own, which prompts have many of.
            most = most_invariant_blocks(q.shape, layer.k, tables.page_table.shape[1])
            if q.shape[0] <= most:
                return attend((q, tables))
            return map_tiles(attend, (q, tables), q.shape[0], most)

        run: Callable[..., Any] = call
        if self.mesh is not None:
            heads = P(None, None, self.mesh.axis_names)
            pages = P(None, kv_axes(self.mesh.shape, layer.k.shape[1]))
            run = jax.shard_map(
                call,
                mesh=self.mesh,
                in_specs=(heads, pages, P()),
                out_specs=heads,
                check_vma=False,
            )
        return run(q_NQDh, layer, tables)

    def _attend_to_pages(
        self, args: tuple[jax.Array, BlockTables], layer: LayerKV, options: AttentionOptions
    ) -> jax.Array:
        q, tables = args
        return paged_attention(
            q,
            layer.k,
            layer.v,
            *tables,
            Scores(*options),
            is_invariant=self.is_invariant,
            interpret=self.interpret,
        )

    def from_projections(
        self, new: Projections, layer: LayerKV, tables: BlockTables, options: AttentionOptions
    ) -> tuple[jax.Array, LayerKV]:
        """Implements `base.ProjectionAttention`, on one device."""
        out, (k, v) = decode_attention(
            *new[:3],
            *_rope_and_norms(new.prologue),
            (layer.k, layer.v),
            tables.page_table,
            tables.kv_lens,
            Scores(*options),
            interpret=self.interpret,
        )
        return out, LayerKV(k, v)

    def prepare(
        self, new: Projections, layer: LayerKV | None, slots: jax.Array | None
    ) -> tuple[jax.Array, LayerKV]:
        """Implements `base.PrepareHeads`, on one device."""
        into = None if layer is None or slots is None else Slots(layer.k, layer.v, slots)
        rope, norms = _rope_and_norms(new.prologue)
        q, (k, v) = prepare_heads(*new[:3], rope, norms, into, interpret=self.interpret)
        return q, LayerKV(k, v)


def _rope_and_norms(
    prologue: Prologue,
) -> tuple[tuple[jax.Array, jax.Array], HeadNorms | None]:
    """A prologue as the kernels take it."""
    sin, cos, q_norm, k_norm, eps, offset = prologue
    norms = None if q_norm is None or k_norm is None else HeadNorms(q_norm, k_norm, eps, offset)
    return (sin[:, 0], cos[:, 0]), norms


def gpu_problem(target: Target, head_dims: Sequence[int]) -> str | None:
    """Why the kernel cannot be used; None if it can."""
    if target.platform != "gpu":
        return f"it is for GPUs, the engine's devices are of kind {target.platform!r}"
    odd = [head_dim for head_dim in head_dims if head_dim not in HEAD_DIMS]
    return f"it needs a head_dim of {HEAD_DIMS}, got {odd[0]}" if odd else None


def gpu_backend(target: Target, head_dims: Sequence[int]) -> AttentionBackend:
    """The backend "pallas".

    Raises:
        InvalidConfigError: when it is not available.
    """
    require_backend(gpu_problem(target, head_dims), "attention_backend 'pallas'")
    return backend_of(target)


def backend_of(target: Target, *, interpret: bool = False) -> AttentionBackend:
    """The backend "pallas" on any devices; arguments as of `attention_for`."""
    attention = attention_for(target, joins_blocks=False, interpret=interpret)
    invariant = attention_for(target, is_invariant=True, interpret=interpret)
    if attention.mesh is not None:
        return AttentionBackend("pallas", attention, invariant)
    joining = attention_for(target, interpret=interpret)
    fused = FusedAttention(joining, joining.from_projections)
    return AttentionBackend("pallas", attention, invariant, prepare=invariant.prepare, fused=fused)


@functools.cache
def attention_for(
    target: Target,
    *,
    joins_blocks: bool = True,
    is_invariant: bool = False,
    interpret: bool = False,
) -> PallasAttention:
    """The attention of an engine's devices; the same object for equal ones, as JAX's caches need.

    Args:
        target: What the engine runs on.
        joins_blocks: As of `PallasAttention`.
        is_invariant: As of `PallasAttention`.
        interpret: As of `PallasAttention`; for tests.
    """
    mesh = target.mesh if target.num_tensor_shards > 1 else None
    return PallasAttention(
        joins_blocks=joins_blocks, is_invariant=is_invariant, mesh=mesh, interpret=interpret
    )
