"""Log-probs of tokens other than the one at a position.

Shape legend: B rows, V vocabulary, T most likely tokens, I given tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class LogprobBatch(NamedTuple):
    """Which log-probs to report for each row.

    Shape: token_ids: [B, I] int32, in range. ranks: [T] int32; only its length matters.
    """

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


def extra_logprobs(logits_BV: jax.Array, batch: LogprobBatch) -> ExtraLogprobs:
    """The log-probs that the rows ask for."""
    total_B1 = jax.nn.logsumexp(logits_BV, axis=-1, keepdims=True)
    values, token_ids = lax.top_k(logits_BV, batch.ranks.shape[0])
    chosen = jnp.take_along_axis(logits_BV, batch.token_ids, axis=-1)
    return ExtraLogprobs(values - total_B1, token_ids.astype(jnp.int32), chosen - total_B1)
