"""Numbers of 48 bits as sums of two float32, for what float32 is too coarse and float64 not there.

The sums and products are those of Dekker (1971) and Knuth (1969). They hold whether or not a
compiler joins a product and a sum into one operation: each product that is subtracted from is
exact.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_LOG2_E = 1.4426950408889634
_LN2_PARTS = (0.693145751953125, 1.4285906217992306e-06, 1.619851018665656e-11)
"""ln 2 as a sum: 15 bits, 15 bits, the rest; small multiples of the first two are exact."""

_NUM_TERMS = 12
"""Terms of an exponential's Taylor series; those from the sixth power on need only float32."""

SMALLEST = -80.0
"""e to a smaller power counts as 0."""


class Pair(NamedTuple):
    """The number `hi + lo`, where `hi` is that number rounded to float32."""

    hi: jax.Array
    lo: jax.Array

    def __add__(self, other: Pair) -> Pair:  # type: ignore[override]
        """The sum, to about 2**-46 of the larger one."""
        total, error = two_sum(self.hi, other.hi)
        return _normal(total, error + (self.lo + other.lo))

    def __neg__(self) -> Pair:
        return Pair(-self.hi, -self.lo)

    def __mul__(self, other: Pair) -> Pair:  # type: ignore[override]
        """The product, to about 2**-46 of it."""
        product, error = _two_product(self.hi, other.hi)
        return _normal(product, error + (self.hi * other.lo + self.lo * other.hi))

    def scaled(self, power: float | jax.Array) -> Pair:
        """The product with a power of two, which is exact."""
        return Pair(self.hi * power, self.lo * power)

    def __ge__(self, other: Pair) -> jax.Array:  # type: ignore[override]
        return (self.hi > other.hi) | ((self.hi == other.hi) & (self.lo >= other.lo))


def split_doubles(values: np.ndarray) -> np.ndarray:
    """Float64 numbers [...] of the host as the float32 [..., 2] of `pair_of`."""
    high = values.astype(np.float32)
    is_finite = np.isfinite(high)
    low = np.where(is_finite, values - np.where(is_finite, high, 0.0).astype(np.float64), 0.0)
    return np.stack([high, low.astype(np.float32)], axis=-1)


def pair_of(values: jax.Array) -> Pair:
    """The numbers [...] whose parts are the last axis of an array [..., 2]."""
    return Pair(values[..., 0], values[..., 1])


def two_sum(a: jax.Array, b: jax.Array) -> Pair:
    total = a + b
    of_b = total - a
    return Pair(total, (a - (total - of_b)) + (b - of_b))


def _normal(high: jax.Array, low: jax.Array) -> Pair:
    """The exact sum of two float32 of which the first is the larger one."""
    total = high + low
    return Pair(total, low - (total - high))


def _two_product(a: jax.Array, b: jax.Array) -> Pair:
    product = a * b
    (a_high, a_low), (b_high, b_low) = _halves(a), _halves(b)
    error = ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low
    return Pair(product, error)


def _halves(a: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A float32 as a sum of two of 12 bits, whose products are exact."""
    bits = lax.bitcast_convert_type(a, jnp.uint32) & jnp.uint32(0xFFFFF000)
    high = lax.bitcast_convert_type(bits, jnp.float32)
    return high, a - high


def exp(x: Pair) -> Pair:
    """e**x for x in [-80, 1], to about 1e-12 of it; 0 for smaller x (Cody and Waite, 1980)."""
    is_nothing = x.hi < SMALLEST
    x = Pair(jnp.where(is_nothing, 0.0, x.hi), jnp.where(is_nothing, 0.0, x.lo))
    whole = jnp.round(x.hi * _LOG2_E)
    first, second, third = (whole * -part for part in _LN2_PARTS)
    rest = two_sum(x.hi, first) + two_sum(second, third + x.lo)  # at most ln(2) / 2
    r = rest.hi
    higher = jnp.full_like(r, 1 / _NUM_TERMS)
    for n in range(_NUM_TERMS - 1, 6, -1):
        higher = (1 + r * higher) * (1 / n)
    value = Pair((r * r * r) * (r * r * r) * ((1 + r * higher) * (1 / 720)), jnp.zeros_like(r))
    terms = _constant(r, 1 / 120)
    for coefficient in (1 / 24, 1 / 6, 1 / 2, 1.0):
        terms = terms * rest + _constant(r, coefficient)
    value = value + terms * rest + _constant(r, 1.0)
    power = lax.bitcast_convert_type((whole.astype(jnp.int32) + 127) << 23, jnp.float32)
    found = value.scaled(power)
    return Pair(jnp.where(is_nothing, 0.0, found.hi), jnp.where(is_nothing, 0.0, found.lo))


def _constant(like: jax.Array, value: float) -> Pair:
    high, low = split_doubles(np.asarray(value, np.float64))
    return Pair(jnp.full_like(like, high), jnp.full_like(like, low))


_LIMB_BITS = 13
_NUM_LIMBS = 3


def limbs(values: Pair) -> tuple[jax.Array, ...]:
    """Numbers in [0, 1] as parts whose sums over up to 2**19 entries are exact, but for the last.

    Returns:
        Three arrays of uint32, in units of 2**-13, 2**-26 and 2**-39, and one of float32.
    """
    rest, parts = values.hi, []
    for index in range(1, _NUM_LIMBS + 1):
        unit = 2.0 ** (_LIMB_BITS * index)
        part = jnp.floor(rest * unit)
        parts.append(part.astype(jnp.uint32))
        rest = rest - part * (1 / unit)
    return (*parts, rest + values.lo)


def join_limbs(sums: tuple[jax.Array, ...]) -> Pair:
    """The number whose parts have been summed."""
    total = Pair(sums[-1], jnp.zeros_like(sums[-1]))
    for index in range(_NUM_LIMBS, 0, -1):
        unit = 2.0 ** -(_LIMB_BITS * index)
        high, low = sums[index - 1] >> 16, sums[index - 1] & jnp.uint32(0xFFFF)
        whole = two_sum(high.astype(jnp.float32) * 65536.0, low.astype(jnp.float32))
        total = total + whole.scaled(unit)
    return total
