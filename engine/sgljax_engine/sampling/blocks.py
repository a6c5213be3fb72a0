"""Rows of the vocabulary in blocks, on one device or several that each have an equal part of it.

Each device cuts its own part into blocks, so that none of them gets the logits of another: only
sums, maxima and the chosen blocks are exchanged.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

BLOCK = 128

NUM_SORTED = 64
"""Number of largest logits to sort: enough for usual settings of top-k and top-p."""

GROUP = 16
"""Size of the groups of entries that compete by their largest in the search for large logits."""


def in_blocks(values_BV: jax.Array, fill: float, num_shards: int, size: int = BLOCK) -> jax.Array:
    """Splits each row into blocks [B, N, size], with a padded last block in each shard."""
    padded = _padded_shards(values_BV, size, fill, num_shards)
    return padded.reshape(values_BV.shape[0], -1, size)


def sum_blocks(values_BV: jax.Array, num_shards: int) -> jax.Array:
    """Sums [B] over the vocabulary: of blocks, and then of their sums, which rounds less."""
    return jnp.sum(jnp.sum(in_blocks(values_BV, 0, num_shards), axis=-1), axis=-1)


def token_at(
    block: jax.Array, offset: jax.Array, vocab_size: int, num_shards: int, size: int = BLOCK
) -> jax.Array:
    """The token of an entry of `in_blocks`."""
    shard_size = vocab_size // num_shards
    blocks_each = -(-shard_size // size)
    shard, block = block // blocks_each, block % blocks_each
    return shard * shard_size + block * size + offset


def pick_block(blocks: jax.Array, block_B: jax.Array) -> jax.Array:
    return jnp.take_along_axis(blocks, block_B[:, None, None], axis=1)[:, 0]


def pick(values: jax.Array, index: jax.Array) -> jax.Array:
    return jnp.take_along_axis(values, index[:, None], axis=-1)[:, 0]


def argmax(values_BV: jax.Array, num_shards: int) -> jax.Array:
    """The first index [B] of each row's largest entry.

    Searches only the first block with the largest maximum: XLA on CPUs vectorises maxima, but runs
    `jnp.argmax` entry by entry.
    """
    blocks = in_blocks(values_BV, -jnp.inf, num_shards)
    block = jnp.argmax(jnp.max(blocks, axis=-1), axis=-1).astype(jnp.int32)
    offset = jnp.argmax(pick_block(blocks, block), axis=-1).astype(jnp.int32)
    return token_at(block, offset, values_BV.shape[1], num_shards)


def largest(
    values_BV: jax.Array, num_shards: int, count: int = NUM_SORTED
) -> tuple[jax.Array, jax.Array]:
    """The `count` largest entries of each row, descending; all of a small vocabulary.

    They lie in the N groups with the largest maxima, since each of these maxima is at least as
    large as every entry of the other groups.

    Returns:
        The entries, and their tokens int32; both [B, N]. Of entries that equal the last one, other
        tokens may have been left out.
    """
    batch, vocab_size = values_BV.shape
    if vocab_size < count * GROUP:
        values, tokens = lax.top_k(values_BV, min(count, vocab_size))
        return values, tokens.astype(jnp.int32)
    padded = _padded_shards(values_BV, GROUP, -jnp.inf, num_shards)
    grouped = padded.reshape(batch, num_shards, GROUP, -1)
    num_groups = grouped.shape[3]
    maxima = jnp.max(grouped, axis=2)
    groups = lax.top_k(maxima.reshape(batch, -1), count)[1].astype(jnp.int32)
    first = groups // num_groups * (vocab_size // num_shards) + groups % num_groups
    member = jnp.arange(GROUP, dtype=jnp.int32) * num_groups
    if num_shards == 1:
        entries = jnp.take_along_axis(grouped[:, 0], groups[:, None, :], axis=2)
        tokens = first[:, None, :] + member[None, :, None]
    else:
        by_group = grouped.swapaxes(2, 3).reshape(batch, -1, GROUP)
        entries = jnp.take_along_axis(by_group, groups[:, :, None], axis=1)
        tokens = first[:, :, None] + member[None, None]
    values, index = lax.top_k(entries.reshape(batch, -1), count)
    return values, jnp.take_along_axis(tokens.reshape(batch, -1), index, axis=1)


def _padded_shards(values_BV: jax.Array, multiple: int, fill: float, num_shards: int) -> jax.Array:
    """The parts of the vocabulary [B, num_shards, M], each padded to a multiple."""
    shards = values_BV.reshape(values_BV.shape[0], num_shards, -1)
    padding = ((0, 0), (0, 0), (0, -shards.shape[2] % multiple))
    return jnp.pad(shards, padding, constant_values=fill)
