"""Tokens that grammars allow, as bits, and the draw of the rows that follow one.

Shape legend: B rows, G rows with a grammar, q tokens of a row in a step, T = B q, V vocabulary,
W = ceil(V / 32) words.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from sgljax_engine.sampling.guide import WORD_BITS


class AllowedBatch(NamedTuple):
    """What rows may generate.

    Shape: rows: [G] int32, places in the batch of rows with a grammar; B for none. words: [G, q, W]
        uint32, a bit for each token that they may generate. num_steps: [B] int32, steps of the
        dispatch that a row's words hold for: it takes no more. `guide.ENDLESS` without a grammar.
    """

    rows: jax.Array
    words: jax.Array
    num_steps: jax.Array

    @property
    def places(self) -> jax.Array:
        """[G q] int32, the places of their tokens among T."""
        width = self.words.shape[1]
        return (self.rows[:, None] * width + jnp.arange(width, dtype=jnp.int32)).reshape(-1)


def forbid_others(logits_NV: jax.Array, words_NW: jax.Array) -> jax.Array:
    """The logits, with -inf for tokens without a bit."""
    num_rows, vocab_size = logits_NV.shape
    more = words_NW.shape[1] * WORD_BITS - vocab_size
    padded = jnp.pad(logits_NV, ((0, 0), (0, more))) if more else logits_NV
    bits = (words_NW[:, :, None] >> jnp.arange(WORD_BITS, dtype=jnp.uint32)) & 1
    kept = jnp.where(bits == 1, padded.reshape(num_rows, -1, WORD_BITS), -jnp.inf)
    return kept.reshape(num_rows, -1)[:, :vocab_size]
