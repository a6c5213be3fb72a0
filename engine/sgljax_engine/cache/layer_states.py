"""The device arrays of recurrent states: a pool of slots, each the state of one sequence.

A layer with a recurrence (a gated delta net) keeps no keys, but a state of fixed size: the last
inputs of its convolution, and one matrix a value head. Both are float32. As with pages, every
program that writes them takes them donated and returns them. A slot's contents count from the first
token of its sequence on, which starts from zeros whatever the slot held; so nobody clears slots.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from sgljax_engine.cache.zeros import MakeZeros
from sgljax_engine.model_config import LinearAttentionConfig


class LayerState(NamedTuple):
    """One layer's states; in a decode dispatch, those of its rows, or the pool's matrices.

    Shape: conv: [num_slots, W - 1, C] float32. matrix: [num_slots, V, h, d] float32. The legend is
        that of `layers.delta_net`.
    """

    conv: jax.Array
    matrix: jax.Array


class VerifyState(NamedTuple):
    """A layer's states of the rows of a step with drafts, before it is known which are right.

    Shape: state: Of the rows, before the step. window: [B, W - 1 + T, C], what the convolution
        read. decay: [B, T, V]. terms: Of the rule in blocks, keys [B, T, K, h] and changes
        [B, K, R, T, d] of `delta_net.chunk_outputs`; token by token, heads [B, T, C] and rates
        [B, T, V]. All float32; T is the most tokens of a row.
    """

    state: LayerState
    window: jax.Array
    decay: jax.Array
    terms: tuple[jax.Array, jax.Array]


def state_shapes(net: LinearAttentionConfig, num_slots: int) -> tuple[tuple[int, ...], ...]:
    return (
        (num_slots, net.conv_size - 1, net.num_channels),
        (num_slots, net.num_value_heads, net.key_dim, net.value_dim),
    )


def state_bytes(net: LinearAttentionConfig | None, num_shards: int = 1) -> int:
    """Bytes of one sequence's state in all layers; 0 without such layers.

    On all of `num_shards` devices, each of which has the inputs of the convolution.
    """
    if net is None:
        return 0
    conv, matrix = map(math.prod, state_shapes(net, 1))
    return sum(net.layers) * 4 * (num_shards * conv + matrix)


def allocate_states(
    net: LinearAttentionConfig | None,
    shardings: tuple[jax.sharding.Sharding, jax.sharding.Sharding],
    *,
    num_slots: int,
    make_zeros: MakeZeros,
) -> tuple[LayerState, ...]:
    """Makes zeroed states: one for each layer that has some, with the shardings of its parts.

    Engine thread only.
    """
    if net is None:
        return ()
    return tuple(
        LayerState(
            *(
                make_zeros(shape, jnp.dtype(jnp.float32), sharding)
                for shape, sharding in zip(state_shapes(net, num_slots), shardings, strict=True)
            )
        )
        for _ in range(sum(net.layers))
    )


def verify_state(
    net: LinearAttentionConfig, state: LayerState, num_tokens: int, *, by_token: bool
) -> VerifyState:
    """The states of rows at the beginning of a dispatch with so many tokens a row."""
    rows, groups = state.conv.shape[0], net.num_key_heads

    def zeros(*shape: int) -> jax.Array:
        return jnp.zeros((rows, *shape), jnp.float32)

    rates = zeros(num_tokens, net.num_value_heads)
    if by_token:
        terms = zeros(num_tokens, net.num_channels), rates
    else:
        changes = zeros(groups, net.ratio, num_tokens, net.value_dim)
        terms = zeros(num_tokens, groups, net.key_dim), changes
    window = zeros(net.conv_size - 1 + num_tokens, net.num_channels)
    return VerifyState(state, window, rates, terms)


def gather_states(
    states: tuple[LayerState, ...], slots: jax.Array, positions: jax.Array, *, in_slots: bool
) -> tuple[LayerState, ...]:
    """The states of rows [B], from their slots; zeros for rows at the first position.

    With `in_slots` matrices stay in the pool, and only inputs of convolutions are those of rows.
    """

    def gather(x: jax.Array) -> jax.Array:
        found = jnp.take(x, slots, axis=0, mode="clip")
        is_first = (positions == 0).reshape(-1, *(1,) * (x.ndim - 1))
        return jnp.where(is_first, 0.0, found)

    if in_slots:
        return tuple(state._replace(conv=gather(state.conv)) for state in states)
    return jax.tree.map(gather, states)


def scatter_states(
    states: tuple[LayerState, ...],
    rows: tuple[LayerState, ...],
    slots: jax.Array,
    *,
    in_slots: bool = False,
) -> tuple[LayerState, ...]:
    """Writes the states of rows to their slots; drops those of slots beyond the pool.

    With `in_slots` the matrices in `rows` are the pool's, as of `gather_states`.
    """

    def scatter(x: jax.Array, new: jax.Array) -> jax.Array:
        return x.at[slots].set(new, mode="drop")

    if in_slots:
        pairs = zip(states, rows, strict=True)
        return tuple(new._replace(conv=scatter(old.conv, new.conv)) for old, new in pairs)
    return jax.tree.map(scatter, states, rows)
