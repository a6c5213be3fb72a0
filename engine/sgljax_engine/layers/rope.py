"""Rotary position embedding (Su et al., 2021) and the ways to stretch it over longer contexts.

A *timescale* is the number of positions in which a pair of channels turns by one radian.
Shape legend of the suffixes: T tokens, N heads, H head dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def rope_timescales(head_dim: int, theta: float) -> jax.Array:
    """Timescales [head_dim // 2] float32, from 1 up to nearly `theta`."""
    fraction = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
    return theta**fraction


def keep_fastest(timescales: jax.Array, fraction: float) -> jax.Array:
    """Lets only this fraction of the channels turn: the timescales of the others are infinite.

    Rope type "proportional": as many pairs of channels as fit into that part of the head.
    """
    num_turning = int(fraction * timescales.shape[0])
    turns = jnp.arange(timescales.shape[0]) < num_turning
    return jnp.where(turns, timescales, jnp.inf)


def stretch_llama3(
    timescales: jax.Array,
    *,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_context_length: int,
) -> jax.Array:
    """Llama 3.1's stretching of timescales [head_dim // 2] (rope_type "llama3").

    Channels that turn fewer than `low_freq_factor` times within the original context are slowed
    down by `factor`, those that turn more than `high_freq_factor` times stay unchanged, and
    frequencies in between are interpolated.
    """
    turns = original_context_length / (2 * math.pi * timescales)
    kept = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor)
    kept = jnp.clip(kept, 0.0, 1.0)
    return timescales / (kept + (1 - kept) / factor)


def stretch_yarn(
    timescales: jax.Array,
    *,
    theta: float,
    factor: float,
    beta_fast: float,
    beta_slow: float,
    original_context_length: int,
    truncate: bool,
) -> jax.Array:
    """YaRN's stretching of timescales [head_dim // 2] (rope_type "yarn"; Peng et al., 2023).

    Channels that turn fewer than `beta_slow` times within the original context are slowed down by
    `factor`, those that turn more than `beta_fast` times stay unchanged, and frequencies in between
    are interpolated by the channel's index.
    """
    size = 2 * timescales.shape[0]

    def channel(num_turns: float) -> float:
        turns_of_first = original_context_length / (2 * math.pi)
        return size * math.log(turns_of_first / num_turns) / (2 * math.log(theta))

    first, last = channel(beta_fast), channel(beta_slow)
    if truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    width = last - first or 0.001  # of a step
    slowed = jnp.clip((jnp.arange(size // 2, dtype=jnp.float32) - first) / width, 0.0, 1.0)
    return timescales / (slowed / factor + (1 - slowed))


def constant_timescales(make: Callable[[], jax.Array]) -> np.ndarray:
    """Timescales with the same bits in each program: computed now, and copied to the host."""
    with jax.ensure_compile_time_eval():
        return np.array(make())


def rope_angles(positions_T: jax.Array, timescales: jax.Array) -> jax.Array:
    """Rotary angles [T, 1, head_dim // 2] float32."""
    return positions_T.astype(jnp.float32)[:, None, None] / timescales[None, None, :]


def rope_tables(positions_T: jax.Array, timescales: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sines and cosines [T, 1, head_dim // 2] float32 of the rotary angles."""
    angles = rope_angles(positions_T, timescales)
    return jnp.sin(angles), jnp.cos(angles)


def apply_rope(x: jax.Array, sin: jax.Array, cos: jax.Array) -> jax.Array:
    """Rotates the first half of each head against its second half (the "NeoX" pairing).

    The halves are exchanged by reversing an axis of two. If they were concatenated, XLA on CPUs
    would choose between them element by element.

    Shape: x: [T, N, H]. sin, cos: [T, 1, H // 2].
    """
    sin, cos = (table.astype(x.dtype)[..., None, :] for table in (sin, cos))
    halves = x.reshape(*x.shape[:-1], 2, -1)
    sign = jnp.asarray([-1, 1], x.dtype).reshape((1,) * (halves.ndim - 2) + (2, 1))
    return (halves * cos + lax.rev(halves, [halves.ndim - 2]) * (sign * sin)).reshape(x.shape)
