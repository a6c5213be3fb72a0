"""The attention backend "native": JIT-compiled CPU kernels, on one CPU; see `sgljax_cpu`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax

import sgljax_cpu
from sgljax_engine.attention.base import AttentionOptions, BlockTables, NewTokens, attend_to_tokens
from sgljax_engine.cache.kv_pages import LayerKV, stored_tokens
from sgljax_engine.layers.target import Target


@dataclasses.dataclass(frozen=True)
class NativeAttention:
    """The `Attention` of JIT-compiled CPU kernels. A query has the same bits in any batch."""

    name: str = "native"
    heads_per_row: int = 1
    takes_projections: bool = False
    verifies_blocks: bool = False
    shares_prompts: bool = False

    def attend(
        self,
        q_NQDh: jax.Array,
        layer: LayerKV,
        tables: BlockTables,
        options: AttentionOptions,
        sinks: jax.Array | None = None,
    ) -> jax.Array:
        num_heads, head_dim = q_NQDh.shape[2:]
        out = sgljax_cpu.paged_attention(
            q_NQDh.reshape(-1, num_heads, head_dim).astype("float32"),
            layer.k,
            layer.values,
            tables.page_table,
            tables.positions,
            tables.kv_lens,
            _shape(num_heads, layer, options),
            sinks,
            layer.scales,
        )
        return out.reshape(q_NQDh.shape).astype(q_NQDh.dtype)

    def write_and_attend(
        self,
        new: NewTokens,
        layer: LayerKV,
        tables: BlockTables,
        slots: jax.Array,
        options: AttentionOptions,
    ) -> tuple[jax.Array, LayerKV]:
        layer = native_write_kv(layer, new.k, new.v, slots)
        return attend_to_tokens(self, new.q, layer, tables, options, new.sinks), layer


def native_write_kv(
    layer: LayerKV, k_TKh: jax.Array, v_TKh: jax.Array | None, slots: jax.Array
) -> LayerKV:
    """`kv_pages.write_kv` by a kernel."""
    new = stored_tokens(layer, k_TKh, v_TKh)
    if layer.k_scale is None:
        new = jax.tree.map(lambda x: x.astype("float32"), new)
    pages, structure = jax.tree.flatten(layer)
    return jax.tree.unflatten(structure, sgljax_cpu.write_kv(jax.tree.leaves(new), pages, slots))


def native_problem(target: Target, head_dims: Sequence[int]) -> str | None:
    problem = target.cpu_kernels_problem()
    if problem is not None:
        return problem  # host_vectors() needs llvmlite, which may be missing
    lanes = sgljax_cpu.host_vectors().lanes
    odd = [head_dim for head_dim in head_dims if head_dim % lanes]
    return f"it needs a head_dim that is a multiple of {lanes}, got {odd[0]}" if odd else None


def _shape(num_heads: int, layer: LayerKV, options: AttentionOptions) -> sgljax_cpu.AttentionShape:
    _, num_kv_heads, page_size, head_dim = layer.k.shape
    return sgljax_cpu.AttentionShape(
        num_heads,
        num_kv_heads,
        head_dim,
        page_size,
        options.scale,
        options.sliding_window,
        options.logit_softcap,
        layer.k.dtype.name,
    )
