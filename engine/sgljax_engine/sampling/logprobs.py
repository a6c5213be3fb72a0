"""Log-probs of the sampled token and of others at its position.

All of a position come from one sum over the vocabulary, so that a token has one log-prob, to the
bit, wherever it is reported.

Shape legend: B rows, V vocabulary, T most likely tokens, I given tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class LogprobBatch(NamedTuple):
    """Which log-probs to report for each row: token_ids [B, I] int32, as many ranks [T] int32."""

    token_ids: jax.Array
    ranks: jax.Array


class ExtraLogprobs(NamedTuple):
    """Raw log-probs, of softmax(logits).

    Shape:
        values: [B, T] float32, descending; token_ids: [B, T] int32; chosen: [B, I] float32.
    """

    values: jax.Array
    token_ids: jax.Array
    chosen: jax.Array


class Logprobs(NamedTuple):
    """Log-probs of a position, and those of others if asked for.

    Shape: raw: [B] float32, log softmax(logits)[token]. scaled: [B] float32, log softmax(logits /
    temperature)[token]; `raw` when greedy.
    """

    raw: jax.Array
    scaled: jax.Array
    extras: ExtraLogprobs | None


def token_logprobs(
    logits_BV: jax.Array,
    token: jax.Array,
    temperature: jax.Array,
    batch: LogprobBatch | None = None,
) -> Logprobs:
    """Log-probs of one token per row, and of others, by the model's logits [B, V] float32."""
    peak = jnp.max(logits_BV, axis=-1, keepdims=True)
    divisor = jnp.where(temperature == 0.0, 1.0, temperature)[:, None]
    below = logits_BV - peak
    scaled_total = jnp.sum(jnp.exp(below / divisor), axis=-1, keepdims=True)
    total = jnp.sum(jnp.exp(below), axis=-1, keepdims=True)
    # Computed once: each log-prob is a difference from these.
    peak, normalizer = lax.optimization_barrier((peak, jnp.log(total)))

    def raw(logits: jax.Array) -> jax.Array:
        return logits - peak - normalizer

    chosen = jnp.take_along_axis(logits_BV, token[:, None], axis=-1)
    scaled = (chosen - peak) / divisor - jnp.log(scaled_total)
    extras = None
    if batch is not None:
        values, token_ids = lax.top_k(logits_BV, batch.ranks.shape[0])
        given = jnp.take_along_axis(logits_BV, batch.token_ids, axis=-1)
        extras = ExtraLogprobs(raw(values), token_ids.astype(jnp.int32), raw(given))
    # At a temperature of 1 both are the same number, but two sums of it may differ.
    raw_chosen = raw(chosen)
    scaled = jnp.where(divisor == 1.0, raw_chosen, scaled)
    return Logprobs(raw_chosen[:, 0], scaled[:, 0], extras)
