"""The program that prefills; its passes also score, see `runner.programs.score`.

Prefill writes keys and values and computes no logits: the newest token of a request is always
the input of a decode step, so every sampled token comes from the decode program.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from sgljax_engine.attention.base import BlockTables
from sgljax_engine.cache.kv_pages import KVPages, LayerKV, write_routed
from sgljax_engine.cache.layer_states import LayerState
from sgljax_engine.models.spec import Forward, LayerCache, Params, Pass
from sgljax_engine.runner.batches.batch import ForwardBatch
from sgljax_engine.runner.programs.attend import Pages, paged_attend
from sgljax_engine.runner.programs.context import ProgramContext
from sgljax_engine.runner.programs.recur import block_recur

Carry = TypeVar("Carry")


def prefill(params: Params, kv: KVPages, batch: ForwardBatch, *, static: ProgramContext) -> KVPages:
    """Writes the batch's keys and values into its pages. `kv` is donated."""

    def one_pass(kv: KVPages, batch: ForwardBatch, index: jax.Array) -> KVPages:
        del index
        out = forward_pass(params, (*kv.layers, *kv.states), batch, static)
        layers, states = split_caches(out.caches)
        return KVPages(layers, with_routed(kv.routed, out, batch.slot_mapping), states)

    return in_passes(one_pass, kv, batch, static.prefill_pass)


def in_passes(
    one_pass: Callable[[Carry, ForwardBatch, jax.Array], Carry],
    start: Carry,
    batch: ForwardBatch,
    per_pass: int | None,
) -> Carry:
    """Takes a batch through the layers, `per_pass` tokens at a time.

    With several passes, its time grows with the tokens in the batch, not with the bucket. Each pass
    sees the keys of earlier passes, so a request may share pages of any earlier request.
    """
    size = batch.input_ids.shape[0]
    if per_pass is None or size <= per_pass or size % per_pass:
        return one_pass(start, batch, jnp.int32(0))
    passes = jax.tree.map(lambda x: x.reshape(size // per_pass, -1, *x.shape[1:]), batch)
    blocks_per_pass = passes.seq_lens.shape[1]
    num_blocks = jnp.sum(batch.seq_lens > 0, dtype=jnp.int32)

    def body(index: jax.Array, carry: Carry) -> Carry:
        return one_pass(carry, jax.tree.map(lambda x: x[index], passes), index)

    num_passes = (num_blocks + blocks_per_pass - 1) // blocks_per_pass
    return lax.fori_loop(0, num_passes, body, start)


def forward_pass(
    params: Params, caches: tuple[LayerCache, ...], batch: ForwardBatch, static: ProgramContext
) -> Forward:
    tables = BlockTables(
        page_table=batch.page_table,
        positions=batch.positions.reshape(batch.seq_lens.shape[0], -1),
        kv_lens=batch.seq_lens,
    )
    pages = Pages.make(tables, batch.slot_mapping, batch.window_table, batch.window_slots)
    num_queries = tables.positions.shape[1]
    adapters = None if batch.adapters is None else jnp.repeat(batch.adapters, num_queries)
    net, recur = static.context.config.linear_attention, None
    if net is not None:
        assert batch.state_slots is not None
        recur = block_recur(net, tables, batch.state_slots, static.recur_kernels)
    tokens = Pass(
        batch.input_ids,
        batch.positions,
        paged_attend(static.attention, pages),
        caches,
        adapters,
        _is_used(tables) if static.context.has_experts else None,
        recur,
    )
    return static.model.forward(params, static.context, tokens)


def _is_used(tables: BlockTables) -> jax.Array:
    """[T] bool, whether a token is one of a request and not padding at the end of a block."""
    number = jnp.arange(tables.positions.shape[1], dtype=jnp.int32)
    return (tables.positions[:, :1] + number[None] < tables.kv_lens[:, None]).reshape(-1)


def with_routed(routed: jax.Array | None, out: Forward, slots: jax.Array) -> jax.Array | None:
    """The kept experts, with those of a pass added at its tokens' slots."""
    if routed is None or out.routed is None:
        return routed
    return write_routed(routed, out.routed, slots)


def split_caches(
    caches: tuple[LayerCache, ...],
) -> tuple[tuple[LayerKV, ...], tuple[LayerState, ...]]:
    """The pages and the recurrent states of a model's layers."""
    layers = tuple(cache for cache in caches if isinstance(cache, LayerKV))
    return layers, tuple(cache for cache in caches if isinstance(cache, LayerState))
