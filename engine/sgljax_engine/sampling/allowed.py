"""Tokens that grammars allow, as bits.

Shape legend: B rows, q tokens of a row in a step, T = B q, V vocabulary, W = ceil(V / 32) words.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

WORD_BITS = 32


class AllowedBatch(NamedTuple):
    """What rows may generate.

    Shape: words: [B, q, W] uint32, a bit for each token; all of them for rows without a grammar.
        num_steps: [B] int32, steps of the dispatch that a row's words hold for: it takes no more.
    """

    words: jax.Array
    num_steps: jax.Array


def forbid_others(logits_TV: jax.Array, words_TW: jax.Array) -> jax.Array:
    """The logits, with -inf for tokens without a bit."""
    places = jnp.arange(WORD_BITS, dtype=jnp.uint32)
    bits = (words_TW[:, :, None] >> places) & 1
    is_allowed = bits.reshape(len(words_TW), -1)[:, : logits_TV.shape[1]] == 1
    return jnp.where(is_allowed, logits_TV, -jnp.inf)
