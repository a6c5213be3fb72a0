"""Host pages in the layout of attention on TPUs, and back."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from sgljax_engine.attention.tpu import pack_heads
from sgljax_engine.cache.kv_pages import PageLayout


def pack(layout: PageLayout, pages: np.ndarray) -> np.ndarray:
    """[N, num_kv_heads, page_size, head_dim] as [N, num_rows, page_size, row_size]."""
    count, heads, size, dim = pages.shape
    shards = pages.reshape(count * layout.num_shards, heads // layout.num_shards, size, dim)
    rows = np.asarray(pack_heads(jnp.asarray(shards), layout.heads_per_row))
    return rows.reshape(count, layout.num_rows, size, layout.row_size)


def unpack(layout: PageLayout, pages: np.ndarray) -> np.ndarray:
    """[N, num_rows, page_size, row_size] as [N, num_kv_heads, page_size, head_dim]."""
    count, _, size, _ = pages.shape
    parts = pages.reshape(count, layout.num_shards, -1, size, layout.heads_per_row, layout.head_dim)
    heads = parts.swapaxes(3, 4).reshape(count, layout.num_shards, -1, size, layout.head_dim)
    used = heads[:, :, : layout.num_kv_heads // layout.num_shards]
    return used.reshape(count, layout.num_kv_heads, size, layout.head_dim)
