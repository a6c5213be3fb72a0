"""Sampling next tokens from logits, on the device, for a batch of rows with different settings.

No step sorts the vocabulary:

- The k-th largest logit (top-k) and the nucleus's smallest logit (top-p) are looked up among the 64
  largest logits. Where a row needs more of them, they are found by bisection over the 32 bits of
  the float's order-preserving integer form, with one compare-and-sum per bit. Both are exact. Ties
  with the threshold are kept.
- A token is drawn by a race: each weight is the rate of an exponential variable, and the smallest
  variable wins (the Gumbel-max trick; Maddison et al., 2014). Sums of blocks race first, then the
  entries of one block, so that most entries need no random number. Rounding errors of the logits
  change a draw only where they exceed the winner's lead. To invert the cumulative distribution
  needs one number, but there they move the borders of all tokens.

Devices that share the vocabulary each cut their own part into blocks and groups, so that none of
them gets the logits of another: only sums, maxima and the chosen blocks are exchanged.

Filters apply in this order: temperature, top-k, top-p over the tokens that top-k kept, min-p (last
as in SGLang; vLLM applies it before top-k). Batches in which no row filters skip them at run time
(`lax.cond`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sgljax_engine.layers.tiles import Together, Tokens
from sgljax_engine.sampling.logprobs import (
    ExtraLogprobs,
    LogprobBatch,
    Logprobs,
    token_logprobs,
)

_BLOCK = 128
_NUM_SORTED = 64
"""Number of largest logits to sort: enough for usual settings of top-k and top-p."""

_GROUP = 16
"""Size of the groups of entries that compete by their largest in the search for large logits."""


class SamplingBatch(NamedTuple):
    """Settings of each row of a decode batch.

    Shape (all [B] unless said): temperature: float32; 0 is greedy. top_k: int32 in [1, vocab];
        vocab keeps all. top_p, min_p: float32. seed: [B, 2] uint32, a threefry key. step: int32,
        number of tokens that the request has generated; with `seed` it fixes the draw. stop_ids:
        [B, MAX_STOP_TOKEN_IDS] int32, padded with -1.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    seed: jax.Array
    step: jax.Array
    stop_ids: jax.Array


class Sampled(NamedTuple):
    """Shape: all [B].

    token: int32.
    logprob: float32, log softmax(logits)[token]: raw.
    scaled_logprob: float32, log softmax(logits / temperature)[token]; `logprob` when greedy.
    processed_logprob: float32, log-prob of the token in the distribution that it was drawn from,
        after adjustments, temperature and filters; 0 when greedy.
    extras: See `Logprobs`.
    """

    token: jax.Array
    logprob: jax.Array
    scaled_logprob: jax.Array
    processed_logprob: jax.Array
    extras: ExtraLogprobs | None = None


class Sampler(NamedTuple):
    """The functions of a backend. Hashable.

    Attributes:
        draw: (logits to draw from [B, V], rows, number of shards) -> tokens [B] int32, and their
            processed log-probs [B] float32. A row does not depend on the others.
        logprobs: See `token_logprobs`.
    """

    draw: Callable[[jax.Array, SamplingBatch, int], tuple[jax.Array, jax.Array]]
    logprobs: Callable[[jax.Array, jax.Array, jax.Array, LogprobBatch | None], Logprobs]


def sample(
    logits_BV: jax.Array,
    rows: SamplingBatch,
    step_offset: jax.Array,
    adjusted_BV: jax.Array | None = None,
    tokens: Tokens | None = None,
    num_shards: int = 1,
    sampler: Sampler | None = None,
    others: LogprobBatch | None = None,
) -> Sampled:
    """Draws one token per row. The result of a row does not depend on the other rows.

    Args:
        logits_BV: [B, V] float32, the model's logits.
        rows: Settings of the rows.
        step_offset: Scalar int32 added to `rows.step`: the number of steps already done in this
            dispatch.
        adjusted_BV: [B, V] float32, the logits to draw from, with -inf for forbidden tokens and at
            least one finite logit in each row; None draws from the model's logits.
        tokens: Processes rows in tiles; None takes all together.
        num_shards: Devices that share the vocabulary, each an equal part of it.
        sampler: The functions of a backend; None for XLA's code.
        others: Further tokens whose log-probs to report; None for none.
    """
    tokens = Together() if tokens is None else tokens
    sampler = XLA if sampler is None else sampler
    rows = rows._replace(step=rows.step + step_offset)
    choices_BV = logits_BV if adjusted_BV is None else adjusted_BV
    # Separate, so that adjusted logits do not change the rest.
    split = jax.tree.map(tokens.split, (choices_BV, rows))
    drawn = tokens.map(lambda args: sampler.draw(args[0], args[1], num_shards), split)
    token, processed = map(tokens.join, drawn)
    found = map_logprobs(tokens, sampler, logits_BV, token, rows.temperature, others)
    return Sampled(token, found.raw, found.scaled, processed, found.extras)


def map_logprobs(
    tokens: Tokens,
    sampler: Sampler,
    logits_BV: jax.Array,
    token: jax.Array,
    temperature: jax.Array,
    others: LogprobBatch | None,
) -> Logprobs:
    """`Sampler.logprobs` of all rows, in tiles or together."""
    ids = None if others is None else others.token_ids

    def of_tile(args: tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]) -> Logprobs:
        logits, token, temperature, ids = args
        of_rows = None if others is None or ids is None else others._replace(token_ids=ids)
        return sampler.logprobs(logits, token, temperature, of_rows)

    split = jax.tree.map(tokens.split, (logits_BV, token, temperature, ids))
    return jax.tree.map(tokens.join, tokens.map(of_tile, split))


def _draw(
    choices_BV: jax.Array, rows: SamplingBatch, num_shards: int
) -> tuple[jax.Array, jax.Array]:
    """Tokens, and their processed log-probs."""
    is_greedy = rows.temperature == 0.0
    _, scaled_BV = _scale(choices_BV, rows.temperature)
    greedy = _argmax(choices_BV, num_shards)
    weights_BV = jnp.exp(scaled_BV)  # unnormalised probabilities in [0, 1]
    all_weight = jnp.sum(weights_BV, axis=-1)

    vocab_size = choices_BV.shape[1]
    top_k, top_p, min_p = filters_of(rows, vocab_size)
    is_filtering = (top_k < vocab_size) | (top_p < 1.0) | (min_p > 0.0)

    def filtered() -> tuple[jax.Array, jax.Array]:
        kept_BV = filter_weights(scaled_BV, weights_BV, top_k, top_p, min_p, num_shards)
        # The two sums may round differently, so the row decides which one it gets.
        return kept_BV, jnp.where(is_filtering, jnp.sum(kept_BV, axis=-1), all_weight)

    def drawn() -> tuple[jax.Array, jax.Array]:
        kept_BV, kept = lax.cond(jnp.any(is_filtering), filtered, lambda: (weights_BV, all_weight))
        return race(kept_BV, rows.seed, rows.step, num_shards), kept

    token, kept = lax.cond(jnp.all(is_greedy), lambda: (greedy, all_weight), drawn)
    token = jnp.where(is_greedy, greedy, token)
    processed = _pick(scaled_BV, token) - jnp.log(kept)
    return token, jnp.where(is_greedy, 0.0, processed)


def filters_of(rows: SamplingBatch, vocab_size: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """top_k, top_p and min_p [B] of each row.

    Filters of greedy rows change nothing, so they must cost nothing: they keep all.
    """
    is_greedy = rows.temperature == 0.0
    return (
        jnp.where(is_greedy, vocab_size, rows.top_k),
        jnp.where(is_greedy, 1.0, rows.top_p),
        jnp.where(is_greedy, 0.0, rows.min_p),
    )


def _argmax(values_BV: jax.Array, num_shards: int) -> jax.Array:
    """The first index [B] of each row's largest entry.

    Searches only the first block with the largest maximum: XLA on CPUs vectorises maxima, but runs
    `jnp.argmax` entry by entry.
    """
    blocks = _in_blocks(values_BV, -jnp.inf, num_shards)
    block = jnp.argmax(jnp.max(blocks, axis=-1), axis=-1).astype(jnp.int32)
    offset = jnp.argmax(_pick_block(blocks, block), axis=-1).astype(jnp.int32)
    return _place(block, offset, values_BV.shape[1], num_shards)


def divisor(temperature: jax.Array) -> jax.Array:
    """What logits are divided by: 1 for greedy rows."""
    return jnp.where(temperature == 0.0, 1.0, temperature)


def _scale(logits_BV: jax.Array, temperature: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Each row's largest logit, and logits over temperature, shifted so that the largest is 0."""
    peak = jnp.max(logits_BV, axis=-1)
    return peak, (logits_BV - peak[:, None]) / divisor(temperature)[:, None]


def filter_weights(
    scaled_BV: jax.Array,
    weights_BV: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
    num_shards: int = 1,
) -> jax.Array:
    """Zeroes the weights that top-k, top-p or min-p remove.

    top-p keeps a token while the probability of all likelier kept tokens is below `top_p`, so
    at least one token always stays.

    Args:
        scaled_BV: [B, V] logits over temperature, shifted so that each row's peak is 0.
        weights_BV: [B, V] exponentials of `scaled_BV`.
        top_k: [B] int32 in [1, V].
        top_p: [B] float32.
        min_p: [B] float32.
        num_shards: As for `sample`.
    """
    batch, vocab_size = scaled_BV.shape
    has_threshold = jnp.any((top_k < vocab_size) | (top_p < 1.0))
    threshold = lax.cond(
        has_threshold,
        lambda: _top_threshold(scaled_BV, weights_BV, top_k, top_p, num_shards),
        lambda: jnp.full(batch, -jnp.inf, scaled_BV.dtype),
    )
    is_kept = (scaled_BV >= threshold[:, None]) & (weights_BV >= min_p[:, None])
    return jnp.where(is_kept, weights_BV, 0.0)


def _top_threshold(
    scaled_BV: jax.Array,
    weights_BV: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    num_shards: int,
) -> jax.Array:
    """The smallest logit [B] that top-k and then top-p keep; -inf where both keep all."""
    vocab_size = scaled_BV.shape[1]
    top_BN = largest(scaled_BV, num_shards)
    num_sorted = top_BN.shape[1]

    def find_kth() -> jax.Array:
        order_BV = _ordered_bits(scaled_BV)
        # Largest threshold with at least k entries at or above it: the k-th largest entry.
        return _bisect(order_BV, lambda mask: jnp.sum(mask, axis=-1, dtype=jnp.int32) >= top_k)

    has_k = top_k < vocab_size
    kth = lax.cond(
        jnp.all((top_k <= num_sorted) | ~has_k),
        lambda: _pick(top_BN, jnp.minimum(top_k, num_sorted) - 1),
        find_kth,
    )
    kth = jnp.where(has_k, kth, -jnp.inf)
    kept_BV = jnp.where(scaled_BV >= kth[:, None], weights_BV, 0.0)
    # Never 0, as a denormal top_p would make it: an empty nucleus would then reach it.
    target = jnp.maximum(top_p * jnp.sum(kept_BV, axis=-1), jnp.finfo(jnp.float32).tiny)

    def find_nucleus() -> jax.Array:
        order_BV = _ordered_bits(scaled_BV)
        # Largest threshold whose entries at or above it hold the nucleus's mass.
        return _bisect(
            order_BV, lambda mask: jnp.sum(jnp.where(mask, kept_BV, 0.0), axis=-1) >= target
        )

    has_p = top_p < 1.0
    mass_BN = jnp.cumsum(jnp.where(top_BN >= kth[:, None], jnp.exp(top_BN), 0.0), axis=-1)
    reached_BN = mass_BN >= target[:, None]
    is_found = reached_BN[:, -1]
    found = _pick(top_BN, jnp.argmax(reached_BN, axis=-1))
    # The two sums may round differently, so each row decides which one it gets, whatever the other
    # rows are.
    nucleus = lax.cond(
        jnp.all(is_found | ~has_p),
        lambda: found,
        lambda: jnp.where(is_found, found, find_nucleus()),
    )
    return jnp.where(has_p, nucleus, kth)


def largest(values_BV: jax.Array, num_shards: int) -> jax.Array:
    """The `_NUM_SORTED` largest entries [B, N] of each row, descending; all of a small vocabulary.

    They lie in the N groups with the largest maxima, since each of these maxima is at least as
    large as every entry of the other groups.
    """
    batch, vocab_size = values_BV.shape
    if vocab_size < _NUM_SORTED * _GROUP:
        return lax.top_k(values_BV, min(_NUM_SORTED, vocab_size))[0]
    padded = _padded_shards(values_BV, _GROUP, -jnp.inf, num_shards)
    grouped = padded.reshape(batch, num_shards, _GROUP, -1)
    maxima = jnp.max(grouped, axis=2)
    groups = lax.top_k(maxima.reshape(batch, -1), _NUM_SORTED)[1]
    if num_shards == 1:
        entries = jnp.take_along_axis(grouped[:, 0], groups[:, None, :], axis=2)
    else:
        by_group = grouped.swapaxes(2, 3).reshape(batch, -1, _GROUP)
        entries = jnp.take_along_axis(by_group, groups[:, :, None], axis=1)
    return lax.top_k(entries.reshape(batch, -1), _NUM_SORTED)[0]


def race(
    weights_BV: jax.Array, seed_B2: jax.Array, step_B: jax.Array, num_shards: int = 1
) -> jax.Array:
    """Draws an index [B] of each row, each with the probability of its weight.

    Args:
        weights_BV: [B, V] float32 in [0, 1], with a 1 in each row. Weights of 0 are never drawn.
        seed_B2: [B, 2] uint32.
        step_B: [B] int32.
        num_shards: As for `sample`.
    """
    size = _race_block(weights_BV.shape[1])
    blocks = _in_blocks(weights_BV, 0.0, num_shards, size)
    num_blocks = blocks.shape[1]
    bits = random_bits(seed_B2, step_B, num_blocks + size)
    # Middles of 2**32 intervals of (0, 1), at the precision of floats near 0.
    numbers = bits.astype(jnp.float32) * 2.0**-32 + 2.0**-33
    arrivals = -jnp.log1p(-jnp.minimum(numbers, 1.0 - 2.0**-24))
    block = _argmax(jnp.sum(blocks, axis=-1) / arrivals[:, :num_blocks], num_shards)
    inside = _pick_block(blocks, block)
    offset = jnp.argmax(inside / arrivals[:, num_blocks:], axis=-1).astype(jnp.int32)
    return _place(block, offset, weights_BV.shape[1], num_shards, size)


def _race_block(vocab_size: int) -> int:
    """Entries of a block: they begin at the same entries on 1, 2, 4 and 8 devices.

    So draws do not depend on the number of devices that share the vocabulary.
    """
    if vocab_size % 2:
        return _BLOCK
    return min(max(math.gcd(vocab_size, 8 * _BLOCK) // 8, 1), _BLOCK)


def _in_blocks(values_BV: jax.Array, fill: float, num_shards: int, size: int = _BLOCK) -> jax.Array:
    """Splits each row into blocks [B, N, size], with a padded last block in each shard."""
    padded = _padded_shards(values_BV, size, fill, num_shards)
    return padded.reshape(values_BV.shape[0], -1, size)


def _padded_shards(values_BV: jax.Array, multiple: int, fill: float, num_shards: int) -> jax.Array:
    """The parts of the vocabulary [B, num_shards, M], each padded to a multiple."""
    shards = values_BV.reshape(values_BV.shape[0], num_shards, -1)
    padding = ((0, 0), (0, 0), (0, -shards.shape[2] % multiple))
    return jnp.pad(shards, padding, constant_values=fill)


def _place(
    block: jax.Array, offset: jax.Array, vocab_size: int, num_shards: int, size: int = _BLOCK
) -> jax.Array:
    """The token of an entry of `_in_blocks`."""
    shard_size = vocab_size // num_shards
    blocks_each = -(-shard_size // size)
    shard, block = block // blocks_each, block % blocks_each
    return shard * shard_size + block * size + offset


def _pick_block(blocks: jax.Array, block_B: jax.Array) -> jax.Array:
    return jnp.take_along_axis(blocks, block_B[:, None, None], axis=1)[:, 0]


def _pick(values: jax.Array, index: jax.Array) -> jax.Array:
    return jnp.take_along_axis(values, index[:, None], axis=-1)[:, 0]


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


def _ordered_bits(values: jax.Array) -> jax.Array:
    """Maps float32 to uint32 so that integer order is float order."""
    bits = lax.bitcast_convert_type(values, jnp.uint32)
    sign = jnp.uint32(0x80000000)
    return jnp.where(bits & sign, ~bits, bits | sign)


def _float_of_order(order: jax.Array) -> jax.Array:
    """The inverse of `_ordered_bits`."""
    sign = jnp.uint32(0x80000000)
    return lax.bitcast_convert_type(jnp.where(order & sign, order ^ sign, ~order), jnp.float32)


def _bisect(order_BV: jax.Array, is_enough: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Largest threshold per row such that `is_enough(order >= threshold)` still holds.

    `order` comes from `_ordered_bits`; the threshold is a float, one of the row's entries.
    """

    def body(i: jax.Array, threshold: jax.Array) -> jax.Array:
        candidate = threshold | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        return jnp.where(is_enough(order_BV >= candidate[:, None]), candidate, threshold)

    start = jnp.zeros(order_BV.shape[0], jnp.uint32)
    return _float_of_order(lax.fori_loop(0, 32, body, start))


XLA = Sampler(_draw, token_logprobs)
"""XLA's code: all platforms."""
