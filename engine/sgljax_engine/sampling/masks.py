"""Sampling masks: the tokens that a token was drawn from, for rows that report them.

A mask is what the filters kept, so log softmax over it is the token's processed log-prob. Masks are
bounded: `SamplingParams.return_sampling_mask` samples with a top_k of at most
`MAX_SAMPLING_MASK`, and tokens that tie with the last of a full mask are not drawn either.

Shape legend: B rows, V vocabulary, N tokens of a mask.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sgljax_engine.sampling.blocks import GROUP, NUM_SORTED, largest
from sgljax_engine.sampling.filters import KEEP_ALL


class MaskBatch(NamedTuple):
    """Which rows report masks.

    Shape: most: [B] int32, tokens in a row's mask at most; `filters.KEEP_ALL` for rows that report
        none. ranks: [N] int32; only its length matters, the largest of these.
    """

    most: jax.Array
    ranks: jax.Array


def drop_ties(choices_BV: jax.Array, least: jax.Array, most: jax.Array) -> jax.Array:
    """The smallest logit [B] to keep, where no row may keep more than `most` [B] tokens.

    A row that has more at or above `least` [B] leaves out those that equal it. Fewer than top_k are
    above the k-th largest, so the rest fits. A row whose largest logits are too many keeps none:
    its log-prob is NaN.
    """

    def raised() -> jax.Array:
        above = jnp.min(choices_BV, axis=-1, where=choices_BV > least[:, None], initial=jnp.inf)
        return jnp.where(is_full, above, least)

    kept = jnp.sum(choices_BV >= least[:, None], axis=-1, dtype=jnp.int32)
    is_full = kept > most
    return lax.cond(jnp.any(is_full), raised, lambda: least)


def find_mask(
    choices_BV: jax.Array, least: jax.Array, most: jax.Array, size: int, num_shards: int
) -> jax.Array:
    """The tokens [B, N] int32 that each row keeps, the likeliest first; -1 behind the last.

    Rows that report no mask may have any.

    Args:
        choices_BV: [B, V] float32, what was drawn from; -inf is never kept.
        least: [B] float32, the smallest logit that each row keeps.
        most: [B] int32, as of `MaskBatch`.
        size: Most tokens that a row which reports its mask keeps.
        num_shards: Devices that share the vocabulary.
    """

    def search(count: int) -> jax.Array:
        values, tokens = largest(choices_BV, num_shards, count)
        is_kept = (values >= least[:, None]) & (values > -jnp.inf)
        tokens = jnp.where(is_kept, tokens, -1)
        more = size - tokens.shape[1]
        return jnp.pad(tokens, ((0, 0), (0, more)), constant_values=-1) if more else tokens

    if size <= NUM_SORTED or choices_BV.shape[1] < size * GROUP:
        return search(size)
    # Most nuclei are small. A search for few takes half the time, and orders ties alike.
    kept = jnp.sum(choices_BV >= least[:, None], axis=-1, dtype=jnp.int32)
    is_many = (kept > NUM_SORTED) & (most < KEEP_ALL)
    return lax.cond(jnp.any(is_many), lambda: search(size), lambda: search(NUM_SORTED))
