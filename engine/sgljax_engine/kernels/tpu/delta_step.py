"""The gated delta rule for one token of each row on TPUs: a Pallas kernel.

XLA would write each state for the two products with it, and read it again to change it. Here a
state comes to the chip once and goes back in place.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

SUBLANES = 8
"""Rows of a vector register, and the heads of a step: half a megabyte of heads of 128."""


def delta_step(
    state: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    keep: jax.Array,
    rate: jax.Array,
    *,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """The new state, in the place of the old one, and the output; see `delta_net.token_step`.

    Shape: state: [B, V, h, d]; h and d are multiples of 128, and V is one of `SUBLANES`, or less.
    q, k: [B, V, h], of each value head. v: [B, V, d]. keep: [B, V], the part of the state that is
    left, exp(decay). rate: [B, V]. All float32. Returns [B, V, h, d] and [B, V, d].
    """
    num_rows, num_heads, key_dim, value_dim = state.shape
    count = min(num_heads, SUBLANES)

    def block(*sizes: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, count, *sizes), lambda b, n: (b, n, *(0 for _ in sizes)))

    scalars = pl.BlockSpec(memory_space=pltpu.SMEM)
    new, out = pl.pallas_call(
        _kernel,
        grid=(num_rows, num_heads // count),
        in_specs=[
            block(key_dim, value_dim),
            block(key_dim),
            block(key_dim),
            block(value_dim),
            scalars,
            scalars,
        ],
        out_specs=[block(key_dim, value_dim), block(value_dim)],
        out_shape=[
            jax.ShapeDtypeStruct(state.shape, jnp.float32),
            jax.ShapeDtypeStruct(v.shape, jnp.float32),
        ],
        input_output_aliases={0: 0},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        cost_estimate=pl.CostEstimate(
            flops=7 * state.size,
            bytes_accessed=4 * (2 * state.size + q.size + k.size + 2 * v.size),
            transcendentals=0,
        ),
        interpret=interpret,
        name="delta_step",
    )(state, q, k, v, keep, rate)
    return new, out


def _kernel(
    state_ref: Any,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    keep_ref: Any,
    rate_ref: Any,
    new_ref: Any,
    out_ref: Any,
) -> None:
    row, first = pl.program_id(0), pl.program_id(1) * q_ref.shape[1]

    def dot(x: Any, y: Any, axis: int) -> Any:
        return lax.dot_general(
            x,
            y,
            (((axis,), (0,)), ((), ())),
            precision=lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )

    for i in range(q_ref.shape[1]):
        keep, rate = keep_ref[row, first + i], rate_ref[row, first + i]
        state = state_ref[0, i]
        q, k, v = (ref[0, i : i + 1] for ref in (q_ref, k_ref, v_ref))
        found = dot(jnp.concatenate([k, q], axis=0), state, 1)
        change = rate * (v - keep * found[:1])
        new_ref[0, i] = keep * state + dot(k, change, 0)
        both = jnp.sum(q * k, axis=1, keepdims=True)
        out_ref[0, i : i + 1] = keep * found[1:] + both * change
