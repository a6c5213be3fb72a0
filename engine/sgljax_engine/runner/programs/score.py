"""The device program that scores given tokens; see `runner.programs.prefill` for its passes."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sgljax_engine.cache.layer_states import LayerState, state_shapes
from sgljax_engine.models.spec import LayerCache, Params
from sgljax_engine.runner.batches.batch import ForwardBatch
from sgljax_engine.runner.batches.packing import ScoreBatch
from sgljax_engine.runner.programs.context import ProgramContext
from sgljax_engine.runner.programs.prefill import forward_pass, in_passes
from sgljax_engine.sampling.logprobs import ExtraLogprobs, LogprobBatch

_LOGITS_TILE = 256
"""Tokens whose logits are in memory together."""


class ScoreOutput(NamedTuple):
    """Results for a batch's scored tokens; the first `num_scored` entries are valid.

    Shape: logprobs: [T] float32. extras: Leaves [T, ...], for the place of each scored token; None
        if not asked for.
    """

    logprobs: jax.Array
    extras: ExtraLogprobs | None


def score(
    params: Params,
    batch: ScoreBatch,
    temperature: jax.Array,
    extras: LogprobBatch | None,
    adapter: jax.Array | None,
    *,
    static: ProgramContext,
) -> ScoreOutput:
    """Log-probs of given tokens: log softmax(logits / temperature)[target] at each place.

    Its time follows the tokens in the batch. Keys live in pages of its own, a block each. With
    kernels that are batch-invariant it gives the bits of decoding. Extra log-probs, the same [1, I]
    for all tokens, are raw. The temperature is above 0.
    """
    hidden = _hidden(params, batch, adapter, static)
    num_tokens = batch.input_ids.shape[0]
    tile = min(_LOGITS_TILE, num_tokens)
    temperatures = jnp.full(tile, temperature, jnp.float32)
    adapters = None if adapter is None else jnp.full(tile, adapter, jnp.int32)
    others = None
    if extras is not None:  # the same for all
        others = extras._replace(token_ids=jnp.repeat(extras.token_ids, tile, axis=0))
    more = (0, -num_tokens % tile)
    places, targets = jnp.pad(batch.places, more), jnp.pad(batch.targets, more)

    def score_tile(index: jax.Array) -> ScoreOutput:
        own, wanted = (lax.dynamic_slice_in_dim(x, index * tile, tile) for x in (places, targets))
        inputs = jnp.take(hidden, own, axis=0)
        logits = static.model.logits(params, static.context, inputs, adapters)
        # In memory: else XLA may compute them again elsewhere, and round otherwise.
        logits = lax.optimization_barrier(logits)
        found = static.sampler.logprobs(logits, wanted, temperatures, others)
        return ScoreOutput(found.scaled, found.extras)

    def put(index: jax.Array, out: ScoreOutput) -> ScoreOutput:
        return jax.tree.map(
            lambda x, new: lax.dynamic_update_slice_in_dim(x, new, index * tile, 0),
            out,
            score_tile(index),
        )

    empty = jax.tree.map(
        lambda x: jnp.zeros((places.shape[0], *x.shape[1:]), x.dtype),
        jax.eval_shape(score_tile, jnp.int32(0)),
    )
    out = lax.fori_loop(0, (batch.num_scored + tile - 1) // tile, put, empty)
    return jax.tree.map(lambda x: x[:num_tokens], out)


def _hidden(
    params: Params, batch: ScoreBatch, adapter: jax.Array | None, static: ProgramContext
) -> jax.Array:
    """The last hidden state [T, D] of each token."""
    num_tokens, num_blocks = batch.input_ids.shape[0], batch.seq_lens.shape[0]
    context = static.context
    net = context.config.linear_attention
    zeros = jnp.zeros(num_blocks, jnp.int32)
    forward = ForwardBatch(
        batch.input_ids,
        batch.positions,
        jnp.arange(num_tokens, dtype=jnp.int32),
        batch.page_table,
        batch.seq_lens,
        None if adapter is None else zeros + adapter,
        state_slots=None if net is None else zeros,
    )
    caches: list[LayerCache] = []
    for layout in static.page_layouts:
        size = num_tokens // num_blocks
        caches.append(layout.make_layer(num_blocks, size, context.dtype, jnp.zeros))
    if net is not None:
        states = (jnp.zeros(shape, jnp.float32) for shape in state_shapes(net, 1))
        caches += [LayerState(*states)] * len(context.config.state_layers)

    def one_pass(
        carry: tuple[tuple[LayerCache, ...], jax.Array], batch: ForwardBatch, index: jax.Array
    ) -> tuple[tuple[LayerCache, ...], jax.Array]:
        caches, hidden = carry
        out = forward_pass(params, caches, batch, static)
        start = index * len(batch.input_ids)
        return out.caches, lax.dynamic_update_slice_in_dim(hidden, out.hidden, start, 0)

    hidden = jnp.zeros((num_tokens, context.config.hidden_size), context.activation_dtype)
    return in_passes(one_pass, (tuple(caches), hidden), forward, static.prefill_pass)[1]
