"""Products of tokens sorted by expert with their expert's weight, block by block."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

_MAX_BLOCK = 64


def linear_in_blocks(weights: jax.Array, x: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """`Kernels.ragged_linear` in a loop over blocks of tokens of one expert; for CPUs.

    Its time follows the experts that have tokens. A block may reach beyond its expert's tokens:
    what it writes there belongs to later blocks, which overwrite it.
    """
    num_tokens, num_experts = x.shape[0], weights.shape[0]
    size = block_size(num_tokens, num_experts)
    ends = jnp.cumsum(group_sizes, dtype=jnp.int32)
    num_blocks = (group_sizes + size - 1) // size
    last_blocks = jnp.cumsum(num_blocks, dtype=jnp.int32)
    padded = jnp.pad(x, ((0, size), (0, 0)))

    def add_block(index: jax.Array, out: jax.Array) -> jax.Array:
        expert = jnp.searchsorted(last_blocks, index, side="right").astype(jnp.int32)
        left = last_blocks[expert] - index  # blocks of the expert from this one on
        start = ends[expert] - group_sizes[expert] + (num_blocks[expert] - left) * size
        weight = lax.dynamic_index_in_dim(weights, expert, keepdims=False)
        block = lax.dynamic_slice_in_dim(padded, start, size)
        return lax.dynamic_update_slice_in_dim(out, block @ weight, start, 0)

    empty = jnp.zeros((num_tokens + size, weights.shape[2]), x.dtype)
    return lax.fori_loop(0, last_blocks[-1], add_block, empty)[:num_tokens]


def block_size(num_tokens: int, num_experts: int) -> int:
    """Tokens of a block: a power of two near the mean number of tokens of an expert."""
    size = 1
    while size < min(num_tokens / num_experts, _MAX_BLOCK):
        size *= 2
    return size
