"""The device programs: pure functions over pytrees, compiled once per bucket by the runner.

Prefill writes keys and values and computes no logits: the newest token of a request is always
the input of a decode step, so every sampled token comes from the decode program.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sgljax_engine.attention.base import (
    BlockTables,
)
from sgljax_engine.attention.contiguous import shared_keys
from sgljax_engine.cache.contiguous_kv import (
    ContiguousKV,
    DecodeCache,
    RowTable,
    gather_contiguous_kv,
)
from sgljax_engine.cache.kv_pages import KVPages, LayerKV, write_routed
from sgljax_engine.cache.layer_states import LayerState, put_states, take_states
from sgljax_engine.layers.tiles import Tiles, Together, tokens_in_tiles
from sgljax_engine.model_config import LinearAttentionConfig
from sgljax_engine.models.spec import (
    Forward,
    LayerCache,
    Params,
    Recur,
)
from sgljax_engine.runner.batches.batch import DecodeBatch, ForwardBatch
from sgljax_engine.runner.batches.page_ids import NO_SLOT
from sgljax_engine.runner.programs.attend import (
    Pages,
    contiguous_attend,
    decode_attend,
    paged_attend,
    slots_at,
)
from sgljax_engine.runner.programs.context import ProgramContext
from sgljax_engine.runner.programs.recur import block_recur, row_recur
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


def prefill(params: Params, kv: KVPages, batch: ForwardBatch, *, static: ProgramContext) -> KVPages:
    """Writes the batch's keys and values into its pages. `kv` is donated.

    With several passes, its time grows with the tokens in the batch, not with the bucket. Each pass
    sees the keys of earlier passes, so a request may share pages of any earlier request.
    """
    size, per_pass = batch.input_ids.shape[0], static.prefill_pass
    if per_pass is None or size <= per_pass or size % per_pass:
        return _prefill_pass(params, kv, batch, static)
    passes = jax.tree.map(lambda x: x.reshape(size // per_pass, -1, *x.shape[1:]), batch)
    blocks_per_pass = passes.seq_lens.shape[1]
    num_blocks = jnp.sum(batch.seq_lens > 0, dtype=jnp.int32)

    def one_pass(index: jax.Array, kv: KVPages) -> KVPages:
        return _prefill_pass(params, kv, jax.tree.map(lambda x: x[index], passes), static)

    num_passes = (num_blocks + blocks_per_pass - 1) // blocks_per_pass
    return lax.fori_loop(0, num_passes, one_pass, kv)


def _prefill_pass(
    params: Params, kv: KVPages, batch: ForwardBatch, static: ProgramContext
) -> KVPages:
    tables = BlockTables(
        page_table=batch.page_table,
        positions=batch.positions.reshape(batch.seq_lens.shape[0], -1),
        kv_lens=batch.seq_lens,
    )
    pages = Pages.make(tables, batch.slot_mapping, batch.window_table, batch.window_slots)
    attend = paged_attend(static, pages, static.prefill_attention)
    num_blocks, num_queries = tables.positions.shape
    num_used = jnp.sum(batch.seq_lens > 0, dtype=jnp.int32) * num_queries
    tokens = tokens_in_tiles(
        static.context.tile_widths,
        num_blocks * num_queries,
        num_used,
        _is_used(batch, tables, static) if static.context.has_experts else None,
    )
    adapters = None if batch.adapters is None else jnp.repeat(batch.adapters, num_queries)
    net = static.context.config.linear_attention
    out = static.model.forward(
        params,
        static.context,
        batch.input_ids,
        batch.positions,
        attend,
        (*kv.layers, *kv.states),
        tokens,
        adapters,
        None if net is None else block_recur(net, tables, batch.state_slots, static.recur_kernels),
    )
    assert out.kv is not None
    layers, _, states = _split_caches(out.kv)
    return KVPages(layers, with_routed(kv.routed, out, pages.slots), states)


def _is_used(batch: ForwardBatch, tables: BlockTables, static: ProgramContext) -> jax.Array:
    """[T] bool, whether a token is one of a request."""
    if static.context.config.linear_attention is None:
        return batch.slot_mapping != NO_SLOT
    # A token may be there for its state alone.
    number = jnp.arange(tables.positions.shape[1], dtype=jnp.int32)
    return (tables.positions[:, :1] + number[None] < tables.kv_lens[:, None]).reshape(-1)


def with_routed(routed: jax.Array | None, out: Forward, slots: jax.Array) -> jax.Array | None:
    """The kept experts, with those of a pass added at its tokens' slots."""
    if routed is None or out.routed is None:
        return routed
    return write_routed(routed, out.routed, slots)


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
    contiguous_kv: ContiguousKV,
    rows: DecodeBatch,
    sampling: SamplingBatch,
    options: RowOptions,
    num_steps: jax.Array,
    max_finished: jax.Array,
    *,
    static: ProgramContext,
) -> tuple[KVPages, ContiguousKV, DecodeOutput]:
    """Generates up to `num_steps` tokens per row in one dispatch; donates `kv`, `contiguous_kv`.

    Ends early when no row can continue, or when `max_finished` rows have finished for good.
    Attention reads `contiguous_kv` if it is not empty, else the pages. Recurrent states of the rows
    leave their slots for the time of the dispatch.
    """
    caches: tuple[LayerCache, ...] = kv.layers
    shared = None
    if contiguous_kv:
        lens = jnp.where(rows.step_limits > 0, rows.positions, 0)
        end = jnp.max(lens + jnp.minimum(rows.step_limits, num_steps))
        tables = _tables_of_layers(rows, static)
        contiguous_kv = gather_contiguous_kv(
            contiguous_kv, kv.layers, tables, lens, end, rows.num_ready
        )
        caches = tuple(DecodeCache(*both) for both in zip(kv.layers, contiguous_kv, strict=True))
        shared = shared_keys(rows.page_table, lens, static.page_size)
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
        logits, new_caches, routed = _next_logits(
            params, carry, rows, active, shared, tokens, static
        )
        adjusted = None
        if table is not None:
            adjusted = adjust_logits(logits, table, sampling.stop_ids, sampling.step + step)
        sampled = sample(
            logits,
            sampling,
            step,
            adjusted,
            sampler_tokens,
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
            caches=new_caches,
            routed=routed,
            input_ids=jnp.where(active, sampled.token, carry.input_ids),
            table=table,
            output=_append(carry.output, step, sampled, active, is_stop),
        )

    num_used = jnp.sum(rows.step_limits > 0, dtype=jnp.int32)
    num_rows = rows.input_ids.shape[0]
    tokens = tokens_in_tiles(static.context.tile_widths, num_rows, num_used)
    sampler_tokens = static.sampler_tokens(num_rows, num_used)
    start = _Carry(
        step=jnp.zeros((), jnp.int32),
        caches=caches,
        routed=kv.routed,
        input_ids=rows.input_ids,
        table=options.table,
        output=empty_output(rows.input_ids.shape[0], static.max_steps, options.logprobs),
    )
    end = lax.while_loop(keep_going, body, start)
    layers, contiguous_kv, states = _split_caches(end.caches)
    if rows.state_slots is not None:
        states = put_states(kv.states, states, rows.state_slots)
    return KVPages(layers, end.routed, states), contiguous_kv, end.output


def _tables_of_layers(rows: DecodeBatch, static: ProgramContext) -> list[RowTable]:
    """Page table of each cached layer."""
    everything = RowTable(rows.page_table)
    if rows.window_table is None:
        return [everything] * len(static.in_windows)
    windows = RowTable(rows.window_table, has_gaps=True)
    return [windows if in_window else everything for in_window in static.in_windows]


def _split_caches(
    caches: tuple[LayerCache, ...],
) -> tuple[tuple[LayerKV, ...], ContiguousKV, tuple[LayerState, ...]]:
    states = tuple(c for c in caches if isinstance(c, LayerState))
    pages = tuple(
        c.pages if isinstance(c, DecodeCache) else c
        for c in caches
        if isinstance(c, (LayerKV, DecodeCache))
    )
    return pages, tuple(c.contiguous for c in caches if isinstance(c, DecodeCache)), states


def _next_logits(
    params: Params,
    carry: _Carry,
    rows: DecodeBatch,
    active: jax.Array,
    shared: jax.Array | None,
    tokens: Together | Tiles,
    static: ProgramContext,
) -> tuple[jax.Array, tuple[LayerCache, ...], jax.Array | None]:
    """One forward pass over each row's newest token.

    Returns logits [B, V], the caches with the pass's keys, and the kept experts with the pass's.
    """
    if static.context.has_experts:
        tokens = tokens._replace(is_used=active)
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
    if shared is not None:
        attend = contiguous_attend(pages, active, shared)
    else:
        attend = decode_attend(static, pages)
    net = static.context.config.linear_attention
    logits, out = static.model.token_logits(
        params,
        static.context,
        carry.input_ids,
        positions,
        attend,
        carry.caches,
        tokens,
        rows.adapters,
        None if net is None else _row_recur(static, net, active),
    )
    assert out.kv is not None
    return logits, out.kv, with_routed(carry.routed, out, pages.slots)


def _row_recur(static: ProgramContext, net: LinearAttentionConfig, active: jax.Array) -> Recur:
    by_token = static.recur_kernels is not None
    return row_recur(net, active, static.context.kernels, by_token=by_token)


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
