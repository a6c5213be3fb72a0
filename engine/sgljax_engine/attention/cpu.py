"""JIT-compiled CPU kernels: one CPU, float32; see `sgljax_engine.kernels.cpu`.

The kernels take features first. A token-major input was transposed just before, since activations
are features first too; XLA then drops both transposes.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from sgljax_engine.attention.base import AttentionBackend, AttentionOptions, BlockTables
from sgljax_engine.cache.kv_pages import LayerKV
from sgljax_engine.kernels.cpu.attention import block_attention, decode_attention
from sgljax_engine.kernels.cpu.attention_tile import AttentionShape
from sgljax_engine.kernels.cpu.machine import host_vectors
from sgljax_engine.layers.target import Target, require_backend


def native_attention(
    q_NQDh: jax.Array, layer: LayerKV, tables: BlockTables, options: AttentionOptions
) -> jax.Array:
    """The `PagedAttention` of JIT-compiled CPU kernels."""
    num_heads, head_dim = q_NQDh.shape[2:]
    out = block_attention(
        _features_first(q_NQDh.reshape(-1, num_heads, head_dim)),
        layer.k,
        layer.v,
        tables.page_table,
        tables.positions,
        tables.kv_lens,
        _shape(num_heads, layer, options),
    )
    return out.T.reshape(q_NQDh.shape)


def native_decode_attention(
    q_BDh: jax.Array,
    k_BKh: jax.Array,
    v_BKh: jax.Array,
    layer: LayerKV,
    tables: BlockTables,
    options: AttentionOptions,
) -> tuple[jax.Array, LayerKV]:
    """The `DecodeAttention` of JIT-compiled CPU kernels."""
    out, k_pages, v_pages = decode_attention(
        _features_first(q_BDh),
        _features_first(k_BKh),
        _features_first(v_BKh),
        layer.k,
        layer.v,
        tables.page_table,
        tables.kv_lens,
        _shape(q_BDh.shape[1], layer, options),
    )
    return out.T.reshape(q_BDh.shape), LayerKV(k_pages, v_pages)


def native_problem(target: Target, head_dims: Sequence[int]) -> str | None:
    """Why the kernels cannot be used; None if they can."""
    problem = target.cpu_kernels_problem()
    if problem is not None:
        return problem  # host_vectors() needs llvmlite, which may be missing
    lanes = host_vectors().lanes
    odd = [head_dim for head_dim in head_dims if head_dim % lanes]
    return f"it needs a head_dim that is a multiple of {lanes}, got {odd[0]}" if odd else None


def native_backend(target: Target, head_dims: Sequence[int]) -> AttentionBackend:
    """The backend "native".

    Raises:
        InvalidConfigError: when it is not available.
    """
    require_backend(native_problem(target, head_dims), "attention_backend 'native'")
    return AttentionBackend("native", native_attention, native_attention, native_decode_attention)


def _features_first(x: jax.Array) -> jax.Array:
    return jnp.moveaxis(x, 0, -1)


def _shape(num_heads: int, layer: LayerKV, options: AttentionOptions) -> AttentionShape:
    _, num_kv_heads, page_size, head_dim = layer.k.shape
    return AttentionShape(
        num_heads,
        num_kv_heads,
        head_dim,
        page_size,
        options.scale,
        options.sliding_window,
        options.logit_softcap,
    )
