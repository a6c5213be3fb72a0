"""The device program that scores given tokens; see `runner.programs.forward` for the others."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from sgljax_engine.attention.base import AttentionOptions, BlockTables
from sgljax_engine.cache.kv_pages import LayerKV
from sgljax_engine.layers.tiles import tokens_in_tiles
from sgljax_engine.models.spec import LayerCache, NewKV, Params
from sgljax_engine.runner.batches.packing import ScoreBatch
from sgljax_engine.runner.programs.attend import own_attend
from sgljax_engine.runner.programs.context import ProgramContext
from sgljax_engine.runner.programs.recur import block_recur
from sgljax_engine.sampling.logprobs import ExtraLogprobs, LogprobBatch
from sgljax_engine.sampling.sampler import map_logprobs

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

    Its time follows the tokens in the batch. With deterministic sampling it gives the bits of
    decoding.

    Args:
        params: Physical weights.
        batch: The tokens.
        temperature: Scalar float32, > 0.
        extras: Extra log-probs to report, the same [1, I] for all tokens; they are raw.
        adapter: Scalar int32, the adapter slot of all tokens, -1 for none; None for an engine
            without adapters.
        static: What the program is compiled for.
    """
    num_tokens, num_blocks = batch.input_ids.shape[0], batch.seq_lens.shape[0]
    block = num_tokens // num_blocks
    tables = BlockTables(
        batch.page_table, batch.positions.reshape(num_blocks, block), batch.seq_lens
    )

    def in_blocks(x: jax.Array) -> jax.Array:
        return x.reshape(num_blocks, block, *x.shape[1:])

    def attend(
        q: jax.Array, new: NewKV | None, layer: LayerCache | None, options: AttentionOptions
    ) -> tuple[jax.Array, LayerCache]:
        if new is not None:
            layer = LayerKV(*(in_blocks(x).swapaxes(1, 2) for x in new))
        assert isinstance(layer, LayerKV)
        return static.attention(in_blocks(q), layer, tables, options).reshape(q.shape), layer

    widths, per_pass = static.context.tile_widths, static.prefill_pass
    num_used = jnp.sum(batch.seq_lens > 0, dtype=jnp.int32) * block
    in_passes = (per_pass,) if per_pass is not None and num_tokens > per_pass else ()
    is_used = _is_used(tables) if static.context.has_experts else None
    tokens = tokens_in_tiles(widths or in_passes, num_tokens, num_used, is_used)
    net = static.context.config.linear_attention
    hidden = static.model.forward(
        params,
        static.context,
        batch.input_ids,
        batch.positions,
        own_attend(static.prepare, attend),
        None,
        tokens,
        _repeated(adapter, num_tokens),
        None if net is None else block_recur(net, tables, None, static.recur_kernels),
    ).hidden

    def score_tile(
        args: tuple[jax.Array, jax.Array],
    ) -> tuple[jax.Array, ExtraLogprobs | None]:
        places, targets = args
        width = places.shape[0]
        logits = static.model.logits(
            params, static.context, jnp.take(hidden, places, axis=0), _repeated(adapter, width)
        )
        # Not a constant, see `Tiles`; the whole tile, since there is nothing to save.
        num_rows = jnp.where(batch.num_scored > 0, width, 0).astype(jnp.int32)
        rows = static.sampler_tokens(width, num_rows)
        temperatures = jnp.full(width, temperature, jnp.float32)
        others = None
        if extras is not None:  # the same for all
            others = extras._replace(token_ids=jnp.repeat(extras.token_ids, width, axis=0))
        found = map_logprobs(rows, static.sampler, logits, targets, temperatures, others)
        return found.scaled, found.extras

    places = tokens_in_tiles(
        widths or (min(_LOGITS_TILE, num_tokens),), num_tokens, batch.num_scored
    )
    wanted = jax.tree.map(places.split, (batch.places, batch.targets))
    return ScoreOutput(*jax.tree.map(places.join, places.map(score_tile, wanted)))


def _is_used(tables: BlockTables) -> jax.Array:
    """[T] bool, whether a token is one of a sequence and not padding at the end of a block."""
    places = jnp.arange(tables.positions.shape[1], dtype=jnp.int32)
    return (tables.positions[:, :1] + places[None] < tables.kv_lens[:, None]).reshape(-1)


def _repeated(adapter: jax.Array | None, num_tokens: int) -> jax.Array | None:
    return None if adapter is None else jnp.full(num_tokens, adapter, jnp.int32)
