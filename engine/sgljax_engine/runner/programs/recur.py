"""How recurrent layers of a pass reach their states: in slots, in rows, or only in the batch.

The counterpart of `attend.py`. Prefill and scoring take blocks of tokens of one request, in order;
decode takes one token a row. Given `kernels`, both apply the rule token by token: then a token has
the same bits in all of them, wherever its sequence is cut.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sgljax_engine.attention.base import BlockTables
from sgljax_engine.cache.layer_states import LayerState, VerifyState
from sgljax_engine.layers import delta_net
from sgljax_engine.layers.delta_net import NetInputs, TokenTerms
from sgljax_engine.layers.kernels import CpuKernels, Kernels, XlaKernels
from sgljax_engine.model_config import LinearAttentionConfig
from sgljax_engine.models.spec import LayerCache, Recur
from sgljax_engine.runner.batches.page_ids import NO_SLOT


class _Blocks(NamedTuple):
    """Where the blocks of a pass begin, and whose they are.

    Shape (all [N]): firsts: int32, position of the first token. lens: int32, number of tokens; 0
        for unused blocks, which are last. slots: int32. continues: bool, whether the block goes on
        where the block before ends.
    """

    firsts: jax.Array
    lens: jax.Array
    slots: jax.Array
    continues: jax.Array


def block_recur(
    net: LinearAttentionConfig,
    tables: BlockTables,
    slots: jax.Array,
    kernels: CpuKernels | None = None,
) -> Recur:
    """A `recur` of blocks, whose requests have `slots`; kernels apply the rule token by token."""
    firsts = tables.positions[:, 0]
    lens = jnp.clip(tables.kv_lens - firsts, 0, tables.positions.shape[1])
    lens = jnp.where(tables.kv_lens > 0, lens, 0)
    before = jnp.concatenate([jnp.full(1, -1, jnp.int32), slots[:-1]])
    blocks = _Blocks(firsts, lens, slots, (slots == before) & (firsts > 0))

    def recur(
        inputs: NetInputs, weight: jax.Array, layer: LayerCache
    ) -> tuple[jax.Array, LayerCache]:
        assert isinstance(layer, LayerState)
        return _recur_blocks(net, blocks, inputs, weight, layer, kernels)

    return recur


def _recur_blocks(
    net: LinearAttentionConfig,
    blocks: _Blocks,
    inputs: NetInputs,
    weight: jax.Array,
    layer: LayerState,
    kernels: CpuKernels | None,
) -> tuple[jax.Array, LayerState]:
    count = blocks.lens.shape[0]
    qkv, decay, rate = (x.reshape(count, -1, x.shape[-1]).astype(jnp.float32) for x in inputs)
    size = qkv.shape[1]
    number = jnp.arange(size, dtype=jnp.int32)[None]
    is_token = (number < blocks.lens[:, None])[..., None]
    window, conv = _windows(net, blocks, qkv, layer.conv)
    if kernels is not None:
        slots = jnp.where(is_token[..., 0], blocks.slots[:, None], NO_SLOT)
        is_first = blocks.firsts[:, None] + number == 0
        heads = kernels.net_heads(window, weight, net.head_sizes)
        terms = _terms(heads, decay, rate, slots, is_first)
        matrix, out = kernels.delta_rule(layer.matrix, terms, net.head_sizes)
        return out, LayerState(conv, matrix)
    heads = delta_net.split_heads(delta_net.convolve(window, weight), *net.head_sizes)
    decay, rate = (jnp.where(is_token, x, 0.0) for x in (decay, rate))
    terms = delta_net.chunk_terms(heads, decay, rate)
    last = layer.matrix.shape[0] - 1

    def one_block(
        index: jax.Array, carry: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        matrix, out = carry
        slot = jnp.minimum(blocks.slots[index], last)
        state = lax.dynamic_index_in_dim(matrix, slot, keepdims=False)
        state = jnp.where(blocks.firsts[index] == 0, 0.0, state)
        own = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, index, keepdims=False), terms)
        state, found = delta_net.chunk_step(state, own)
        matrix = lax.dynamic_update_index_in_dim(matrix, state, slot, 0)
        return matrix, lax.dynamic_update_index_in_dim(out, found, index, 0)

    out = jnp.zeros((count, size, net.num_value_heads, net.value_dim), jnp.float32)
    num_used = jnp.sum(blocks.lens > 0, dtype=jnp.int32)
    matrix, out = lax.fori_loop(0, num_used, one_block, (layer.matrix, out))
    return out.reshape(count * size, *out.shape[2:]), LayerState(conv, matrix)


def _terms(*arrays: jax.Array) -> TokenTerms:
    return TokenTerms(*(x.reshape(-1, *x.shape[2:]) for x in arrays))


def _windows(
    net: LinearAttentionConfig, blocks: _Blocks, qkv: jax.Array, conv: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """What the convolution of each block reads, [N, W - 1 + T, C], and the new last inputs."""
    num_before = net.conv_size - 1
    saved = jnp.take(conv, blocks.slots, axis=0, mode="clip")
    saved = jnp.where((blocks.firsts == 0)[:, None, None], 0.0, saved)
    ends = qkv[:, qkv.shape[1] - num_before :]
    ends = jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]])
    before = jnp.where(blocks.continues[:, None, None], ends, saved)
    window = jnp.concatenate([before, qkv], axis=1)
    places = blocks.lens[:, None] + jnp.arange(num_before, dtype=jnp.int32)[None]
    new = jnp.take_along_axis(window, places[..., None], axis=1)
    is_last = ~jnp.concatenate([blocks.continues[1:], jnp.zeros(1, bool)]) & (blocks.lens > 0)
    return window, conv.at[jnp.where(is_last, blocks.slots, NO_SLOT)].set(new, mode="drop")


class RowSlots(NamedTuple):
    """Where the states of rows are that a kernel steps in their slots.

    Shape (all [B]): slots: int32. is_first: bool, whether the state begins with the row's token.
    """

    slots: jax.Array
    is_first: jax.Array


def row_recur(
    net: LinearAttentionConfig,
    active: jax.Array,
    kernels: Kernels,
    in_slots: RowSlots | None = None,
) -> Recur:
    """A `recur` of one token a row, whose state is that of the row; other rows keep theirs.

    With `in_slots` matrices are in the pool, and only inputs of convolutions are those of rows.
    """

    def recur(
        inputs: NetInputs, weight: jax.Array, layer: LayerCache
    ) -> tuple[jax.Array, LayerCache]:
        assert isinstance(layer, LayerState)
        new = inputs.qkv.astype(jnp.float32)[:, None]
        window = jnp.concatenate([layer.conv, new], axis=1)
        conv = jnp.where(active[:, None, None], window[:, 1:], layer.conv)
        slots = None
        if in_slots is not None:
            slots = jnp.where(active, in_slots.slots, NO_SLOT)
        if isinstance(kernels, CpuKernels):
            assert in_slots is not None
            assert slots is not None
            heads = kernels.net_heads(window, weight, net.head_sizes)
            by_row = (x[:, None] for x in (*inputs[1:], slots, in_slots.is_first))
            matrix, out = kernels.delta_rule(layer.matrix, _terms(heads, *by_row), net.head_sizes)
            return out, LayerState(conv, matrix)
        assert isinstance(kernels, XlaKernels)
        heads = delta_net.split_heads(delta_net.convolve(window, weight)[:, 0], *net.head_sizes)
        # A state that neither decays nor changes is the same, without one more pass over it.
        decay, rate = (jnp.where(active[:, None], x, 0.0) for x in inputs[1:])
        if in_slots is not None:
            decay = jnp.where(in_slots.is_first[:, None], -jnp.inf, decay)
        matrix, out = kernels.delta_step(layer.matrix, heads, decay, rate, slots)
        return out, LayerState(conv, matrix)

    return recur


def _row_terms(heads: jax.Array, decay: jax.Array, rate: jax.Array, lens: jax.Array) -> TokenTerms:
    """`TokenTerms` of the first `lens` [B] tokens of each row, [B, T, ...], behind others."""
    rows, size = heads.shape[:2]
    number = jnp.arange(size, dtype=jnp.int32)[None]
    row = jnp.arange(rows, dtype=jnp.int32)[:, None]
    slots = jnp.where(number < lens[:, None], row, NO_SLOT)
    return _terms(heads, decay, rate, slots, jnp.zeros((rows, size), bool))


def verify_recur(
    net: LinearAttentionConfig, lens: jax.Array, width: int, kernels: CpuKernels | None
) -> Recur:
    """A `recur` of a few tokens a row, of which `accept` takes in the first ones later."""

    def recur(
        inputs: NetInputs, weight: jax.Array, layer: LayerCache
    ) -> tuple[jax.Array, LayerCache]:
        assert isinstance(layer, VerifyState)
        qkv, decay, rate = (x.reshape(-1, width, x.shape[-1]).astype(jnp.float32) for x in inputs)
        window = jnp.concatenate([layer.state.conv, qkv], axis=1)
        is_token = jnp.arange(width, dtype=jnp.int32)[None] < lens[:, None]
        terms: tuple[jax.Array, jax.Array]
        if kernels is None:
            heads = delta_net.split_heads(delta_net.convolve(window, weight), *net.head_sizes)
            decay, rate = (jnp.where(is_token[..., None], x, 0.0) for x in (decay, rate))
            of_chunks = delta_net.chunk_terms(heads, decay, rate)
            out, change = jax.vmap(delta_net.chunk_outputs)(layer.state.matrix, of_chunks)
            terms = heads.k, change
        else:
            flat = kernels.net_heads(window, weight, net.head_sizes)
            tokens = _row_terms(flat, decay, rate, lens)
            _, out = kernels.delta_rule(layer.state.matrix, tokens, net.head_sizes)
            terms = flat, rate
        return out.reshape(-1, *out.shape[-2:]), VerifyState(layer.state, window, decay, terms)

    return recur


def accept(
    net: LinearAttentionConfig,
    layer: VerifyState,
    counts: jax.Array,
    kernels: CpuKernels | None = None,
) -> VerifyState:
    """Takes the first `counts` [B] tokens of each row into its state; `kernels` as of the recur."""
    state = layer.state
    places = counts[:, None] + jnp.arange(state.conv.shape[1], dtype=jnp.int32)[None]
    conv = jnp.take_along_axis(layer.window, places[..., None], axis=1)
    if kernels is None:
        state_after = jax.vmap(delta_net.state_after)
        matrix = state_after(state.matrix, *layer.terms, layer.decay, counts)
    else:
        heads, rate = layer.terms
        tokens = _row_terms(heads, layer.decay, rate, counts)
        matrix, _ = kernels.delta_rule(state.matrix, tokens, net.head_sizes)
    return layer._replace(state=LayerState(conv, matrix))
