"""Paged attention on NVIDIA GPUs: a Pallas kernel, compiled by Triton.

JAX 0.11 deprecates this lowering of Pallas, so only `attention.pallas` may import this module:
everything that runs here also runs on the portable backend, five times as slowly.

One program of the grid handles one block of queries, one kv head and one *split* of the context
(flash-decoding, Dao et al., 2023). Without splits, few rows of long contexts would leave most of
the GPU idle. The splits' results are combined afterwards by their log-sum-exps. Rows of queries
that share a kv head go through the tensor cores together, in the smallest tile of 16 rows or more;
padding rows are computed and not stored.

Keys are addressed one by one through the page table, so any page size works; a page's keys of a
head are adjacent, which makes the loads wide.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from sgljax_engine.kernels.dtypes import computed_dtype

HEAD_DIMS = (16, 32, 64, 128, 256, 512)
"""Triton's array sizes are powers of two, and tensor cores take at least 16."""


def head_parts(head_dim: int) -> tuple[int, ...]:
    """Sizes of the parts that a head is taken in: powers of two, the largest first.

    Of a power of two itself; of 576, the latents of DeepSeek with their rotary parts, 512 and 64.
    """
    return tuple(1 << bit for bit in reversed(range(head_dim.bit_length())) if head_dim >> bit & 1)


MASKED = -1e30
_MIN_ROWS = 16
_MIN_KEYS, _MAX_KEYS = 16, 128


class _Budget(NamedTuple):
    """Limits of a program, so that its state stays in registers.

    `step_bytes` are of keys in a step of the loop; values take as many, and a second step is in
    flight. `max_rows` are of queries. Above `wide_tile` accumulators or scores a program has 8
    warps instead of 4.
    """

    step_bytes: int
    max_rows: int
    wide_tile: int


_HALF = _Budget(step_bytes=16 * 1024, max_rows=64, wide_tile=64 * 64)
_FLOAT = _Budget(step_bytes=8 * 1024, max_rows=32, wide_tile=0)
"""Float32 products, done without tensor cores, keep their operands in registers too."""

NUM_STAGES = 3
"""Pipeline stages: loads of page ids, loads of keys and values, and the arithmetic."""

_TARGET_PROGRAMS = 1024
"""Programs that fill the GPU: about eight for each of an H200's 132 streaming multiprocessors."""

_MIN_SPLIT_KEYS = 128
_INVARIANT_SPLIT_KEYS = 2048
_MAX_SPLIT_BYTES = 256 << 20
_MAX_SPLITS = 64
LOG2_E = math.log2(math.e)


class Scores(NamedTuple):
    """How scores are made of products of queries and keys. Static.

    Attributes:
        scale: Multiplies the products.
        sliding_window: A query sees this many newest keys, its own included; None sees all.
        logit_softcap: Scaled products s become `cap * tanh(s / cap)`; None for no cap.
    """

    scale: float
    sliding_window: int | None = None
    logit_softcap: float | None = None


class Tiling(NamedTuple):
    """How the work is split into programs. Static.

    A program has `rows` rows of queries; `row_tiles` programs share a block and kv head, `splits`
    the context of a block. A step of the loop has `keys` keys; `split_steps` is None for as many as
    share the context equally.
    """

    rows: int
    row_tiles: int
    keys: int
    splits: int
    num_warps: int
    split_steps: int | None = None


def _power_of_two(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()


def choose_tiling(q_shape: tuple[int, ...], k: jax.Array, max_pages: int) -> Tiling:
    """Splits the work of queries [N, Q, num_heads, head_dim] on requests of up to `max_pages`.

    `k` is as of `paged_attention`; only its shape and dtype count.
    """
    num_blocks, num_queries, num_heads, head_dim = q_shape
    _, num_kv_heads, page_size, _ = k.shape
    itemsize = k.dtype.itemsize
    budget = _FLOAT if itemsize > 2 else _HALF
    num_rows = num_queries * (num_heads // num_kv_heads)
    max_rows = budget.max_rows if head_dim <= HEAD_DIMS[-1] else budget.max_rows // 2
    rows = min(max(_power_of_two(num_rows), _MIN_ROWS), max_rows)
    row_tiles = pl.cdiv(num_rows, rows)
    keys = budget.step_bytes // (_power_of_two(head_dim) * itemsize)
    keys = min(max(keys, _MIN_KEYS), _MAX_KEYS)
    wanted = pl.cdiv(_TARGET_PROGRAMS, num_blocks * num_kv_heads * row_tiles)
    useful = pl.cdiv(max_pages * page_size, max(_MIN_SPLIT_KEYS, keys))
    splits = min(_power_of_two(wanted), _power_of_two(useful), _MAX_SPLITS)
    num_warps = 8 if rows * max(head_dim, keys) > budget.wide_tile else 4
    return Tiling(rows, row_tiles, keys, splits, num_warps)


def invariant_tiling(q_shape: tuple[int, ...], k: jax.Array, max_pages: int) -> Tiling:
    """As `choose_tiling`, but a query has the same bits in any batch, and for any `max_pages`.

    Rows are the fewest that tensor cores take, for any number of queries; splits have the same keys
    for any number of blocks. A query adds exact zeros for keys and splits that only others see.
    """
    _, num_queries, num_heads, head_dim = q_shape
    _, num_kv_heads, page_size, _ = k.shape
    num_rows = num_queries * (num_heads // num_kv_heads)
    alone = choose_tiling((1, 1, num_kv_heads, head_dim), k, max_pages)
    return alone._replace(
        row_tiles=pl.cdiv(num_rows, alone.rows),
        splits=pl.cdiv(max_pages * page_size, _INVARIANT_SPLIT_KEYS),
        split_steps=_INVARIANT_SPLIT_KEYS // alone.keys,
    )


def most_invariant_blocks(q_shape: tuple[int, ...], k: jax.Array, max_pages: int) -> int:
    """Blocks of queries [N, Q, num_heads, head_dim] whose splits' outputs take `_MAX_SPLIT_BYTES`.

    At least one; all of them without splits, whose outputs are the results.
    """
    splits = invariant_tiling(q_shape, k, max_pages).splits
    if splits == 1:
        return q_shape[0]
    return max(_MAX_SPLIT_BYTES // (4 * splits * math.prod(q_shape[1:])), 1)


def _attend_to_split(
    q_ref: Any,
    k_ref: Any,
    *others: Any,
    tiling: Tiling,
    options: Scores,
    has_values: bool,
    has_shared: bool,
    has_scales: bool,
) -> None:
    """The kernel: a tile of rows of one block and kv head over one split of the context.

    Refs are whole arrays in global memory: q [N, Q, num_heads, head_dim]; k and, if keys are not
    values too, v [num_pages, num_kv_heads, page_size, head_dim]; the tables as of
    `paged_attention`; scales, a `SharedPart` and sinks, if there are some; and, written here, out
    [splits, N, Q, num_heads, head_dim] and lse [splits, N, Q, num_heads], the log2 of the sum of
    powers of two of the scores. Scores are in units of log2.
    """
    v_ref, *rest = others if has_values else (None, *others)
    page_table_ref, positions_ref, kv_lens_ref, *rest, out_ref, lse_ref = rest
    scales, rest = (rest[:2], rest[2:]) if has_scales else ([], rest)
    shared, sinks = (SharedPart(*rest[:4]), rest[4:]) if has_shared else (None, rest)
    block, split = pl.program_id(0), pl.program_id(2)
    kv_head = lax.div(pl.program_id(1), tiling.row_tiles)
    tile = lax.rem(pl.program_id(1), tiling.row_tiles)
    _, num_queries, num_heads, head_dim = q_ref.shape
    num_kv_heads = k_ref.shape[1]
    group = num_heads // num_kv_heads

    row = tile * tiling.rows + jnp.arange(tiling.rows, dtype=jnp.int32)
    query, head = lax.div(row, group), kv_head * group + lax.rem(row, group)
    is_row = query < num_queries
    dims = dims_of_parts(head_dim)
    at_rows = [(block, query[:, None], head[:, None], dim[None, :]) for dim in dims]
    dtype = computed_dtype(q_ref.dtype, k_ref.dtype)
    q = tuple(
        plgpu.load(q_ref.at[at], mask=is_row[:, None], other=0.0).astype(dtype) for at in at_rows
    )
    position = plgpu.load(positions_ref.at[block, query], mask=is_row, other=0)
    kv_len = kv_lens_ref[block]
    begin: jax.Array | int = 0
    has_sinks = split == 0
    if shared is not None:
        begin = first_own_step(shared, block, kv_len, tiling)
        has_sinks &= begin == 0  # else they are in the shared part
    steps = steps_of_split(positions_ref[block, 0], kv_len, split, tiling, options, begin)
    keys = Keys(k_ref, v_ref, page_table_ref, block, kv_head, kv_len, *scales)
    start = first_softmax(sinks, has_sinks, head, is_row, head_dim)
    if shared is not None:
        start = with_shared(start, shared, (block, query, head), is_row, begin, split, tiling)
    softmax = attend_to_keys(q, position, keys, steps, start, tiling, options)
    outs, lse = split_result(softmax)
    for at, out in zip(at_rows, outs, strict=True):
        plgpu.store(out_ref.at[(split, *at)], out.astype(out_ref.dtype), mask=is_row[:, None])
    plgpu.store(lse_ref.at[split, block, query, head], lse, mask=is_row)


def first_softmax(
    sinks: Sequence[Any], has_sinks: Any, head: jax.Array, is_row: jax.Array, head_dim: int
) -> Softmax:
    """The softmax of rows [R] without keys, or with a sink if there are sinks and it has them."""
    (rows,) = head.shape
    peak = jnp.full((rows,), MASKED, jnp.float32)
    total = jnp.zeros((rows,), jnp.float32)
    for sinks_ref in sinks:
        has_it = jnp.full((rows,), has_sinks)
        peak = jnp.where(has_it, log2_sinks(sinks_ref, head, is_row), MASKED)
        total = jnp.where(has_it, 1.0, 0.0)
    acc = tuple(jnp.zeros((rows, size), jnp.float32) for size in head_parts(head_dim))
    return peak, total, acc


def dims_of_parts(head_dim: int) -> list[jax.Array]:
    """The channels of each of the `head_parts`."""
    dims, first = [], 0
    for size in head_parts(head_dim):
        dim = jnp.arange(size, dtype=jnp.int32)
        dims.append(first + dim if first else dim)
        first += size
    return dims


class Keys(NamedTuple):
    """Keys and values of one kv head of a request: the refs, and which of them.

    Without a ref of values, keys are values too. Numbers of 8 bits have refs of scales, see
    `paged_attention`.
    """

    k_ref: Any
    v_ref: Any
    page_table_ref: Any
    block: jax.Array
    kv_head: jax.Array
    num_keys: jax.Array
    k_scale_ref: Any = None
    v_scale_ref: Any = None


def computed_keys(queries: Any, k: jax.Array) -> Any:
    """The shape and dtype of keys in registers, of which tiles are chosen."""
    return jax.ShapeDtypeStruct(k.shape, computed_dtype(queries, k.dtype))


Softmax = tuple[jax.Array, jax.Array, tuple[jax.Array, ...]]
"""State of an online softmax over rows: peak [R], total [R], acc [R, size], all float32.

Peaks are in units of log2. There is an acc for each of the `head_parts`.
"""


class SharedPart(NamedTuple):
    """Softmaxes over keys that blocks share, in S parts: those of `shared_attention`, or refs.

    Shape: begins: [N] int32, how many first keys of each block they have. peaks, totals:
        [S, N, q, num_heads] float32. accs: [S, N, q, num_heads, head_dim] float32. Of Q queries of
        a block the first q. What belongs to blocks that begin at 0 is unspecified.
    """

    begins: Any
    peaks: Any
    totals: Any
    accs: Any


def first_own_step(
    shared: SharedPart, block: jax.Array, kv_len: jax.Array, tiling: Tiling
) -> jax.Array:
    """The step of the loop at which a block goes on from its shared keys; inside a kernel."""
    return jnp.where(kv_len > 0, lax.div(shared.begins[block], tiling.keys), 0)


def with_shared(
    start: Softmax,
    shared: SharedPart,
    at: tuple[jax.Array, jax.Array, jax.Array],
    is_row: jax.Array,
    begin: jax.Array | int,
    split: jax.Array,
    tiling: Tiling,
) -> Softmax:
    """Adds a split's shared parts to a softmax; inside a kernel.

    Part p belongs to split p modulo their number. `at` are block, query and head of the rows. A
    block that begins at 0 has no part. An empty softmax and one part give the part's bits.
    """
    block, query, head = at
    num_parts = shared.peaks.shape[0] // tiling.splits
    exists = is_row & (begin > 0) & (query < shared.peaks.shape[2])
    dims = dims_of_parts(shared.accs.shape[-1])

    def add(index: jax.Array, old: Softmax) -> Softmax:
        part = index * tiling.splits + split
        new_peak = plgpu.load(shared.peaks.at[part, block, query, head], mask=exists, other=MASKED)
        new_total = plgpu.load(shared.totals.at[part, block, query, head], mask=exists, other=0.0)
        peak = jnp.maximum(old[0], new_peak)
        keeps, adds = jnp.exp2(old[0] - peak), jnp.exp2(new_peak - peak)
        acc = []
        for own, dim in zip(old[2], dims, strict=True):
            at_part = shared.accs.at[part, block, query[:, None], head[:, None], dim[None, :]]
            new = plgpu.load(at_part, mask=exists[:, None], other=0.0)
            acc.append(keeps[:, None] * own + adds[:, None] * new)
        return peak, keeps * old[1] + adds * new_total, tuple(acc)

    if num_parts == 1:
        return add(jnp.int32(0), start)
    return lax.fori_loop(0, num_parts, add, start)


def attend_to_keys(
    q: tuple[jax.Array, ...],
    position: jax.Array,
    keys: Keys,
    steps: tuple[jax.Array, jax.Array],
    start: Softmax,
    tiling: Tiling,
    options: Scores,
) -> Softmax:
    """Adds the keys of steps [begin, end) to a softmax; inside a kernel.

    Shape: q: [R, size] of the `computed_dtype`, for each of the `head_parts`. position: [R].
    """
    k_ref, v_ref, page_table_ref, block, kv_head, kv_len = keys[:6]
    has_scales = keys.k_scale_ref is not None
    page_size, head_dim = k_ref.shape[2:]
    dims = dims_of_parts(head_dim)
    dtype = q[0].dtype
    # Float32 inputs would be rounded to TF32 by default.
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else None

    def dot(a: jax.Array, b: jax.Array, axis: int) -> jax.Array:
        contract = (((1,), (axis,)), ((), ()))
        return lax.dot_general(a, b, contract, precision, preferred_element_type=jnp.float32)

    def body(step: jax.Array, carry: Softmax) -> Softmax:
        peak, total, acc = carry
        key = step * tiling.keys + jnp.arange(tiling.keys, dtype=jnp.int32)
        # Memory beyond kv_lens may hold anything, NaN included, so it is not loaded.
        exists = key < kv_len
        page = plgpu.load(page_table_ref.at[block, lax.div(key, page_size)], mask=exists, other=0)
        offset = lax.rem(key, page_size)
        at_keys = [(page[:, None], kv_head, offset[:, None], dim[None, :]) for dim in dims]

        def load(ref: Any) -> list[jax.Array]:
            zero = jnp.zeros((), ref.dtype)
            loaded = [plgpu.load(ref.at[at], mask=exists[:, None], other=zero) for at in at_keys]
            return [x.astype(dtype) for x in loaded]

        def load_scales(ref: Any) -> jax.Array:
            return plgpu.load(ref.at[page, kv_head, offset], mask=exists, other=0.0)[None, :]

        k = load(k_ref)
        v = k if v_ref is None else load(v_ref)
        products = [dot(*parts, 1) for parts in zip(q, k, strict=True)]
        product = functools.reduce(jnp.add, products)
        if has_scales:
            product = product * load_scales(keys.k_scale_ref)
        scores = log2_scores(product, options)
        seen = exists[None, :] & (key[None, :] <= position[:, None])
        if options.sliding_window is not None:
            seen &= key[None, :] > position[:, None] - options.sliding_window
        scores = jnp.where(seen, scores, MASKED)
        new_peak = jnp.maximum(peak, jnp.max(scores, axis=1))
        # Masked again, so that a row that has seen no key yet adds nothing.
        weights = jnp.where(seen, jnp.exp2(scores - new_peak[:, None]), 0.0)
        shrink = jnp.exp2(peak - new_peak)
        new_total = total * shrink + jnp.sum(weights, axis=1)
        if has_scales:
            weights = weights * load_scales(keys.v_scale_ref)
        new_acc = [
            part * shrink[:, None] + dot(weights.astype(values.dtype), values, 0)
            for part, values in zip(acc, v, strict=True)
        ]
        return new_peak, new_total, tuple(new_acc)

    return lax.fori_loop(*steps, body, start)


def log2_scores(products: jax.Array, options: Scores) -> jax.Array:
    """Scores in units of log2, of float32 products of queries and keys."""
    scores = products * options.scale
    if options.logit_softcap is not None:
        scores = options.logit_softcap * jnp.tanh(scores / options.logit_softcap)
    return scores * LOG2_E


def log2_sinks(sinks_ref: Any, head: jax.Array, is_row: jax.Array) -> jax.Array:
    """The sinks of heads [R] in units of log2; inside a kernel."""
    return plgpu.load(sinks_ref.at[head], mask=is_row, other=0.0) * LOG2_E


def split_result(softmax: Softmax) -> tuple[list[jax.Array], jax.Array]:
    """Outputs [R, size] and log2 of the sums [R] of a split; 0 and very small without keys."""
    peak, total, acc = softmax
    safe_total = jnp.maximum(total, jnp.finfo(jnp.float32).tiny)
    outs = [part / safe_total[:, None] for part in acc]
    return outs, jnp.where(total > 0.0, peak + jnp.log2(safe_total), MASKED)


def steps_of_split(
    first_position: jax.Array,
    kv_len: jax.Array,
    split: jax.Array,
    tiling: Tiling,
    options: Scores,
    begin_step: jax.Array | int = 0,
) -> tuple[jax.Array, jax.Array]:
    """The steps [begin, end) of the loop over keys that a split takes; none if begin >= end.

    Steps before `begin_step` are left out. All splits of a block get equally many steps. With a
    window, only steps with a key that some query of the block sees are split; with fixed splits
    those without are left out.
    """
    first = begin_step
    if options.sliding_window is not None:
        oldest = jnp.maximum(first_position - options.sliding_window + 1, 0)
        first = lax.div(oldest, tiling.keys)
    last = lax.div(kv_len + tiling.keys - 1, tiling.keys)
    if tiling.split_steps is not None:
        begin = split * tiling.split_steps
        return jnp.maximum(begin, first), jnp.minimum(begin + tiling.split_steps, last)
    each = lax.div(last - first + tiling.splits - 1, tiling.splits)
    begin = first + split * each
    return begin, jnp.minimum(begin + each, last)


def combine(out_SNQDh: jax.Array, lse_SNQD: jax.Array, *, is_ordered: bool = False) -> jax.Array:
    """Combines the splits' outputs: [N, Q, D, h] float32; 0 for rows that saw no key.

    Ordered sums add one split after another; the order of the others is the compiler's.
    """
    add_up: Callable[[jax.Array], jax.Array] = functools.partial(jnp.sum, axis=0)
    if is_ordered:
        add_up = functools.partial(functools.reduce, jnp.add)
    weights = jnp.exp2(lse_SNQD - jnp.max(lse_SNQD, axis=0, keepdims=True))
    weights = weights / add_up(weights)
    return add_up(out_SNQDh * weights[..., None])


def paged_attention(
    q_NQDh: jax.Array,
    k: jax.Array,
    v: jax.Array | None,
    page_table: jax.Array,
    positions: jax.Array,
    kv_lens: jax.Array,
    options: Scores,
    sinks: jax.Array | None = None,
    scales: tuple[jax.Array, jax.Array] | None = None,
    *,
    shared: SharedPart | None = None,
    is_invariant: bool = False,
    interpret: bool = False,
) -> jax.Array:
    """Causal attention of query blocks over their requests' pages.

    Args:
        q_NQDh: [N, Q, num_heads, head_dim] queries; the `head_parts` are of `HEAD_DIMS`.
        k: [num_pages, num_kv_heads, page_size, head_dim] keys of a layer's cache.
        v: The same of its values; None where keys are values too.
        page_table: [N, P] int32, ids of each request's pages in order.
        positions: [N, Q] int32, position of each query in its request.
        kv_lens: [N] int32, keys that exist; 0 for an unused block.
        options: How scores are made. Static.
        sinks: [num_heads] float32, for each head the score of a key without a value that every
            query sees; None without.
        scales: [num_pages, num_kv_heads, page_size] float32, by which keys and values of int8 are
            multiplied; None for other dtypes.
        shared: Made with these arguments by `shared_attention`; None if no keys are shared.
        is_invariant: Give a query the same bits in any batch, see `invariant_tiling`.
        interpret: Run the kernel as plain JAX operations on any device. Slow; for tests.

    Returns:
        [N, Q, num_heads, head_dim] in the queries' dtype; 0 where `kv_lens` is 0.
    """
    num_blocks, num_kv_heads = q_NQDh.shape[0], k.shape[1]
    choose = invariant_tiling if is_invariant else choose_tiling
    tiling = choose(q_NQDh.shape, computed_keys(q_NQDh.dtype, k), page_table.shape[1])
    is_split = tiling.splits > 1
    values, first_keys = ([] if x is None else [x] for x in (v, sinks))
    more = [*(scales or ()), *(shared or ()), *first_keys]
    out, lse = pl.pallas_call(
        functools.partial(
            _attend_to_split,
            tiling=tiling,
            options=options,
            has_values=v is not None,
            has_shared=shared is not None,
            has_scales=scales is not None,
        ),
        grid=(num_blocks, num_kv_heads * tiling.row_tiles, tiling.splits),
        out_shape=(
            jax.ShapeDtypeStruct(
                (tiling.splits, *q_NQDh.shape), jnp.float32 if is_split else q_NQDh.dtype
            ),
            jax.ShapeDtypeStruct((tiling.splits, *q_NQDh.shape[:3]), jnp.float32),
        ),
        compiler_params=plgpu.CompilerParams(num_warps=tiling.num_warps, num_stages=NUM_STAGES),
        interpret=interpret,
        name="paged_attention",
    )(q_NQDh, k, *values, page_table, positions, kv_lens, *more)
    if not is_split:
        return out[0]
    return combine(out, lse, is_ordered=is_invariant).astype(q_NQDh.dtype)
