"""Softmax accumulated over chunks of keys, within a kernel."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from sgljax_engine.kernels.tpu.paged_sizes import Scores

MASKED = -1e30


def softmax_part(
    q: Any,
    k: Any,
    v: Any,
    old: tuple[Any, Any],
    position: Any,
    first_token: Any,
    exists: tuple[Any | None, Any],
    scores: Scores,
) -> tuple[Any, Any, Any, Any]:
    """Adds a chunk of keys to the running softmax of queries that share a kv head.

    Shape: q: [R, head_dim]. k, v: [S, head_dim]. old: maximum and sum of the scores before, [R, 1]
    float32. position: [R, S] int32, of the queries. exists: positions of the first key that is
    there, None if all are from 0 on, and of the one after the last.

    Returns the new maximum and sum; the factor of the weighted sum of values before, and what is
    added to it.
    """
    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    s = lax.dot_general(
        q,
        k,
        (((1,), (1,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    s *= scores.scale
    if scores.logit_softcap is not None:
        s = scores.logit_softcap * jnp.tanh(s / scores.logit_softcap)
    token = first_token + lax.broadcasted_iota(jnp.int32, s.shape, 1)
    is_seen = (token <= position) & (token < exists[1])
    if scores.sliding_window is not None:
        is_seen &= token > position - scores.sliding_window
    elif exists[0] is not None:
        is_seen &= token >= exists[0]
    s = jnp.where(is_seen, s, MASKED)
    old_max, old_sum = old
    new_max = jnp.maximum(old_max, jnp.max(s, axis=1, keepdims=True))
    p = jnp.where(is_seen, jnp.exp(s - new_max), 0.0)
    # Memory that holds no key may hold NaN, which a weight of 0 does not undo.
    token = first_token + lax.broadcasted_iota(jnp.int32, v.shape, 0)
    is_there = token < exists[1]
    if exists[0] is not None:
        is_there &= token >= exists[0]
    v = jnp.where(is_there, v.astype(jnp.float32), 0.0).astype(v.dtype)
    kept = jnp.exp(old_max - new_max)
    new_sum = kept * old_sum + jnp.sum(p, axis=1, keepdims=True)
    change = lax.dot_general(
        p.astype(v.dtype),
        v,
        (((1,), (0,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    return new_max, new_sum, kept, change
