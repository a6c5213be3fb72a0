"""Draws from weights, on the device, and the random numbers that they need."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from sgljax_engine.sampling.blocks import BLOCK, argmax, in_blocks, pick_block, token_at


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


def uniform(seed_B2: jax.Array, step_B: jax.Array) -> jax.Array:
    """Uniform numbers [B] in (0, 1): the middles of 2**23 equal intervals.

    Never 0, which would draw the first token with any weight, however small.
    """
    bits_B = random_bits(seed_B2, step_B, 1)[:, 0] >> 9
    return bits_B.astype(jnp.float32) * 2.0**-23 + 2.0**-24


def random_bits(seed_B2: jax.Array, step_B: jax.Array, count: int) -> jax.Array:
    """Random uint32 [B, count]: those of `jax.random` for keys that the steps are folded into."""
    zero_B1 = jnp.zeros_like(seed_B2[:, :1])
    key = (seed_B2[:, :1], seed_B2[:, 1:])
    key = _threefry(key, (zero_B1, step_B.astype(jnp.uint32)[:, None]))
    low, high = _threefry(key, (zero_B1, jnp.arange(count, dtype=jnp.uint32)[None, :]))
    return low ^ high


_Words = tuple[jax.Array, jax.Array]


def _threefry(key: _Words, count: _Words) -> _Words:
    """Threefry-2x32 with 20 rounds, on two uint32 words each (Salmon et al., 2011).

    On CPUs `jax.random` implements it as a loop, and each decode step would start two.
    """
    keys = (*key, key[0] ^ key[1] ^ np.uint32(0x1BD11BDA))
    x, y = count[0] + keys[0], count[1] + keys[1]
    for group in range(5):
        for distance in ((13, 15, 26, 6), (17, 29, 16, 24))[group % 2]:
            x = x + y
            y = x ^ ((y << distance) | (y >> (32 - distance)))
        x = x + keys[(group + 1) % 3]
        y = y + keys[(group + 2) % 3] + np.uint32(group + 1)
    return x, y
