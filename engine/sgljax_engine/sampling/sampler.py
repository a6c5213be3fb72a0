"""Sampling next tokens from logits, on the device, for a batch of rows with different settings.

No step sorts the vocabulary: `filters` finds thresholds, and `race` draws. Batches in which no row
filters skip the filters at run time (`lax.cond`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sgljax_engine.sampling.blocks import argmax, pick, sum_blocks
from sgljax_engine.sampling.filters import KEEP_ALL, Filters, min_p_threshold, top_threshold
from sgljax_engine.sampling.logprobs import (
    ExtraLogprobs,
    LogprobBatch,
    Logprobs,
    token_logprobs,
)
from sgljax_engine.sampling.masks import MaskBatch, drop_ties, find_mask
from sgljax_engine.sampling.race import race


class SamplingBatch(NamedTuple):
    """Settings of each row of a decode batch.

    Shape (all [B] unless said): temperature: float32; 0 is greedy. filters: See `Filters`. seed:
        [B, 2] uint32, a threefry key. step: int32, number of tokens that the request has generated;
        with `seed` it fixes the draw. stop_ids: [B, MAX_STOP_TOKEN_IDS] int32, padded with -1.
    """

    temperature: jax.Array
    filters: Filters
    seed: jax.Array
    step: jax.Array
    stop_ids: jax.Array


class Drawn(NamedTuple):
    """Shape: all [B].

    token: int32. processed_logprob: float32, as of `Sampled`. least: float32, the smallest logit
        that the row's filters keep; no meaning for greedy rows.
    """

    token: jax.Array
    processed_logprob: jax.Array
    least: jax.Array


class Sampled(NamedTuple):
    """Shape: all [B].

    token: int32.
    logprob: float32, log softmax(logits)[token]: raw. NaN for rows that no token can be drawn from:
        if a logit is NaN or +inf, all that the row allows are -inf, or more tokens than its mask
        holds share the largest one.
    scaled_logprob: float32, log softmax(logits / temperature)[token]; `logprob` when greedy.
    processed_logprob: float32, log-prob of the token in the distribution that it was drawn from,
        after adjustments, temperature and filters; 0 when greedy.
    extras: See `Logprobs`.
    mask: [B, N] int32, see `find_mask`; None if no row reports it.
    """

    token: jax.Array
    logprob: jax.Array
    scaled_logprob: jax.Array
    processed_logprob: jax.Array
    extras: ExtraLogprobs | None = None
    mask: jax.Array | None = None


class Sampler(NamedTuple):
    """The functions of a backend. Hashable.

    `draw` takes logits [B, V] to draw from, rows, the number of shards, and how many tokens [B]
    each row may keep (see `MaskBatch`), or None. A row does not depend on the others.
    """

    draw: Callable[[jax.Array, SamplingBatch, int, jax.Array | None], Drawn]
    logprobs: Callable[[jax.Array, jax.Array, jax.Array, LogprobBatch | None], Logprobs]


def sample(
    logits_BV: jax.Array,
    rows: SamplingBatch,
    step_offset: jax.Array,
    adjusted_BV: jax.Array | None = None,
    num_shards: int = 1,
    sampler: Sampler | None = None,
    others: LogprobBatch | None = None,
    masks: MaskBatch | None = None,
) -> Sampled:
    """Draws one token per row. The result of a row does not depend on the other rows.

    The number of steps already done in this dispatch, `step_offset`, is added to `rows.step`.
    `adjusted_BV` are the logits to draw from, with -inf for forbidden tokens and at least one
    finite logit in each row; None draws from the model's. `num_shards` devices share the
    vocabulary, each an equal part of it.
    """
    sampler = XLA if sampler is None else sampler
    rows = rows._replace(step=rows.step + step_offset)
    choices_BV = logits_BV if adjusted_BV is None else adjusted_BV
    # In memory: else XLA may compute them again elsewhere, and round otherwise.
    logits_BV, choices_BV = lax.optimization_barrier((logits_BV, choices_BV))
    # Separate, so that adjusted logits do not change the rest.
    drawn = sampler.draw(choices_BV, rows, num_shards, None if masks is None else masks.most)
    token, mask = drawn.token, None
    found = sampler.logprobs(logits_BV, token, rows.temperature, others)
    raw = found.raw
    if masks is not None:
        most = jnp.where(rows.temperature > 0, masks.most, KEEP_ALL)
        mask = find_mask(choices_BV, drawn.least, most, masks.ranks.shape[0], num_shards)
        raw = jnp.where((mask[:, 0] < 0) & (most < KEEP_ALL), jnp.nan, raw)
    if adjusted_BV is not None:  # the model's logits may be finite where all allowed ones are not
        raw = jnp.where(jnp.isfinite(pick(choices_BV, token)), raw, jnp.nan)
    return Sampled(token, raw, found.scaled, drawn.processed_logprob, found.extras, mask)


def _draw(
    choices_BV: jax.Array, rows: SamplingBatch, num_shards: int, most: jax.Array | None
) -> Drawn:
    is_greedy = rows.temperature == 0.0
    peak = jnp.max(choices_BV, axis=-1)
    scaled_BV = (choices_BV - peak[:, None]) / divisor(rows.temperature)[:, None]
    greedy = argmax(choices_BV, num_shards)
    weights_BV = jnp.exp(scaled_BV)  # unnormalised probabilities in [0, 1]
    all_weight = sum_blocks(weights_BV, num_shards)
    filters = rows.filters
    is_filtering = filters.has_top(choices_BV.shape[1]) | filters.has_min_p

    everything = jnp.full_like(peak, -jnp.inf)

    def kept_weights(least: jax.Array) -> jax.Array:
        return jnp.where(choices_BV < least[:, None], 0.0, weights_BV)

    def filtered() -> tuple[jax.Array, jax.Array]:
        least = find_threshold(choices_BV, weights_BV, peak, filters, num_shards)
        if most is not None:
            least = drop_ties(choices_BV, least, most)
        # The two sums may round differently, so the row decides which one it gets.
        sums = sum_blocks(kept_weights(least), num_shards)
        return jnp.where(is_filtering, sums, all_weight), least

    def drawn() -> tuple[jax.Array, jax.Array, jax.Array]:
        # Not the weights themselves, which would take memory in both branches and behind them.
        kept, least = lax.cond(jnp.any(is_filtering), filtered, lambda: (all_weight, everything))
        token = race(kept_weights(least), rows.seed, rows.step, num_shards)
        return token, kept, least

    token, kept, least = lax.cond(
        jnp.all(is_greedy), lambda: (greedy, all_weight, everything), drawn
    )
    token = jnp.where(is_greedy, greedy, token)
    processed = pick(scaled_BV, token) - jnp.log(kept)
    return Drawn(token, jnp.where(is_greedy, 0.0, processed), least)


def find_threshold(
    choices_BV: jax.Array,
    weights_BV: jax.Array,
    peak: jax.Array,
    filters: Filters,
    num_shards: int = 1,
) -> jax.Array:
    top = lax.cond(
        jnp.any(filters.has_top(choices_BV.shape[1])),
        lambda: top_threshold(choices_BV, weights_BV, filters, num_shards),
        lambda: jnp.full_like(peak, -jnp.inf),
    )
    return jnp.maximum(top, min_p_threshold(peak, filters))


def divisor(temperature: jax.Array) -> jax.Array:
    """Divisor of the logits: 1 for greedy rows."""
    return jnp.where(temperature == 0.0, 1.0, temperature)


XLA = Sampler(_draw, token_logprobs)
"""XLA's code: all platforms."""
