"""The attention backend "pallas": a Pallas kernel for NVIDIA GPUs. Imported where it may run."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from sgljax_engine.attention.base import (
    AttentionOptions,
    BlockTables,
    NewTokens,
    Prologue,
    attend_to_tokens,
    map_tiles,
)
from sgljax_engine.cache.kv_pages import LayerKV, write_kv
from sgljax_engine.kernels.gpu.decode_attention import HeadNorms, decode_attention
from sgljax_engine.kernels.gpu.invariant import Slots, prepare_heads
from sgljax_engine.kernels.gpu.paged_attention import (
    HEAD_DIMS,
    Scores,
    most_invariant_blocks,
    paged_attention,
)
from sgljax_engine.kernels.gpu.prefill_attention import fills_gpu, prefill_attention
from sgljax_engine.kernels.gpu.shared_attention import QueryPrologue, shared_attention
from sgljax_engine.layers.basic import rms_norm
from sgljax_engine.layers.kernels import Kernels
from sgljax_engine.layers.rope import apply_rope
from sgljax_engine.layers.target import Target, kv_axes


@dataclasses.dataclass(frozen=True, kw_only=True)
class PallasAttention:
    """The `Attention` of NVIDIA GPUs.

    Attributes:
        is_fused: Take prompts that fill the GPU by `prefill_attention`, and tokens of decode from
            their projections on by `decode_attention`; on one GPU.
        is_invariant: Give a query the same bits in any batch, from its projections on; on one GPU.
        mesh: Axes over which query heads are sharded; None on one device. Kv heads are sharded over
            those that `kv_axes` says, and copied over the others.
        interpret: Run the kernel as plain JAX operations on any device. Slow; for tests.
    """

    name: str = "pallas"
    heads_per_row: int = 1
    verifies_blocks: bool = True
    shares_prompts: bool = True

    is_fused: bool = False
    is_invariant: bool = False
    mesh: jax.sharding.AbstractMesh | None = None
    interpret: bool = False

    @property
    def takes_projections(self) -> bool:
        return self.is_fused or self.is_invariant

    def attend(
        self,
        q_NQDh: jax.Array,
        layer: LayerKV,
        tables: BlockTables,
        options: AttentionOptions,
        sinks: jax.Array | None = None,
    ) -> jax.Array:
        """The output is 0 where `kv_lens` is 0."""

        def call(
            q: jax.Array, layer: LayerKV, tables: BlockTables, sinks: jax.Array | None
        ) -> jax.Array:
            tables = self._with_runs(tables, options)
            is_large = tables.runs is None and fills_gpu(q.shape, layer.k)
            if self.is_fused and layer.v is not None and is_large:
                scores = Scores(*options)
                where = tables.page_table, tables.positions, tables.kv_lens
                return prefill_attention(
                    q, layer.k, layer.v, *where, scores, sinks, interpret=self.interpret
                )
            attend = functools.partial(
                self._attend_to_pages, layer=layer, options=options, sinks=sinks
            )
            if not self.is_invariant:
                return attend((q, tables))
            # Each split of a long context has outputs of its own, which prompts have many of.
            most = most_invariant_blocks(q.shape, layer.k, tables.page_table.shape[1])
            if q.shape[0] <= most:
                return attend((q, tables))
            return map_tiles(attend, (q, tables._replace(runs=None)), q.shape[0], most)

        run: Callable[..., Any] = call
        if self.mesh is not None:
            heads = P(None, None, self.mesh.axis_names)
            pages = P(None, kv_axes(self.mesh.shape, layer.k.shape[1]))
            run = jax.shard_map(
                call,
                mesh=self.mesh,
                in_specs=(heads, pages, P(), None if sinks is None else P(self.mesh.axis_names)),
                out_specs=heads,
                check_vma=False,
            )
        return run(q_NQDh, layer, tables, sinks)

    def _with_runs(self, tables: BlockTables, options: AttentionOptions) -> BlockTables:
        """Tables with runs where they are used.

        A window moves on. The same bits with runs as without were seen for one query only.
        """
        has_drafts = tables.positions.shape[1] > 1
        if options.sliding_window is None and not (self.is_invariant and has_drafts):
            return tables
        return tables._replace(runs=None)

    def _attend_to_pages(
        self,
        args: tuple[jax.Array, BlockTables],
        layer: LayerKV,
        options: AttentionOptions,
        sinks: jax.Array | None,
    ) -> jax.Array:
        q, (page_table, positions, kv_lens, runs) = args
        scores, shared = Scores(*options), None
        if runs is not None:
            shared = shared_attention(
                q,
                *(layer.k, layer.v, page_table, kv_lens, runs, scores, sinks, layer.scales),
                is_invariant=self.is_invariant,
                interpret=self.interpret,
            )
        return paged_attention(
            q,
            *(layer.k, layer.v, page_table, positions, kv_lens, scores, sinks, layer.scales),
            shared=shared,
            is_invariant=self.is_invariant,
            interpret=self.interpret,
        )

    def write_and_attend(
        self,
        new: NewTokens,
        layer: LayerKV,
        tables: BlockTables,
        slots: jax.Array,
        options: AttentionOptions,
    ) -> tuple[jax.Array, LayerKV]:
        """Implements `Attention`."""
        q, k, v, prologue, sinks = new
        if v is None or layer.v is None:
            layer = write_kv(layer, k, None, slots)
            return attend_to_tokens(self, q, layer, tables, options, sinks), layer
        if prologue is not None and self.is_fused and tables.positions.shape[1] == 1:
            (rope, norms), scores, shared = _rope_and_norms(prologue), Scores(*options), None
            where = tables.page_table, tables.kv_lens
            runs = self._with_runs(tables, options).runs
            if runs is not None:
                shared = shared_attention(
                    q[:, None],
                    *(layer.k, layer.v, *where, runs, scores),
                    prologue=QueryPrologue(rope, norms),
                    interpret=self.interpret,
                )
            out, pages = decode_attention(
                *(q, k, v, rope, norms, (layer.k, layer.v), *where, scores, sinks),
                shared=shared,
                interpret=self.interpret,
            )
            return out, LayerKV(*pages)
        if prologue is not None and self.is_invariant:
            into, (rope, norms) = Slots(layer.k, layer.v, slots), _rope_and_norms(prologue)
            q, pages = prepare_heads(q, k, v, rope, norms, into, interpret=self.interpret)
            layer = LayerKV(*pages)
        else:
            if prologue is not None:
                q, k = (
                    _rotated(q, prologue, prologue.q_norm),
                    _rotated(k, prologue, prologue.k_norm),
                )
            layer = write_kv(layer, k, v, slots)
        return attend_to_tokens(self, q, layer, tables, options, sinks), layer


def _rotated(x: jax.Array, prologue: Prologue, norm: jax.Array | None) -> jax.Array:
    """Heads with rotary embedding, after their norm if there is one."""
    if norm is not None:
        x = rms_norm(x, norm, prologue.eps, prologue.offset)
    return apply_rope(x, prologue.sin, prologue.cos)


def _rope_and_norms(
    prologue: Prologue,
) -> tuple[tuple[jax.Array, jax.Array], HeadNorms | None]:
    sin, cos, q_norm, k_norm, eps, offset = prologue
    norms = None if q_norm is None or k_norm is None else HeadNorms(q_norm, k_norm, eps, offset)
    return (sin[:, 0], cos[:, 0]), norms


def gpu_problem(target: Target, head_dims: Sequence[int]) -> str | None:
    if target.platform != "gpu":
        return f"it is for GPUs, the engine's devices are of kind {target.platform!r}"
    odd = [head_dim for head_dim in head_dims if head_dim not in HEAD_DIMS]
    return f"it needs a head_dim of {HEAD_DIMS}, got {odd[0]}" if odd else None


def gpu_attention(
    target: Target, kernels: Kernels, *, is_int8: bool = False, interpret: bool = False
) -> PallasAttention:
    """Attention on GPUs. Pages of 8 bits are not read by the fused kernels."""
    if target.num_tensor_shards > 1:
        return PallasAttention(mesh=target.mesh, interpret=interpret)
    is_invariant = kernels.is_batch_invariant
    is_fused = kernels.fused is not None and not is_invariant and not is_int8
    return PallasAttention(is_fused=is_fused, is_invariant=is_invariant, interpret=interpret)
