"""Random numbers of rows, on the device: each row's from its seed and step alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np


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
