"""The gated delta rule for one token of each row on TPUs: a Pallas kernel.

XLA would write each state for the two products with it, and read it again to change it. Here a
state comes from its slot to the chip once and goes back in place. Rows without a slot move none:
they show the block of the row before them, which the chip has.
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

_SKIPPED, _USED, _BEFORE_USED = range(3)
"""Kinds of rows. Skipped rows before any used one pass on the block that they show."""


def delta_step(
    states: jax.Array,
    slots: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    keep: jax.Array,
    rate: jax.Array,
    *,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """The pool with the rows' new states in their slots, and the output.

    The rule is that of `delta_net.token_step`. A state of which nothing is kept counts as zeros,
    whatever its slot holds.

    Shape: states: [S, V, h, d]; h and d are multiples of 128, and V is one of `SUBLANES`, or less.
    slots: [B] int32, each once; rows with one beyond the pool change nothing, and their output is
    0. q, k: [B, V, h], of each value head. v: [B, V, d]. keep: [B, V], the part of the state that
    is left, exp(decay). rate: [B, V]. All else float32. Returns [S, V, h, d] and [B, V, d].
    """
    num_slots, num_heads, key_dim, value_dim = states.shape
    num_rows = len(slots)
    count = min(num_heads, SUBLANES)
    places, kinds = _places(slots, num_slots)
    if not interpret:  # a pool that fits into VMEM would be brought there whole, and back
        states = pltpu.with_memory_space_constraint(states, pltpu.HBM)

    def block(*sizes: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, count, *sizes), lambda n, b, *_: (b, n, *(0 for _ in sizes)))

    def shown(n: Any, b: Any, places: Any, kinds: Any) -> tuple[Any, ...]:
        del kinds
        return places[b], n, 0, 0

    state = pl.BlockSpec((1, count, key_dim, value_dim), shown)
    scalars = pl.BlockSpec(memory_space=pltpu.SMEM)
    state_size = num_rows * num_heads * key_dim * value_dim
    new, out = pl.pallas_call(
        _kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(num_heads // count, num_rows),  # rows of a block in order, on one core
            in_specs=[
                state,
                block(key_dim),
                block(key_dim),
                block(value_dim),
                scalars,
                scalars,
            ],
            out_specs=[state, block(value_dim)],
        ),
        out_shape=[
            jax.ShapeDtypeStruct(states.shape, jnp.float32),
            jax.ShapeDtypeStruct(v.shape, jnp.float32),
        ],
        input_output_aliases={2: 0},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=7 * state_size,
            bytes_accessed=4 * (2 * state_size + q.size + k.size + 2 * v.size),
            transcendentals=0,
        ),
        interpret=interpret,
        name="delta_step",
    )(places, kinds, states, q, k, v, keep, rate)
    return new, out


def _places(slots: jax.Array, num_slots: int) -> tuple[jax.Array, jax.Array]:
    """The slot whose block each row shows, and the row's kind; both [B] int32.

    A skipped row shows the slot of the last used row before it, or else of the first one behind it,
    or slot 0 if no row is used. So a block is fetched and written back at most once.
    """
    is_used = (slots >= 0) & (slots < num_slots)
    number = jnp.arange(len(slots), dtype=jnp.int32)
    last = lax.cummax(jnp.where(is_used, number, -1))
    row = jnp.where(last < 0, jnp.argmax(is_used).astype(jnp.int32), last)
    places = jnp.where(jnp.any(is_used), slots[row], 0)
    kinds = jnp.where(is_used, _USED, jnp.where(last < 0, _BEFORE_USED, _SKIPPED))
    return places.astype(jnp.int32), kinds.astype(jnp.int32)


def _kernel(
    places_ref: Any,
    kinds_ref: Any,
    state_ref: Any,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    keep_ref: Any,
    rate_ref: Any,
    new_ref: Any,
    out_ref: Any,
) -> None:
    del places_ref
    row, first = pl.program_id(1), pl.program_id(0) * q_ref.shape[1]
    kind = kinds_ref[row]

    @pl.when(kind == _BEFORE_USED)
    def _() -> None:
        new_ref[...] = state_ref[...]

    @pl.when(kind != _USED)
    def _() -> None:
        out_ref[...] = jnp.zeros_like(out_ref)

    @pl.when(kind == _USED)
    def _() -> None:
        for i in range(q_ref.shape[1]):
            keep, rate = keep_ref[row, first + i], rate_ref[row, first + i]
            state = jnp.where(keep > 0, state_ref[0, i], 0.0)
            q, k, v = (ref[0, i : i + 1] for ref in (q_ref, k_ref, v_ref))
            found = _dot(jnp.concatenate([k, q], axis=0), state, 1)
            change = rate * (v - keep * found[:1])
            new_ref[0, i] = keep * state + _dot(k, change, 0)
            both = jnp.sum(q * k, axis=1, keepdims=True)
            out_ref[0, i : i + 1] = keep * found[1:] + both * change


def _dot(x: Any, y: Any, axis: int) -> Any:
    """Sums products over an axis of x and the first of y, in float32."""
    return lax.dot_general(
        x,
        y,
        (((axis,), (0,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
