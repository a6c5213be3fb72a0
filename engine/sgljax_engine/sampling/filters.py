"""Which tokens top-k, top-p and min-p keep: those that a sort in float64 keeps.

Each filter is a threshold on the logits. These are compared as they are, never after a division,
which two programs may round in two ways. Ties with the threshold are kept.

- The k-th largest logit (top-k) is looked up among the 64 largest. Where a row needs more of
  them, it is found by bisection over the 32 bits of the float's order-preserving integer form.
- The nucleus's smallest logit (top-p) is looked up there too, by sums in float32. Where rounding
  could matter, or the nucleus is larger, the sums that decide are made with 48 bits (`pairs`).
- min-p's threshold is the largest logit plus temperature * log(min_p), with 48 bits.

Filters apply in this order: temperature, top-k, top-p over the tokens that top-k kept, min-p (last
as in SGLang; vLLM applies it before top-k).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sgljax_engine.sampling import pairs
from sgljax_engine.sampling.blocks import largest, pick, sum_blocks
from sgljax_engine.sampling.pairs import Pair

KEEP_ALL = int(np.iinfo(np.int32).max)
"""A top_k that keeps all tokens of any vocabulary."""

_DOUBT = 2.0**-16
"""Sums of float32 exponentials over a vocabulary err by less, relative to their total."""

_ROWS_TOGETHER = 8
"""Rows whose nucleus is found with 48 bits at the same time: a step of 64 would take 0.3 GB."""


class Filters(NamedTuple):
    """Limits of the tokens of each row.

    A pair is a number of 48 bits, the sum of its two float32: so the user's float64 decides.

    Shape: top_k: [B] int32 >= 1; the vocabulary's size or more keeps all. top_p: [B, 2] float32, a
        pair; 1 keeps all. min_p_gap: [B, 2] float32, a pair: temperature * log(min_p), at most 0;
        -inf keeps all. inverse_temperature: [B, 2] float32, a pair; 1 for greedy rows.
    """

    top_k: jax.Array
    top_p: jax.Array
    min_p_gap: jax.Array
    inverse_temperature: jax.Array

    def has_top(self, vocab_size: int) -> jax.Array:
        """Whether top-k or top-p may remove a token of a row; [B] bool."""
        return (self.top_k < vocab_size) | self.has_top_p

    @property
    def has_top_p(self) -> jax.Array:
        return (self.top_p[:, 0] < 1.0) | (self.top_p[:, 1] < 0.0)

    @property
    def has_min_p(self) -> jax.Array:
        return self.min_p_gap[:, 0] > -jnp.inf


def make_filters(
    temperature: np.ndarray, top_k: np.ndarray, top_p: np.ndarray, min_p: np.ndarray
) -> Filters:
    """The filters of rows, as numpy arrays. Greedy rows keep all: there filters change nothing."""
    is_greedy = temperature == 0.0
    divisor = np.where(is_greedy, 1.0, temperature)
    logs = np.asarray([math.log(p) if p > 0 else -math.inf for p in min_p.tolist()], np.float64)
    return Filters(
        np.where(is_greedy, KEEP_ALL, top_k).astype(np.int32),  # type: ignore[arg-type]
        pairs.split_doubles(np.where(is_greedy, 1.0, top_p)),  # type: ignore[arg-type]
        pairs.split_doubles(np.where(is_greedy, -np.inf, divisor * logs)),  # type: ignore[arg-type]
        pairs.split_doubles(1.0 / divisor),  # type: ignore[arg-type]
    )


def min_p_threshold(peak: jax.Array, filters: Filters) -> jax.Array:
    """The smallest logit [B] that min-p keeps, given the largest [B]; -inf where it keeps all."""
    gap = pairs.pair_of(filters.min_p_gap)
    sum_, error = pairs.two_sum(peak, gap.hi)
    sum_, error = pairs.two_sum(sum_, error + gap.lo)
    # The float32 at or above the sum.
    least = jnp.where(error > 0, jnp.nextafter(sum_, jnp.float32(jnp.inf)), sum_)
    return jnp.where(filters.has_min_p, least, -jnp.inf)


def top_threshold(
    logits_BV: jax.Array, weights_BV: jax.Array, filters: Filters, num_shards: int
) -> jax.Array:
    """The smallest logit [B] that top-k and then top-p keep; -inf where both keep all.

    top-p keeps a token while the probability of all likelier kept tokens is below `top_p`, so
    at least one token always stays.

    Args:
        logits_BV: [B, V] float32, in memory: all programs must see the same bits.
        weights_BV: [B, V] float32, exponentials of (logits - largest) / temperature, to some
            units in the last place.
        filters: Of the rows.
        num_shards: As for `sampler.sample`.
    """
    vocab_size = logits_BV.shape[1]
    top_BN, _ = largest(logits_BV, num_shards)
    kth = _kth_largest(logits_BV, top_BN, filters.top_k)
    kept_BV = jnp.where(logits_BV >= kth[:, None], weights_BV, 0.0)
    total = sum_blocks(kept_BV, num_shards)
    # Never 0, as a denormal top_p would make it: an empty nucleus would then reach it.
    target = jnp.maximum(filters.top_p[:, 0] * total, jnp.finfo(jnp.float32).tiny)

    below = (top_BN - top_BN[:, :1]) * filters.inverse_temperature[:, :1]
    weights_BN = jnp.where(top_BN >= kth[:, None], jnp.exp(below), 0.0)
    mass_BN = jnp.cumsum(weights_BN, axis=-1)
    reached_BN = mass_BN >= target[:, None]
    index = jnp.argmax(reached_BN, axis=-1)
    found = pick(top_BN, index)
    margin = _DOUBT * total
    before = pick(mass_BN, index) - pick(weights_BN, index)
    is_first = (index == 0) | (before < target - margin)
    is_sure = reached_BN[:, -1] & is_first & (pick(mass_BN, index) > target + margin)

    def settle() -> jax.Array:
        rows = (logits_BV, kept_BV, kth, total, filters.top_p, filters.inverse_temperature)
        one = functools.partial(_nucleus, num_shards=num_shards)
        exact = lax.map(lambda row: one(*row), rows, batch_size=min(len(kth), _ROWS_TOGETHER))
        return jnp.where(is_sure, found, exact)

    has_p = filters.has_top_p
    nucleus = lax.cond(jnp.all(is_sure | ~has_p), lambda: found, settle)
    threshold = jnp.where(has_p, nucleus, kth)
    return jnp.where(filters.has_top(vocab_size), threshold, -jnp.inf)


def _kth_largest(logits_BV: jax.Array, top_BN: jax.Array, top_k: jax.Array) -> jax.Array:
    num_sorted, has_k = top_BN.shape[1], top_k < logits_BV.shape[1]

    def find() -> jax.Array:
        order_BV = _ordered_bits(logits_BV)
        # Largest threshold with at least k entries at or above it: the k-th largest entry.
        return _bisect(
            lambda order: jnp.sum(order_BV >= order[:, None], axis=-1, dtype=jnp.int32) >= top_k,
            top_k.shape,
        )

    kth = lax.cond(
        jnp.all((top_k <= num_sorted) | ~has_k),
        lambda: pick(top_BN, jnp.minimum(top_k, num_sorted) - 1),
        find,
    )
    return jnp.where(has_k, kth, -jnp.inf)


def _nucleus(
    logits: jax.Array,
    kept: jax.Array,
    kth: jax.Array,
    total: jax.Array,
    top_p: jax.Array,
    inverse_temperature: jax.Array,
    *,
    num_shards: int,
) -> jax.Array:
    """The smallest logit of one row's nucleus, by sums of 48 bits.

    First a logit is found, by sums in float32, that surely is in the nucleus, and has not much
    above the nucleus's end below it. The mass above it is added up with 48 bits, and what is
    missing is looked for below it. That is so little that float32 is exact enough there.
    """
    order = _ordered_bits(logits)

    def add(values: jax.Array) -> jax.Array:
        return sum_blocks(values[None], num_shards)[0]

    certain = top_p[0] * total * (1 - 2 * _DOUBT)
    start = _bisect(lambda least: add(jnp.where(order >= least, kept, 0.0)) >= certain)
    inverse = pairs.pair_of(inverse_temperature)
    peak = jnp.max(logits)
    # In memory: else each of the sums would compute the exponentials again. And in two programs,
    # since LLVM's vectorizer takes exponential time for the whole (jaxlib 0.12).
    weights = lax.optimization_barrier(_weights(logits, peak, inverse))
    parts = lax.optimization_barrier(pairs.limbs(weights))

    def exact_sum(mask: jax.Array) -> Pair:
        return pairs.join_limbs(tuple(add(jnp.where(mask, part, 0)) for part in parts))

    masks = jnp.stack([logits >= kth, logits > start, logits == start])
    total_, above, here = (Pair(*part) for part in zip(*jax.vmap(exact_sum)(masks), strict=True))
    missing = pairs.pair_of(top_p) * total_ + -above
    beyond = missing + -here
    below = jnp.where(logits < start, kept, 0.0)
    found = _bisect(lambda least: add(jnp.where(order >= least, below, 0.0)) >= beyond.hi)
    # By rounding all may be too little: then top-p keeps all that top-k kept.
    found = jnp.where(jnp.isnan(found), kth, found)
    return jnp.where(here >= missing, start, found)


def _weights(logits: jax.Array, peak: jax.Array, inverse: Pair) -> Pair:
    """Exponentials of (logits - peak) / temperature, with 48 bits."""
    is_nothing = (logits - peak) * inverse.hi < pairs.SMALLEST  # -inf too
    below = pairs.two_sum(jnp.where(is_nothing, peak, logits), -peak)
    weights = pairs.exp(below * inverse)
    return Pair(*(jnp.where(is_nothing, 0.0, part) for part in weights))


def _ordered_bits(values: jax.Array) -> jax.Array:
    """Maps float32 to uint32 so that integer order is float order."""
    bits = lax.bitcast_convert_type(values, jnp.uint32)
    sign = jnp.uint32(0x80000000)
    return jnp.where(bits & sign, ~bits, bits | sign)


def _float_of_order(order: jax.Array) -> jax.Array:
    sign = jnp.uint32(0x80000000)
    return lax.bitcast_convert_type(jnp.where(order & sign, order ^ sign, ~order), jnp.float32)


def _bisect(is_enough: Callable[[jax.Array], jax.Array], shape: tuple[int, ...] = ()) -> jax.Array:
    """The largest float32, of the given shape, for whose `_ordered_bits` a condition holds.

    NaN where it holds for none.
    """

    def body(i: jax.Array, threshold: jax.Array) -> jax.Array:
        candidate = threshold | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        return jnp.where(is_enough(candidate), candidate, threshold)

    return _float_of_order(lax.fori_loop(0, 32, body, jnp.zeros(shape, jnp.uint32)))
