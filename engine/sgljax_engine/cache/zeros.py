"""Arrays of zeros on devices, which pages and states begin as."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

MakeZeros = Callable[[tuple[int, ...], jnp.dtype, jax.sharding.Sharding], Any]
"""Makes an array of zeros, or only its shape to compile programs."""


def zeros(shape: tuple[int, ...], dtype: jnp.dtype, sharding: jax.sharding.Sharding) -> jax.Array:
    return _zeros_program(shape, dtype, sharding)()


def shape_of_zeros(
    shape: tuple[int, ...], dtype: jnp.dtype, sharding: jax.sharding.Sharding
) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


@functools.lru_cache(maxsize=64)
def _zeros_program(
    shape: tuple[int, ...], dtype: jnp.dtype, sharding: jax.sharding.Sharding
) -> Callable[[], jax.Array]:
    """A program that makes a zeroed array. Compiled once, however often it runs."""
    return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding)
