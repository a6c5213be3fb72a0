"""The decode program: pure functions over pytrees, compiled once per bucket by the runner."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sgljax_engine.attention.base import BlockTables
from sgljax_engine.cache.kv_pages import KVPages
from sgljax_engine.cache.layer_states import put_states, take_states
from sgljax_engine.models.spec import Forward, LayerCache, Params, Pass
from sgljax_engine.runner.batches.batch import DecodeBatch
from sgljax_engine.runner.programs.attend import Pages, paged_attend, slots_at
from sgljax_engine.runner.programs.context import ProgramContext
from sgljax_engine.runner.programs.prefill import split_caches, with_routed
from sgljax_engine.runner.programs.recur import row_recur
from sgljax_engine.sampling.logprobs import ExtraLogprobs, LogprobBatch
from sgljax_engine.sampling.sampler import Sampled, SamplingBatch, sample
from sgljax_engine.sampling.table import SamplingTable, adjust_logits, record


class DecodeOutput(NamedTuple):
    """Results of a decode dispatch. Row b's tokens are the first `num_tokens[b]` of column b.

    Shape: token_ids: [max_steps, B] int32. logprobs, scaled_logprobs, processed_logprobs:
        [max_steps, B] float32; see `sampler.Sampled`. num_tokens: [B] int32. stopped: [B] bool,
        whether the last token is one of the row's stop ids, or has a log-prob of NaN. extras:
        Leaves [max_steps, B, ...]; None if no row asks for them.
    """

    token_ids: jax.Array
    logprobs: jax.Array
    scaled_logprobs: jax.Array
    processed_logprobs: jax.Array
    num_tokens: jax.Array
    stopped: jax.Array
    extras: ExtraLogprobs | None


class RowOptions(NamedTuple):
    """Options that only some batches need; None costs nothing.

    Attributes:
        table: Table of rows whose settings change logits.
        logprobs: Batch of rows that ask for further log-probs.
    """

    table: SamplingTable | None = None
    logprobs: LogprobBatch | None = None


class _Carry(NamedTuple):
    step: jax.Array
    caches: tuple[LayerCache, ...]
    routed: jax.Array | None
    input_ids: jax.Array
    table: SamplingTable | None
    output: DecodeOutput


def decode(
    params: Params,
    kv: KVPages,
    rows: DecodeBatch,
    sampling: SamplingBatch,
    options: RowOptions,
    num_steps: jax.Array,
    max_finished: jax.Array,
    *,
    static: ProgramContext,
) -> tuple[KVPages, DecodeOutput]:
    """Generates up to `num_steps` tokens per row in one dispatch; donates `kv`.

    Ends early when no row can continue, or when `max_finished` rows have finished for good.
    Recurrent states of the rows leave their slots for the time of the dispatch.
    """
    caches: tuple[LayerCache, ...] = kv.layers
    if rows.state_slots is not None:
        caches = (*caches, *take_states(kv.states, rows.state_slots, rows.positions))

    def is_active(carry: _Carry) -> jax.Array:
        return (carry.step < rows.step_limits) & ~carry.output.stopped

    def keep_going(carry: _Carry) -> jax.Array:
        at_end = (carry.step >= rows.step_limits) & rows.ends_at_limit & (rows.step_limits > 0)
        num_finished = jnp.sum(carry.output.stopped | at_end, dtype=jnp.int32)
        in_time = (carry.step < num_steps) & (num_finished < max_finished)
        return in_time & jnp.any(is_active(carry))

    def body(carry: _Carry) -> _Carry:
        step, table = carry.step, carry.table
        active = is_active(carry)
        logits, out, slots = _next_logits(params, carry, rows, active, static)
        adjusted = None
        if table is not None:
            adjusted = adjust_logits(logits, table, sampling.stop_ids, sampling.step + step)
        sampled = sample(
            logits,
            sampling,
            step,
            adjusted,
            static.num_vocab_shards,
            static.sampler,
            options.logprobs,
        )
        if table is not None:
            table = record(table, sampled.token, active)
        is_stop = jnp.any(sampled.token[:, None] == sampling.stop_ids, axis=-1)
        is_stop = active & (is_stop | jnp.isnan(sampled.logprob))
        return _Carry(
            step=step + 1,
            caches=out.caches,
            routed=with_routed(carry.routed, out, slots),
            input_ids=jnp.where(active, sampled.token, carry.input_ids),
            table=table,
            output=_append(carry.output, step, sampled, active, is_stop),
        )

    start = _Carry(
        step=jnp.zeros((), jnp.int32),
        caches=caches,
        routed=kv.routed,
        input_ids=rows.input_ids,
        table=options.table,
        output=empty_output(rows.input_ids.shape[0], static.max_steps, options.logprobs),
    )
    end = lax.while_loop(keep_going, body, start)
    layers, states = split_caches(end.caches)
    if rows.state_slots is not None:
        states = put_states(kv.states, states, rows.state_slots)
    return KVPages(layers, end.routed, states), end.output


def _next_logits(
    params: Params, carry: _Carry, rows: DecodeBatch, active: jax.Array, static: ProgramContext
) -> tuple[jax.Array, Forward, jax.Array]:
    """One forward pass over each row's newest token: logits [B, V], the pass, and slots [B]."""
    positions = rows.positions + carry.step
    tables = BlockTables(
        page_table=rows.page_table,
        positions=positions[:, None],
        kv_lens=jnp.where(active, positions + 1, 0),
    )

    def slots_in(table: jax.Array) -> jax.Array:
        return slots_at(table, positions, active, static.page_size)

    of_windows = None if rows.window_table is None else slots_in(rows.window_table)
    pages = Pages.make(tables, slots_in(rows.page_table), rows.window_table, of_windows)
    context, net = static.context, static.context.config.linear_attention
    tokens = Pass(
        carry.input_ids,
        positions,
        paged_attend(static.attention, pages),
        carry.caches,
        rows.adapters,
        active if context.has_experts else None,
        None if net is None else row_recur(net, active, context.kernels),
    )
    out = static.model.forward(params, context, tokens)
    return static.model.logits(params, context, out.hidden, rows.adapters), out, pages.slots


def empty_output(batch_size: int, max_steps: int, logprobs: LogprobBatch | None) -> DecodeOutput:
    """Empty output for that many tokens of each row."""
    per_step = (max_steps, batch_size)
    return DecodeOutput(
        token_ids=jnp.zeros(per_step, jnp.int32),
        logprobs=jnp.zeros(per_step, jnp.float32),
        scaled_logprobs=jnp.zeros(per_step, jnp.float32),
        processed_logprobs=jnp.zeros(per_step, jnp.float32),
        num_tokens=jnp.zeros(batch_size, jnp.int32),
        stopped=jnp.zeros(batch_size, bool),
        extras=empty_extras(per_step, logprobs),
    )


def empty_extras(shape: tuple[int, ...], logprobs: LogprobBatch | None) -> ExtraLogprobs | None:
    """Empty further log-probs of that shape; None if no row asks for any."""
    if logprobs is None:
        return None
    num_top, num_ids = logprobs.ranks.shape[0], logprobs.token_ids.shape[1]
    return ExtraLogprobs(
        values=jnp.zeros((*shape, num_top), jnp.float32),
        token_ids=jnp.zeros((*shape, num_top), jnp.int32),
        chosen=jnp.zeros((*shape, num_ids), jnp.float32),
    )


def _append(
    out: DecodeOutput,
    step: jax.Array,
    sampled: Sampled,
    active: jax.Array,
    is_stop: jax.Array,
) -> DecodeOutput:
    return DecodeOutput(
        token_ids=out.token_ids.at[step].set(sampled.token),
        logprobs=out.logprobs.at[step].set(sampled.logprob),
        scaled_logprobs=out.scaled_logprobs.at[step].set(sampled.scaled_logprob),
        processed_logprobs=out.processed_logprobs.at[step].set(sampled.processed_logprob),
        num_tokens=out.num_tokens + active.astype(jnp.int32),
        stopped=out.stopped | is_stop,
        extras=jax.tree.map(
            lambda all_steps, new: all_steps.at[step].set(new), out.extras, sampled.extras
        ),
    )
