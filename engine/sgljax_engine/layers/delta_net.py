"""The gated delta rule, token by token and chunk by chunk (Yang et al., 2024, arXiv 2412.06464).

A head's state S [Dk, Dv] maps keys to values. A token with key k, value v, decay exp(g) and rate
beta changes it to S exp(g) + k (beta (v - S^T k exp(g)))^T, and reads S^T q. A chunk of tokens does
the same in products of matrices: its changes solve a triangular system (the WY form). All of it is
float32, whatever the model's dtype: a state adds up thousands of tokens.

Shape legend: T tokens, K key heads, R value heads of each key head, V = K R value heads, C channels
of the convolution (queries, keys and values of all heads), W its width, h channels of a key or
query, d of a value. `...` are rows or blocks.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

EPS = 1e-6
"""Added to the sum of squares that queries and keys are normalised by."""


class NetInputs(NamedTuple):
    """What a gated delta net computes of each token alone.

    Shape: qkv: [T, C], before the convolution. decay: [T, V] float32, the logarithm g, at most 0.
        rate: [T, V] float32, beta.
    """

    qkv: jax.Array
    decay: jax.Array
    rate: jax.Array


class Heads(NamedTuple):
    """Queries, keys and values of tokens, after convolution and normalisation; float32.

    Shape: q, k: [..., T, K, h]. v: [..., T, K, R, d].
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array


class ChunkTerms(NamedTuple):
    """What a chunk's rule needs beside the state it begins with, for each value head.

    Shape: q, k, w: [..., K, R, T, h]. u: [..., K, R, T, d]. scores: [..., K, R, T, T]. keep:
        [..., K, R], the part of the first state that is left at the end.
    """

    q: jax.Array
    k: jax.Array
    w: jax.Array
    u: jax.Array
    scores: jax.Array
    keep: jax.Array


class TokenTerms(NamedTuple):
    """Tokens of some sequences, those of a sequence in order, for the rule token by token.

    Shape: heads: [T, C] float32, of `CpuKernels.net_heads`. decay, rate: [T, V] float32. slots:
        [T] int32, the state of each; beyond the pool for what is no token. is_first: [T] bool,
        whether its state begins with it, from zeros.
    """

    heads: jax.Array
    decay: jax.Array
    rate: jax.Array
    slots: jax.Array
    is_first: jax.Array


def convolve(window: jax.Array, weight_CW: jax.Array) -> jax.Array:
    """The causal depthwise convolution and its activation, in float32.

    Shape: window: [..., W - 1 + T, C], the tokens and those before them -> [..., T, C]
    """
    width = weight_CW.shape[1]
    num_tokens = window.shape[-2] - width + 1
    window, weight_CW = window.astype(jnp.float32), weight_CW.astype(jnp.float32)
    shape = (1,) * (window.ndim - 1) + window.shape[-1:]
    terms = [
        lax.slice_in_dim(window, i, i + num_tokens, axis=-2) * weight_CW[:, i].reshape(shape)
        for i in range(width)
    ]
    return jax.nn.silu(sum(terms[1:], terms[0]))


def split_heads(convolved: jax.Array, num_key_heads: int, key_dim: int, value_dim: int) -> Heads:
    """Takes [..., T, C] apart; normalises queries and keys, and scales queries."""
    keys = num_key_heads * key_dim
    q, k, v = jnp.split(convolved, (keys, 2 * keys), axis=-1)
    before = convolved.shape[:-1]
    q, k = (_normalise(x.reshape(*before, num_key_heads, key_dim)) for x in (q, k))
    return Heads(q * key_dim**-0.5, k, v.reshape(*before, num_key_heads, -1, value_dim))


def _normalise(x: jax.Array) -> jax.Array:
    return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + EPS)


def token_step(
    state: jax.Array, heads: Heads, decay: jax.Array, rate: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The rule for one token of each row; the new state and the output.

    Shape: state: [B, V, h, d]. heads: q and k [B, K, h], v [B, K, R, d]. decay, rate: [B, V].
    Returns [B, V, h, d] and [B, V, d].
    """
    rows, values, size, width = state.shape
    groups = heads.k.shape[1]
    state = state.reshape(rows, groups, values // groups, size, width)
    keep, rate = (x.reshape(rows, groups, -1, 1) for x in (jnp.exp(decay), rate))
    # Both products with the old state in one pass over it. XLA on CPUs would take twenty times as
    # long for sums over an axis that is not the last.
    pair = jnp.stack([heads.k, heads.q], axis=2)[:, :, None]
    found = _dot(jnp.broadcast_to(pair, (*state.shape[:3], *pair.shape[3:])), state)
    known, read = found[..., 0, :], found[..., 1, :]
    change = rate * (heads.v - keep * known)
    k = heads.k[:, :, None, :, None]
    both = jnp.sum(heads.q * heads.k, axis=-1)[:, :, None, None]
    new = keep[..., None] * state + k * change[..., None, :]
    out = keep * read + both * change
    return new.reshape(rows, values, size, width), out.reshape(rows, values, width)


def chunk_terms(heads: Heads, decay: jax.Array, rate: jax.Array) -> ChunkTerms:
    """The terms of chunks. Tokens that are none have a decay and a rate of 0, and are last.

    Shape: heads: of [..., T] tokens. decay, rate: [..., T, V].
    """
    groups = heads.k.shape[-2]
    size = heads.k.shape[-3]
    q, k = (jnp.moveaxis(x, -3, -2)[..., None, :, :] for x in (heads.q, heads.k))
    v = jnp.moveaxis(heads.v, -4, -2)

    def per_head(x: jax.Array) -> jax.Array:  # [..., K, R, T]
        return jnp.moveaxis(x.reshape(*x.shape[:-1], groups, -1), -3, -1)

    decay, rate = per_head(decay), per_head(rate)
    number = jnp.arange(size, dtype=jnp.int32)
    # All of one rank, for hosts that set jax_numpy_rank_promotion="raise".
    distance = (number[:, None] - number[None]).reshape((1,) * (decay.ndim - 1) + (size, size))
    # Sums of what is between two tokens: as a difference of sums from the start they would lose
    # what a strong decay leaves of the digits.
    between = jnp.cumsum(jnp.where(distance > 0, decay[..., :, None], 0.0), axis=-2)
    to_end = jnp.exp(between[..., -1, :])[..., None]
    between = jnp.where(distance >= 0, jnp.exp(between), 0.0)
    total = jnp.cumsum(decay, axis=-1)
    scale = jnp.exp(total)[..., None]
    system = _dot(k, k.swapaxes(-1, -2)) * between * rate[..., None]
    known = jnp.concatenate([v * rate[..., None], k * (rate[..., None] * scale)], axis=-1)
    u, w = jnp.split(_dot(_unit_lower_inverse(system), known), (v.shape[-1],), axis=-1)
    return ChunkTerms(
        q * scale,
        k * to_end,
        w,
        u,
        _dot(q, k.swapaxes(-1, -2)) * between,
        jnp.exp(total[..., -1]),
    )


def _unit_lower_inverse(system: jax.Array) -> jax.Array:
    """The inverses of lower triangular matrices [..., T, T] whose diagonal is taken for ones.

    What is on the diagonal and above it is not read. Inverses of neighbouring blocks become that of
    both, from blocks of one number on: the inverse of [[P, 0], [C, Q]] has -Q^-1 C P^-1 below.
    `lax.linalg.triangular_solve` is not used: on CPUs two calls of jaxlib 0.10.2 can wait for ever
    for the threads that they have.
    """
    size = system.shape[-1]
    number = jnp.arange(size, dtype=jnp.int32)
    shape = (1,) * (system.ndim - 2) + (size, size)
    inverse = jnp.broadcast_to(jnp.eye(size, dtype=system.dtype).reshape(shape), system.shape)
    block = 1
    while block < size:
        of = number // block
        is_below = (of[:, None] % 2 == 1) & (of[:, None] == of[None] + 1)
        below = jnp.where(is_below.reshape(shape), system, 0.0)
        inverse = inverse - _dot(_dot(inverse, below), inverse)
        block *= 2
    return inverse


def chunk_step(state: jax.Array, terms: ChunkTerms) -> tuple[jax.Array, jax.Array]:
    """The rule for one chunk; the new state and the output.

    Shape: state: [V, h, d] -> [V, h, d] and [T, V, d]; terms without leading axes.
    """
    out, change = chunk_outputs(state, terms)
    first = state.reshape(*terms.u.shape[:2], *state.shape[1:])
    new = terms.keep[..., None, None] * first + _dot(terms.k.swapaxes(-1, -2), change)
    return new.reshape(state.shape), out


def chunk_outputs(state: jax.Array, terms: ChunkTerms) -> tuple[jax.Array, jax.Array]:
    """The output of a chunk, and each token's change of the state, which later ones do not touch.

    Shape: state: [V, h, d] -> [T, V, d] and [K, R, T, d]; terms without leading axes.
    """
    groups, ratio, size, _ = terms.u.shape
    first = state.reshape(groups, ratio, *state.shape[1:])
    change = terms.u - _dot(terms.w, first)
    out = _dot(terms.q, first) + _dot(terms.scores, change)
    return jnp.moveaxis(out, -2, 0).reshape(size, groups * ratio, -1), change


def state_after(
    state: jax.Array, k: jax.Array, change: jax.Array, decay: jax.Array, count: jax.Array
) -> jax.Array:
    """The state [V, h, d] after the first `count` tokens of a chunk, from that at its beginning.

    Shape: k: [T, K, h], of `Heads`. change: [K, R, T, d], of `chunk_outputs`. decay: [T, V].
    """
    groups, ratio, size, _ = change.shape
    decay = jnp.where(jnp.arange(size, dtype=jnp.int32)[:, None] < count, decay, 0.0)
    behind = jnp.cumsum(decay[::-1], axis=0)[::-1]  # what follows a token, itself included
    after = jnp.concatenate([behind[1:], jnp.zeros_like(behind[:1])])
    weight = jnp.where(jnp.arange(size, dtype=jnp.int32)[:, None] < count, jnp.exp(after), 0.0)
    weight = jnp.moveaxis(weight.reshape(size, groups, ratio), 0, -1)
    keys = jnp.moveaxis(k, 0, -1)[:, None]
    added = _dot(keys * weight[:, :, None], change).reshape(state.shape)
    return jnp.exp(behind[0])[:, None, None] * state + added


def _dot(x: jax.Array, y: jax.Array) -> jax.Array:
    """A product of matrices in float32 also where the default is less."""
    return jnp.matmul(x, y, precision=lax.Precision.HIGHEST)
