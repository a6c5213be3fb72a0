"""Runs of neighbouring blocks with the same first pages, whose keys are read once for all of them.

Attention over a shared prefix, put together with that over the rest by the sums of both, is that of
Hydragen (Juravsky et al., arXiv 2402.05099) and of cascade attention.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

MIN_SHARED_KEYS = 128
"""Fewer shared keys are not worth the softmax that one kernel hands to the other."""

_RUN_QUERIES = 64
"""Queries of a run that share a kv head: the largest tile of rows that the kernels have."""

_MIN_RUN_BLOCKS = 16
"""Where more query heads share a kv head, a run takes several tiles; samples come in sixteens."""

_BLOCKS_PER_RUN = 4
"""Batches have room for so many times fewer runs than blocks; other runs are none."""


class SharedRuns(NamedTuple):
    """Blocks of queries that see the same first keys, which are in whole pages.

    Shape: members: [M, R] int32, the blocks of each run, the first ones; N beyond. num_keys: [M]
        int32, the keys that they share; 0 for unused runs. places: [N] int32, where a block is
        among the members [M * R]; M * R for a block of no run. begins: [N] int32, the keys that a
        block shares with its run; 0 for a block of no run. queries: [q] int32, from 0 on: the
        queries of a block that may be used, of its Q.
    """

    members: jax.Array
    num_keys: jax.Array
    places: jax.Array
    begins: jax.Array
    queries: jax.Array


def run_blocks(num_heads: int, num_kv_heads: int, num_queries: int = 1) -> int:
    """Most blocks, of which so many queries may be used, in a run."""
    filling = _RUN_QUERIES * num_kv_heads // (num_heads * num_queries)
    return max(filling, _MIN_RUN_BLOCKS // num_queries, _BLOCKS_PER_RUN)


def find_runs(
    page_table: jax.Array,
    num_keys: jax.Array,
    page_size: int,
    min_keys: jax.Array,
    size: int,
    num_queries: int = 1,
) -> SharedRuns:
    """The runs among neighbours that share `min_keys` keys or more.

    A run ends where a block shares less than half as much with the one before as neighbours do: a
    question and its samples are a run, even if all questions begin alike.

    Shape: page_table: [N, P] int32. num_keys: [N] int32, keys that are in the pages. `size` is the
    most blocks of a run, R; `num_queries` are q.
    """
    num_blocks, width = page_table.shape
    size = min(size, num_blocks)
    num_runs = max(num_blocks // _BLOCKS_PER_RUN, 1)
    number = jnp.arange(num_blocks, dtype=jnp.int32)
    page = jnp.arange(width, dtype=jnp.int32)[None]
    full = num_keys // page_size
    both = jnp.minimum(full, jnp.roll(full, 1))[:, None]
    differs = (page_table != jnp.roll(page_table, 1, axis=0)) | (page >= both)
    shared = jnp.min(jnp.where(differs, page, width), axis=1) * page_size
    shared = jnp.where(number == 0, 0, shared)
    beside = jnp.maximum(jnp.roll(shared, 1), jnp.roll(shared, -1))
    goes_on = (shared >= jnp.maximum(min_keys, 1)) & (2 * shared >= beside)
    begin = lax.cummax(jnp.where(goes_on, 0, number))
    index = (number - begin) % size
    first = number - index
    # By their first blocks.
    least = jnp.full(num_blocks, jnp.iinfo(jnp.int32).max, jnp.int32)
    least = least.at[first].min(jnp.where(index == 0, least, shared))
    is_run = jnp.zeros(num_blocks, bool).at[first].max(index > 0)
    (firsts,) = jnp.nonzero(is_run, size=num_runs, fill_value=num_blocks)
    firsts = firsts.astype(jnp.int32)
    of_block = jnp.sum(firsts[None] < first[:, None], axis=1, dtype=jnp.int32)  # its run
    is_member = firsts.at[of_block].get(mode="fill", fill_value=num_blocks) == first
    places = jnp.where(is_member, of_block * size + index, num_runs * size)
    members = jnp.full(num_runs * size, num_blocks, jnp.int32).at[places].set(number, mode="drop")
    begins = jnp.where(is_member, least[first], 0)
    keys = least.at[firsts].get(mode="fill", fill_value=0)
    queries = jnp.arange(num_queries, dtype=jnp.int32)
    return SharedRuns(members.reshape(num_runs, size), keys, places, begins, queries)
