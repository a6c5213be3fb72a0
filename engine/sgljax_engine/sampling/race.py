"""Draws from weights, on the device."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from sgljax_engine.sampling.blocks import BLOCK, argmax, in_blocks, pick_block, token_at
from sgljax_engine.sampling.random_bits import random_bits


def race(
    weights_BV: jax.Array, seed_B2: jax.Array, step_B: jax.Array, num_shards: int = 1
) -> jax.Array:
    """Draws an index [B] of each row, each with the probability of its weight.

    Each weight is the rate of an exponential variable, and the smallest variable wins (the
    Gumbel-max trick; Maddison et al., 2014). Sums of blocks race first, then the entries of one
    block, so that most entries need no random number. Rounding errors of the logits change a draw
    only where they exceed the winner's lead. To invert the cumulative distribution needs one
    number, but there they move the borders of all tokens.
    """
    size = _race_block(weights_BV.shape[1])
    blocks = in_blocks(weights_BV, 0.0, num_shards, size)
    num_blocks = blocks.shape[1]
    bits = random_bits(seed_B2, step_B, num_blocks + size)
    # Middles of 2**32 intervals of (0, 1), at the precision of floats near 0.
    numbers = bits.astype(jnp.float32) * 2.0**-32 + 2.0**-33
    arrivals = -jnp.log1p(-jnp.minimum(numbers, 1.0 - 2.0**-24))
    block = argmax(jnp.sum(blocks, axis=-1) / arrivals[:, :num_blocks], num_shards)
    inside = pick_block(blocks, block)
    offset = jnp.argmax(inside / arrivals[:, num_blocks:], axis=-1).astype(jnp.int32)
    return token_at(block, offset, weights_BV.shape[1], num_shards, size)


def _race_block(vocab_size: int) -> int:
    """Entries of a block: they begin at the same entries on 1, 2, 4 and 8 devices.

    So draws do not depend on the number of devices that share the vocabulary.
    """
    if vocab_size % 2:
        return BLOCK
    return min(max(math.gcd(vocab_size, 8 * BLOCK) // 8, 1), BLOCK)
