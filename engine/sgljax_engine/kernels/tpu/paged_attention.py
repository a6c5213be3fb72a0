"""Paged attention on TPUs that can write the new keys and values too: a Pallas kernel.

One step of the grid handles a few neighbouring blocks of queries. Those that follow each other in
one request are a *run*, and read their keys once. A run's pages come into VMEM a *chunk* at a time,
by copies that run while the chunk before is computed: the scheme of ragged paged attention (Jiang
et al., arXiv 2604.15464), with softmax accumulated over chunks (FlashAttention 2, Dao, 2023).
Between runs of one token, and where nothing is written, the first chunk of the next run is under
way too. A page has all heads of its tokens, so one copy brings tens of kilobytes.

New keys and values are put into their page in VMEM, where attention uses them, and the page goes
back to the pool. So the pool is read and written in place, in HBM, and no program copies it.

Steps run in order on one core. A block may so use keys of blocks before it.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from sgljax_engine.kernels.tpu.paged_sizes import LANES, Scores, Sizes
from sgljax_engine.kernels.tpu.paged_step import attend_step

_CHUNK_BYTES = 1 << 20
"""Bytes of a chunk's keys, and of its values; two chunks of both are in VMEM at a time."""

_MAX_CHUNK_TOKENS = 512
_MAX_STEP_TOKENS = 128
_MAX_STEP_ROWS = 512
"""Queries of a step that share a kv head: the rows of a product."""

_MAX_STEP_BYTES = 6 << 20
"""Bytes in VMEM of a step's queries, outputs and sums; the compiler's limit for all is 16 MiB."""


class KeysBefore(NamedTuple):
    """Attention of blocks to their first keys, which go on behind them.

    Shape: begins: [N] int32, how many first keys, whole pages. lses: [N, Q, num_heads] float32,
        logarithms of their sums of weights; very small without keys. outs:
        [N, Q, num_heads, head_dim] float32.
    """

    begins: jax.Array
    lses: jax.Array
    outs: jax.Array


class Attended(NamedTuple):
    """Results of `paged_attention`.

    Shape: out: [N, Q, num_heads, head_dim] in the queries' dtype, float32 with lse; unspecified for
        tokens at or beyond `kv_lens`. k_pages, v_pages: the pages with the new keys and values.
        lse: [N, Q, num_heads] float32; None if not asked for.
    """

    out: jax.Array
    k_pages: jax.Array
    v_pages: jax.Array
    lse: jax.Array | None


def paged_attention(
    q_NQDh: jax.Array,
    new: tuple[jax.Array, jax.Array] | None,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table_NP: jax.Array,
    starts_N: jax.Array,
    kv_lens_N: jax.Array,
    scores: Scores,
    sinks: jax.Array | None = None,
    *,
    before: KeysBefore | None = None,
    has_lse: bool = False,
    interpret: Any = False,
) -> Attended:
    """Writes each block's keys and values to its pages, then attends.

    Args:
        q_NQDh: [N, Q, num_heads, head_dim] queries of N blocks of Q tokens.
        new: Keys and values of the same tokens, [N, Q, num_kv_heads, head_dim] in the pages' dtype;
            None if the pages hold them already.
        k_pages: [num_pages, num_kv_heads, page_size, head_dim]; donated if there is `new`.
        v_pages: As `k_pages`.
        page_table_NP: [N, P] int32, ids of the request's pages in order.
        starts_N: [N] int32, position of a block's first token; the others follow it.
        kv_lens_N: [N] int32, keys that exist, the block's own included: less than `starts + Q`
            where a block is not full. 0 for an unused block.
        scores: How scores are made.
        sinks: [num_heads] float32, for each head the score of a key without a value that every
            query sees; None without.
        before: Keys that blocks attended to before; None without.
        has_lse: Return logarithms of the sums of weights too. Blocks have several queries.
        interpret: As of `pl.pallas_call`.
    """
    num_blocks, num_queries, num_heads, head_dim = q_NQDh.shape
    _, num_kv_heads, page_size, _ = k_pages.shape
    sizes = Sizes(
        1 if has_lse else step_blocks(q_NQDh, num_kv_heads),
        num_queries,
        _chunk_pages(k_pages, page_table_NP.shape[1]),
        page_size,
    )
    q = _queries_of_steps(q_NQDh, num_kv_heads, sizes)
    fresh = [] if new is None else [_side_by_side(x, sizes) for x in new]
    first_keys = [] if sinks is None else [_sinks_of_rows(sinks, num_kv_heads, q, sizes)]
    earlier = [] if before is None else _rows_before(before, num_kv_heads, sizes)
    scalars = [] if before is None else [before.begins]

    def block(x: jax.Array) -> pl.BlockSpec:
        zeros = (0,) * (x.ndim - 1)
        return pl.BlockSpec((1, *x.shape[1:]), lambda n, *_: (n, *zeros))

    def whole(x: jax.Array) -> pl.BlockSpec:
        return pl.BlockSpec(x.shape, lambda n, *_: (0,) * x.ndim)

    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    chunk = (2, sizes.chunk_pages, *k_pages.shape[1:])
    pools = [k_pages, v_pages]
    if not interpret:  # a pool that fits into VMEM would be brought there whole, and back
        pools = [pltpu.with_memory_space_constraint(pool, pltpu.HBM) for pool in pools]
    written = [] if new is None else pools
    groups = 1 if num_queries == 1 else num_heads // num_kv_heads
    state = (num_kv_heads, groups, q.shape[-2])
    runs_N = _run_lengths(page_table_NP, starts_N, kv_lens_N, sizes)
    results = [jax.ShapeDtypeStruct(q.shape, jnp.float32 if has_lse else q.dtype)]
    results += [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in written]
    lse = jax.ShapeDtypeStruct((num_blocks // sizes.step_blocks, *state, LANES), jnp.float32)
    lses: list[Any] = [lse] if has_lse else []
    names = ["table", "starts", "lens", "runs", *(["begins"] if scalars else []), "q"]
    names += [*(["new_k", "new_v"] if fresh else []), "k_pages", "v_pages"]
    names += [*(["lses", "outs"] if earlier else []), *(["sinks"] if first_keys else []), "out"]
    names += [*(["stored_k", "stored_v"] if written else []), *(["lse"] if lses else [])]
    names += ["k_chunks", "v_chunks", "max", "sum", "acc", "next", "load_sems", "store_sems"]
    first_pool = names.index("k_pages")
    out, *more = pl.pallas_call(
        functools.partial(attend_step, names=tuple(names), sizes=sizes, scores=scores),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4 + len(scalars),
            grid=(num_blocks // sizes.step_blocks,),
            in_specs=[
                *map(block, [q, *fresh]),
                *(anywhere, anywhere),
                *map(block, earlier),
                *map(whole, first_keys),
            ],
            out_specs=[block(q), *(anywhere for _ in written), *map(block, lses)],
            scratch_shapes=[
                pltpu.VMEM(chunk, k_pages.dtype),
                pltpu.VMEM(chunk, v_pages.dtype),
                pltpu.VMEM((*state, LANES), jnp.float32),
                pltpu.VMEM((*state, LANES), jnp.float32),
                pltpu.VMEM((*state, head_dim), jnp.float32),
                pltpu.SMEM((2,), jnp.int32),
                pltpu.SemaphoreType.DMA((2, 2)),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        out_shape=[*results, *lses],
        # Operands are counted with the prefetched ones.
        input_output_aliases={} if new is None else {first_pool: 1, first_pool + 1: 2},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        cost_estimate=_cost(
            *(q_NQDh, new, k_pages, page_table_NP.shape[1], sizes, scores),
            [*earlier, *lses],
            is_shared=has_lse,
        ),
        interpret=interpret,
        name="paged_attention",
    )(
        *(page_table_NP, starts_N, kv_lens_N, runs_N, *scalars),
        *(q, *fresh, *pools, *earlier, *first_keys),
    )
    if new is not None:
        k_pages, v_pages = more
    out = _outputs_of_steps(out, q_NQDh, sizes)
    return Attended(out, k_pages, v_pages, _lses_of_blocks(more[0], q_NQDh) if has_lse else None)


def _cost(
    q_NQDh: jax.Array,
    new: tuple[jax.Array, jax.Array] | None,
    pages: jax.Array,
    max_pages: int,
    sizes: Sizes,
    scores: Scores,
    states: list[Any],
    *,
    is_shared: bool,
) -> pl.CostEstimate:
    """Cost of a call if each request fills its page table; the compiler schedules by it.

    Where keys are shared, and `states` pass between two calls: if half of the runs are used, and
    half of the keys of all blocks are shared.
    """
    num_blocks, num_queries, num_heads, head_dim = q_NQDh.shape
    if is_shared:
        num_blocks = -(-num_blocks // 2)
    if states:
        max_pages = -(-max_pages // 2)
    num_keys = max_pages * sizes.page_size
    if scores.sliding_window is not None:
        num_keys = min(num_keys, scores.sliding_window)
        # A step reads the windows of all its tokens, which begin and end within pages.
        num_seen = num_keys + sizes.step_blocks * num_queries
        max_pages = min(max_pages, -(-num_seen // sizes.page_size) + 1)
    num_scores = num_blocks * num_queries * num_heads * num_keys
    page_bytes = pages[0].size * pages.dtype.itemsize
    # Keys and values of each page once a step; queries and outputs; the new ones, and their pages.
    num_steps = num_blocks // sizes.step_blocks
    num_bytes = 2 * num_steps * max_pages * page_bytes + 2 * q_NQDh.size * q_NQDh.dtype.itemsize
    num_bytes += sum(x.size * x.dtype.itemsize for x in states)
    for x in new or ():
        stored = num_steps * min(sizes.step_pages, max_pages)
        num_bytes += x.size * x.dtype.itemsize + stored * page_bytes
    return pl.CostEstimate(
        flops=4 * num_scores * head_dim, bytes_accessed=num_bytes, transcendentals=num_scores
    )


def _row_tile(dtype: jnp.dtype) -> int:
    return 8 * 4 // jnp.dtype(dtype).itemsize


def _chunk_pages(pages: jax.Array, max_pages: int) -> int:
    page_bytes = pages[0].size * pages.dtype.itemsize
    most = min(_CHUNK_BYTES // page_bytes, _MAX_CHUNK_TOKENS // pages.shape[2], max_pages)
    return max(most, 1)


def step_blocks(q_NQDh: jax.Array, num_kv_heads: int) -> int:
    """Blocks of a step: a power of two that divides their number, within the limits."""
    num_blocks, num_queries, num_heads, head_dim = q_NQDh.shape
    itemsize = q_NQDh.dtype.itemsize
    if num_queries % _row_tile(q_NQDh.dtype):
        return 1
    # Queries and outputs are there twice, for the step before or after; sums are float32.
    token_bytes = num_heads * (4 * head_dim * itemsize + 4 * (2 * LANES + head_dim))
    most = min(
        _MAX_STEP_TOKENS,
        _MAX_STEP_ROWS * num_kv_heads // num_heads,
        _MAX_STEP_BYTES // token_bytes,
    )
    count = 1
    while num_blocks % (2 * count) == 0 and 2 * count * num_queries <= most:
        count *= 2
    return count


def _run_lengths(
    table_NP: jax.Array, starts_N: jax.Array, lens_N: jax.Array, sizes: Sizes
) -> jax.Array:
    """Blocks of the run that each block starts; 0 for blocks of a run that started before.

    A block goes on with the run if its keys are those of the block before and its own.
    """
    if sizes.step_blocks == 1:
        return jnp.ones_like(lens_N)
    before = jax.tree.map(lambda x: jnp.roll(x, 1, axis=0), (table_NP, starts_N, lens_N))
    used = (before[2] + sizes.page_size - 1) // sizes.page_size
    is_unused = jnp.arange(table_NP.shape[1]) >= used[:, None]
    has_same_keys = jnp.all((table_NP == before[0]) | is_unused, axis=1)
    follows = (starts_N == before[2]) & (before[2] == before[1] + sizes.num_queries)
    is_step = jnp.arange(len(lens_N)) % sizes.step_blocks == 0
    starts_run = ~(has_same_keys & follows & (lens_N > starts_N)) | is_step
    runs = jnp.cumsum(starts_run).reshape(-1, sizes.step_blocks)
    lengths = jnp.sum(runs[:, :, None] == runs[:, None], axis=2, dtype=jnp.int32)
    return jnp.where(starts_run, lengths.reshape(-1), 0)


def _queries_of_steps(q_NQDh: jax.Array, num_kv_heads: int, sizes: Sizes) -> jax.Array:
    """[steps, tokens, num_heads * head_dim], as projections make them and without a copy.

    Of one token, [N, num_kv_heads, groups, head_dim]. Tokens or groups are padded to tiles.
    """
    num_heads, head_dim = q_NQDh.shape[2:]
    if sizes.step_tokens == 1:
        q = q_NQDh.reshape(-1, num_kv_heads, num_heads // num_kv_heads, head_dim)
    else:
        q = _side_by_side(q_NQDh, sizes)
    padding = [(0, 0)] * (q.ndim - 2) + [(0, -q.shape[-2] % _row_tile(q.dtype)), (0, 0)]
    return jnp.pad(q, padding)


def _sinks_of_rows(sinks: jax.Array, num_kv_heads: int, q: jax.Array, sizes: Sizes) -> jax.Array:
    """Sinks as the sums of a step lie, [num_kv_heads, groups, rows, LANES], of one token or all."""
    groups = sinks.reshape(num_kv_heads, -1)
    if sizes.num_queries == 1:  # rows are query heads, padded as queries are
        groups = jnp.pad(groups, ((0, 0), (0, q.shape[-2] - groups.shape[1])))[:, None]
    else:
        groups = groups[:, :, None]
    return jnp.broadcast_to(groups[..., None], (*groups.shape, LANES))


def _rows_before(before: KeysBefore, num_kv_heads: int, sizes: Sizes) -> list[jax.Array]:
    """Sums and outputs as the state of a step lies, in rows of float32.

    Shape: [steps, num_kv_heads, groups, rows, LANES] and [steps, num_kv_heads, groups, rows,
    head_dim]; rows are tokens, or of one query its groups.
    """
    num_heads, head_dim = before.outs.shape[2:]
    tokens, group = sizes.step_tokens, num_heads // num_kv_heads
    outs = before.outs.reshape(-1, tokens, num_kv_heads, group, head_dim)
    lses = before.lses.reshape(-1, tokens, num_kv_heads, group, 1)
    order = (0, 2, 1, 3, 4) if sizes.num_queries == 1 else (0, 2, 3, 1, 4)
    lses, outs = (x.transpose(order) for x in (lses, outs))
    padding = [(0, 0)] * 3 + [(0, -outs.shape[3] % _row_tile(jnp.float32)), (0, 0)]
    lses, outs = (jnp.pad(x, padding) for x in (lses, outs))
    return [jnp.broadcast_to(lses, (*lses.shape[:-1], LANES)), outs]


def _lses_of_blocks(lse: jax.Array, q_NQDh: jax.Array) -> jax.Array:
    """[N, Q, num_heads], of [N, num_kv_heads, groups, tokens, LANES]."""
    num_blocks, num_queries, num_heads, _ = q_NQDh.shape
    heads = lse[..., :num_queries, 0].reshape(num_blocks, num_heads, num_queries)
    return heads.swapaxes(1, 2)


def _side_by_side(x_NQHh: jax.Array, sizes: Sizes) -> jax.Array:
    """[steps, tokens, heads * head_dim]; of one token [N, heads, 1, head_dim]."""
    if sizes.step_tokens == 1:
        return x_NQHh.swapaxes(1, 2)
    return x_NQHh.reshape(-1, sizes.step_tokens, x_NQHh.shape[2] * x_NQHh.shape[3])


def _outputs_of_steps(out: jax.Array, q_NQDh: jax.Array, sizes: Sizes) -> jax.Array:
    used = sizes.step_tokens if sizes.step_tokens > 1 else q_NQDh.shape[2] // out.shape[1]
    return out[..., :used, :].reshape(q_NQDh.shape)
