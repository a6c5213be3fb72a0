"""Paged attention of prompts on NVIDIA GPUs: a Pallas kernel with whole tiles of queries.

A program of the grid takes a *tile* of 128 rows of queries, which are neighbouring tokens of one
request with one or a few heads of a kv head, and goes over their keys step by step
(FlashAttention-2, Dao, 2023). It ends at the tile's newest query, and masks scores only where some
query does not see a step whole: at the diagonal and at the window's border.

Blocks that continue each other are put together into tiles, since one of 16 tokens fills 128 rows
only with 8 heads a kv head. The longest tiles go first.

Steps begin at multiples of their size, and hidden keys add exact zeros. So a query's sums have one
order, whatever else is in its tile or batch.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from sgljax_engine.kernels.gpu.paged_attention import LOG2_E, Scores, log2_sinks

_Softmax = tuple[jax.Array, jax.Array, jax.Array]
"""Peak [R], total [R] and acc [R, width] of an online softmax."""

ROWS = 128
"""Rows of queries in a program: two warp groups, each with 64 for a product of the tensor cores."""

_NUM_WARPS = 8
_NUM_STAGES = 3
"""Pipeline stages: loads of page ids, loads of keys and values, and the arithmetic."""

_MIN_BLOCK = 16
_MIN_PROGRAMS = 64
"""Half of an H100's 132 streaming multiprocessors; with fewer, contexts are better split."""

_MASKED, _UNSEEN = -1e30, -1e20
"""Scores of hidden keys, and the peak before any other: powers of their difference are 0."""


class PrefillTiling(NamedTuple):
    """How the work is split into programs. Static.

    A program has `heads` query heads of one kv head and `blocks` blocks, and takes `keys` keys in a
    step. `value_parts` programs share the channels of the values; each makes all scores.
    """

    heads: int
    blocks: int
    keys: int
    value_parts: int


def fills_gpu(q_shape: tuple[int, ...], k: jax.Array) -> bool:
    """Whether queries [N, Q, num_heads, head_dim] are better served here than without tiles.

    `k` is as of `prefill_attention`; only its shape and dtype count.
    """
    num_blocks, num_queries, num_heads, _ = q_shape
    fits = num_queries >= _MIN_BLOCK and ROWS % num_queries == 0
    # Tensor cores would round float32 to TF32.
    is_half = k.dtype.itemsize == 2
    return fits and is_half and num_blocks * num_queries * num_heads >= _MIN_PROGRAMS * ROWS


def choose_prefill_tiling(q_shape: tuple[int, ...], num_kv_heads: int) -> PrefillTiling:
    """Splits the work of queries [N, Q, num_heads, head_dim]; Q divides `ROWS`."""
    _, num_queries, num_heads, head_dim = q_shape
    group = num_heads // num_kv_heads
    # The largest power of two that divides the group, so that tiles have no empty rows.
    heads = min(group & -group, ROWS // num_queries)
    # As many keys and accumulators as registers and shared memory hold.
    keys = min(16 * 1024 // head_dim, 128)
    value_parts = pl.cdiv(head_dim, 256)
    return PrefillTiling(heads, ROWS // (num_queries * heads), keys, value_parts)


class Tiles(NamedTuple):
    """Tiles of blocks, those with the most keys first.

    Shape: first: [N] int32, the first block of each tile. num_blocks: [N] int32, how many it has; 0
        for tiles that there are not.
    """

    first: jax.Array
    num_blocks: jax.Array


def make_tiles(
    page_table: jax.Array, positions: jax.Array, kv_lens: jax.Array, page_size: int, blocks: int
) -> Tiles:
    """Puts up to `blocks` blocks that continue each other into a tile.

    The tables are as of `prefill_attention`. Unused blocks have tiles too, so that their outputs
    are written.
    """
    num_blocks, num_queries = positions.shape
    number = jnp.arange(num_blocks, dtype=jnp.int32)
    page = jnp.arange(page_table.shape[1], dtype=jnp.int32)
    # Blocks that agree on the pages of all earlier keys have the same keys, whosever they are.
    is_needed = page[None] * page_size < kv_lens[:-1, None]
    same_keys = jnp.all((page_table[1:] == page_table[:-1]) | ~is_needed, axis=1)
    follows = positions[1:, 0] == positions[:-1, 0] + num_queries
    are_used = (kv_lens[:-1] > 0) & (kv_lens[1:] > positions[1:, 0])
    are_unused = (kv_lens[:-1] == 0) & (kv_lens[1:] == 0)
    continues = jnp.pad((same_keys & follows & are_used) | are_unused, (1, 0))
    start = lax.cummax(jnp.where(continues, 0, number))
    is_first = (number - start) % blocks == 0
    ends = jnp.append(jnp.where(is_first, number, num_blocks)[1:], num_blocks)
    ends = lax.cummin(ends, reverse=True)
    count = jnp.where(is_first, ends - number, 0)
    num_keys = kv_lens[ends - 1]
    order = jnp.argsort(jnp.where(is_first, -num_keys, 1), stable=True).astype(jnp.int32)
    return Tiles(order, count[order])


class _Steps(NamedTuple):
    """Steps [begin, end) over a tile's keys; all its queries see all of [whole_begin, whole_end).

    Shape: Scalars, int32.
    """

    begin: jax.Array
    end: jax.Array
    whole_begin: jax.Array
    whole_end: jax.Array

    @classmethod
    def of(cls, oldest: jax.Array, kv_len: jax.Array, keys: int, window: int | None) -> _Steps:
        """Steps of `keys` keys for queries at positions from `oldest` to before `kv_len`."""
        end, whole_end = lax.div(kv_len + keys - 1, keys), lax.div(oldest + 1, keys)
        zero = jnp.zeros_like(end)
        if window is None:
            return cls(zero, end, zero, whole_end)
        begin = lax.div(jnp.maximum(oldest - window + 1, 0), keys)
        whole_begin = lax.div(jnp.maximum(kv_len - window, 0) + keys - 1, keys)
        return cls(begin, end, whole_begin, whole_end)


def _attend_to_tile(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    page_table_ref: Any,
    positions_ref: Any,
    kv_lens_ref: Any,
    first_ref: Any,
    num_blocks_ref: Any,
    *others: Any,
    tiling: PrefillTiling,
    options: Scores,
    interpret: bool,
) -> None:
    """The kernel: one tile with heads of one kv head, and a part of the channels of their values.

    Refs are whole arrays in global memory, as of `prefill_attention`; those of `Tiles`; sinks, if
    there are some; and, written here, out [N, Q, num_heads, head_dim].
    """
    *sinks, out_ref = others
    first_head, tile, part = pl.program_id(0) * tiling.heads, pl.program_id(1), pl.program_id(2)
    first, num_blocks = first_ref[tile], num_blocks_ref[tile]
    _, num_queries, num_heads, head_dim = q_ref.shape
    _, num_kv_heads, page_size, _ = k_ref.shape
    kv_head = lax.div(first_head, num_heads // num_kv_heads)
    width, window = head_dim // tiling.value_parts, options.sliding_window

    @pl.when(num_blocks > 0)
    def attend() -> None:
        last = first + num_blocks - 1
        row = jnp.arange(ROWS, dtype=jnp.int32)
        token, head = lax.div(row, tiling.heads), first_head + lax.rem(row, tiling.heads)
        block, query = first + lax.div(token, num_queries), lax.rem(token, num_queries)
        is_row = block <= last
        dim = jnp.arange(head_dim, dtype=jnp.int32)
        channel = part * width + jnp.arange(width, dtype=jnp.int32)
        at_rows = block[:, None], query[:, None], head[:, None]
        q = plgpu.load(q_ref.at[*at_rows, dim[None, :]], mask=is_row[:, None], other=0.0)
        q = q.astype(k_ref.dtype)
        position = plgpu.load(positions_ref.at[block, query], mask=is_row, other=0)
        kv_len = kv_lens_ref[last]
        steps = _Steps.of(positions_ref[first, 0], kv_len, tiling.keys, window)

        def add_step(step: jax.Array, carry: _Softmax) -> _Softmax:
            peak, total, acc = carry
            key = step * tiling.keys + jnp.arange(tiling.keys, dtype=jnp.int32)
            # Memory beyond kv_lens may hold anything, NaN included: the last key stands for it.
            at = jnp.minimum(key, kv_len - 1)
            page = plgpu.load(page_table_ref.at[last, lax.div(at, page_size)])
            at_keys = page[:, None], kv_head, lax.rem(at, page_size)[:, None]
            k = plgpu.load(k_ref.at[*at_keys, dim[None, :]])
            v = plgpu.load(v_ref.at[*at_keys, channel[None, :]])

            def mask(scores: jax.Array) -> jax.Array:
                seen = key[None, :] <= position[:, None]
                if window is not None:
                    seen &= key[None, :] > position[:, None] - window
                return jnp.where(seen, scores, _MASKED)

            scores, unit = _scores(_dot(q, k, 1), options, interpret)
            # A branch in one loop: between two loops ptxas makes the products wait for each other.
            is_whole = (step >= steps.whole_begin) & (step < steps.whole_end)
            scores = lax.cond(is_whole, lambda scores: scores, mask, scores)
            new_peak = jnp.maximum(peak, jnp.max(scores, axis=1) * unit)
            weights = _powers(scores, unit, new_peak, interpret)
            shrink = jnp.exp2(peak - new_peak)
            new_total = total * shrink + jnp.sum(weights, axis=1)
            return new_peak, new_total, acc * shrink[:, None] + _dot(weights.astype(v.dtype), v, 0)

        state: _Softmax = (
            jnp.full((ROWS,), _UNSEEN, jnp.float32),
            jnp.zeros((ROWS,), jnp.float32),
            jnp.zeros((ROWS, width), jnp.float32),
        )
        for sinks_ref in sinks:
            cap = options.logit_softcap or 0.0  # which `_scores` drops
            sink = log2_sinks(sinks_ref, head, is_row) - cap * LOG2_E
            state = sink, jnp.ones((ROWS,), jnp.float32), state[2]
        _, total, acc = lax.fori_loop(steps.begin, steps.end, add_step, state)
        out = acc / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)[:, None]
        at_out = out_ref.at[*at_rows, channel[None, :]]
        plgpu.store(at_out, out.astype(out_ref.dtype), mask=is_row[:, None])


def _dot(a: jax.Array, b: jax.Array, axis: int) -> jax.Array:
    return lax.dot_general(a, b, (((1,), (axis,)), ((), ())), preferred_element_type=jnp.float32)


def _scores(products: jax.Array, options: Scores, interpret: bool) -> tuple[jax.Array, float]:
    """Scores up to a constant, of products of queries and keys, and their unit in log2."""
    if options.logit_softcap is None:
        return products, options.scale * LOG2_E
    # cap * tanh(s / cap) is cap - 2 * cap / (exp(2 * s / cap) + 1), and softmax drops the first.
    cap = options.logit_softcap
    exponents, unit = products * (2.0 * LOG2_E * options.scale / cap), 2.0 * cap * LOG2_E
    if interpret:
        return -1.0 / (jnp.exp2(exponents) + 1.0), unit
    power = "ex2.approx.ftz.f32 x, $1; add.f32 x, x, 0f3F800000;"
    return _inline(f"{power} rcp.approx.ftz.f32 x, x; neg.f32 $0, x;", exponents), unit


def _powers(scores: jax.Array, unit: float, peak: jax.Array, interpret: bool) -> jax.Array:
    """2 ** (scores * unit - peak[:, None]), in two instructions: the compiler takes six."""
    if interpret:
        return jnp.exp2(scores * unit - peak[:, None])
    units, minus_peaks = jnp.full_like(scores, unit), jnp.broadcast_to(-peak[:, None], scores.shape)
    code = "fma.rn.f32 x, $1, $2, $3; ex2.approx.ftz.f32 $0, x;"
    return _inline(code, scores, units, minus_peaks)


def _inline(code: str, *args: jax.Array) -> jax.Array:
    """Elementwise PTX of float32 arguments $1 and so on, with a register x, that sets $0."""
    (result,) = plgpu.elementwise_inline_asm(
        f"{{ .reg .f32 x; {code} }}",
        args=args,
        constraints=",".join(["=f", *["f"] * len(args)]),
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(args[0].shape, jnp.float32)],
    )
    return result


def prefill_attention(
    q_NQDh: jax.Array,
    k: jax.Array,
    v: jax.Array,
    page_table: jax.Array,
    positions: jax.Array,
    kv_lens: jax.Array,
    options: Scores,
    sinks: jax.Array | None = None,
    *,
    tiling: PrefillTiling | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Causal attention of query blocks over their requests' pages.

    Arguments and result are those of `paged_attention`, but Q divides `ROWS`, and on a GPU dtypes
    are of 16 bits; `tiling` is `choose_prefill_tiling`'s if None.
    """
    num_blocks, _, num_heads, _ = q_NQDh.shape
    tiling = tiling or choose_prefill_tiling(q_NQDh.shape, k.shape[1])
    tiles = make_tiles(page_table, positions, kv_lens, k.shape[2], tiling.blocks)
    more = () if sinks is None else (sinks,)
    return pl.pallas_call(
        functools.partial(_attend_to_tile, tiling=tiling, options=options, interpret=interpret),
        grid=(num_heads // tiling.heads, num_blocks, tiling.value_parts),
        out_shape=jax.ShapeDtypeStruct(q_NQDh.shape, q_NQDh.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=_NUM_WARPS, num_stages=_NUM_STAGES),
        interpret=interpret,
        name="prefill_attention",
    )(q_NQDh, k, v, page_table, positions, kv_lens, *tiles, *more)
