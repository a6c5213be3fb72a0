"""Masks, biases and penalties, applied to logits before temperature from the sampling table.

Rows list the tokens that they treat specially, in lists of a common width W, so the work grows with
the lists and not with the vocabulary. Batches without such rows skip it. The order is vLLM's:
allowed and bad tokens, min_new_tokens, logit_bias, then the repetition, frequency and presence
penalties.

Shape legend: B rows, V vocabulary, W list width, S stop ids.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class SamplingTable(NamedTuple):
    """The settings of rows that change logits. Unused list entries hold the id V, no token.

    Shape (all [B] unless said): edit_ids: [B, W] int32, tokens of logit_bias, allowed_token_ids and
        bad_token_ids. edit_values: [B, W] float32, added to their logits; -inf forbids. allow_only:
        bool, the row may generate only its `edit_ids`. min_new_tokens: int32. repetition,
        frequency, presence: float32 penalties; 1, 0 and 0 change nothing. seen_ids: [B, W] int32,
        each token of prompt and output once; only for rows with penalties. seen_counts: [B, W]
        int32, their occurrences in the output. num_seen: int32, used entries of `seen_ids`.
    """

    edit_ids: jax.Array
    edit_values: jax.Array
    allow_only: jax.Array
    min_new_tokens: jax.Array
    repetition: jax.Array
    frequency: jax.Array
    presence: jax.Array
    seen_ids: jax.Array
    seen_counts: jax.Array
    num_seen: jax.Array


def adjust_logits(
    logits_BV: jax.Array, table: SamplingTable, stop_ids_BS: jax.Array, num_output_B: jax.Array
) -> jax.Array:
    """Logits [B, V] after masks, biases and penalties; `num_output_B` tokens were generated."""
    vocab_size = logits_BV.shape[1]
    rows = jnp.arange(logits_BV.shape[0], dtype=jnp.int32)[:, None]
    edited = _pick(logits_BV, table.edit_ids) + table.edit_values
    out = jnp.where(table.allow_only[:, None], -jnp.inf, logits_BV)
    out = out.at[rows, table.edit_ids].set(edited, mode="drop")
    is_early = (num_output_B < table.min_new_tokens)[:, None] & (stop_ids_BS >= 0)
    stops = jnp.where(is_early, stop_ids_BS, vocab_size)
    out = out.at[rows, stops].set(-jnp.inf, mode="drop")
    return out.at[rows, table.seen_ids].set(_penalise(out, table), mode="drop")


def _penalise(logits_BV: jax.Array, table: SamplingTable) -> jax.Array:
    """The penalised logits [B, W] of the seen tokens."""
    seen = _pick(logits_BV, table.seen_ids)
    factor = table.repetition[:, None]
    seen = jnp.where(seen > 0, seen / factor, seen * factor)
    counts = table.seen_counts.astype(jnp.float32)
    seen = seen - table.frequency[:, None] * counts
    return seen - table.presence[:, None] * (counts > 0)


def _pick(logits_BV: jax.Array, ids_BW: jax.Array) -> jax.Array:
    return jnp.take_along_axis(logits_BV, ids_BW, axis=1, mode="clip")


def record(table: SamplingTable, token_B: jax.Array, is_active_B: jax.Array) -> SamplingTable:
    """The table after each active row has generated a token. Lists need room for a new entry."""
    rows = jnp.arange(token_B.shape[0], dtype=jnp.int32)
    matches = table.seen_ids == token_B[:, None]
    is_known = jnp.any(matches, axis=1)
    width = table.seen_ids.shape[1]
    place = jnp.where(is_known, jnp.argmax(matches, axis=1).astype(jnp.int32), table.num_seen)
    place = jnp.where(is_active_B, place, width)
    return table._replace(
        seen_ids=table.seen_ids.at[rows, place].set(token_B, mode="drop"),
        seen_counts=table.seen_counts.at[rows, place].add(1, mode="drop"),
        num_seen=table.num_seen + (is_active_B & ~is_known).astype(jnp.int32),
    )
