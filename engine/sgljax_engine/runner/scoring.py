"""The device program that scores given tokens; see `runner.programs` for the others."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sgljax_engine.layers.attention import AttentionOptions, dense_attention
from sgljax_engine.layers.tiles import Together
from sgljax_engine.models.spec import LayerCache, Params
from sgljax_engine.runner.programs import ProgramContext
from sgljax_engine.sampling.logprobs import ExtraLogprobs, LogprobBatch, extra_logprobs

_SCORE_CHUNK_TOKENS = 256


class ScoreOutput(NamedTuple):
    """Of given sequences.

    Shape:
        logprobs: [B, L] float32; entry t is the log-prob of token t + 1, the last one is void.
        extras: Leaves [B, L, ...]; entry t is about token t + 1's place; None if not asked for.
    """

    logprobs: jax.Array
    extras: ExtraLogprobs | None


def score(
    params: Params,
    input_ids_BL: jax.Array,
    temperature: jax.Array,
    extras: LogprobBatch | None,
    *,
    static: ProgramContext,
) -> ScoreOutput:
    """Log-probs of given tokens: log softmax(logits[b, t] / temperature)[ids[b, t + 1]].

    Extra log-probs are raw. Padding belongs at the end of a row, where it disturbs nothing.
    """
    batch, length = input_ids_BL.shape
    positions = jnp.tile(jnp.arange(length, dtype=jnp.int32), batch)

    def attend(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        _: LayerCache | None,
        options: AttentionOptions,
    ) -> tuple[jax.Array, LayerCache | None]:
        def split(x: jax.Array) -> jax.Array:
            return x.reshape(batch, length, *x.shape[1:])

        return dense_attention(split(q), split(k), split(v), options).reshape(q.shape), None

    hidden, _ = static.model.forward(
        params, static.context, input_ids_BL.reshape(-1), positions, attend, None, Together()
    )
    targets = jnp.roll(input_ids_BL, -1, axis=1).reshape(-1)
    row_of_token = jnp.repeat(jnp.arange(batch, dtype=jnp.int32), length)

    def chunk_scores(
        chunk: tuple[jax.Array, jax.Array, jax.Array],
    ) -> tuple[jax.Array, ExtraLogprobs | None]:
        hidden_TD, target_T, row_T = chunk
        logits = static.model.logits(params, static.context, hidden_TD)
        scaled = logits / temperature
        chosen = jnp.take_along_axis(scaled, target_T[:, None], axis=-1)[:, 0]
        more = None
        if extras is not None:
            more = extra_logprobs(logits, extras._replace(token_ids=extras.token_ids[row_T]))
        return chosen - jax.nn.logsumexp(scaled, axis=-1), more

    # In chunks, so that memory does not grow with tokens times vocabulary.
    pad = -(batch * length) % _SCORE_CHUNK_TOKENS

    def split_chunks(x: jax.Array) -> jax.Array:
        padded = jnp.pad(x, ((0, pad), *((0, 0) for _ in x.shape[1:])))
        return padded.reshape(-1, _SCORE_CHUNK_TOKENS, *x.shape[1:])

    chunks = (split_chunks(hidden), split_chunks(targets), split_chunks(row_of_token))
    scores = lax.map(chunk_scores, chunks)

    def join(x: jax.Array) -> jax.Array:
        # No -1: rows may report no ranks or no ids, and then the size of the others is unknown.
        flat = x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])
        return flat[: batch * length].reshape(batch, length, *x.shape[2:])

    return ScoreOutput(*jax.tree.map(join, scores))
