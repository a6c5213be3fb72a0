"""Attention over keys that rows share on NVIDIA GPUs: a Pallas kernel that reads them once a run.

Its rows are the queries of several blocks. It leaves the state of each row's softmax, from which
the kernels of `paged_attention` and `decode_attention` go on with the keys that only that row sees.
With the tiling and splits of a batch-invariant kernel, a row's keys are so added in the order in
which they would be without it.

Shape legend: that of `attention.base`; runs as of `kernels.runs`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from sgljax_engine.kernels.dtypes import computed_dtype
from sgljax_engine.kernels.gpu.decode_attention import HeadNorms, rotated_heads
from sgljax_engine.kernels.gpu.paged_attention import (
    NUM_STAGES,
    Keys,
    Scores,
    SharedPart,
    Tiling,
    attend_to_keys,
    choose_tiling,
    computed_keys,
    dims_of_parts,
    first_softmax,
    invariant_tiling,
    steps_of_split,
)
from sgljax_engine.kernels.runs import SharedRuns

_PROGRAMS_PER_RUN = 4
"""Runs have larger tiles than blocks, of which a GPU holds so many times fewer."""


_WIDE_HEAD, _MAX_WIDE_ROWS = 256, 32
"""Rows of wider heads are fewer, else registers do not hold their sums."""


class QueryPrologue(NamedTuple):
    """What is left to do to queries: sines and cosines [N, h // 2] float32, and norms if any."""

    rope: tuple[jax.Array, jax.Array]
    norms: HeadNorms | None


def run_tiling(
    q_shape: tuple[int, ...],
    k: jax.Array,
    max_pages: int,
    run_queries: tuple[int, int],
    *,
    is_invariant: bool = False,
) -> Tiling:
    """Splits the work of runs of blocks of queries [N, Q, num_heads, head_dim].

    It has the steps of the tiling for blocks, and a multiple of its splits. `run_queries` are the
    blocks of a run, and the queries of each.
    """
    num_blocks, _, *heads = q_shape
    size, num_queries = run_queries
    shape = (pl.cdiv(num_blocks, size), size * num_queries, *heads)
    if is_invariant:
        return invariant_tiling(shape, k, max_pages)
    own, tiling = (choose_tiling(each, k, max_pages) for each in (q_shape, shape))
    rows = tiling.rows if q_shape[-1] <= _WIDE_HEAD else min(tiling.rows, _MAX_WIDE_ROWS)
    return tiling._replace(
        rows=rows,
        row_tiles=tiling.row_tiles * tiling.rows // rows,
        splits=max(tiling.splits // _PROGRAMS_PER_RUN, own.splits),
    )


def shared_attention(
    q_NQDh: jax.Array,
    k: jax.Array,
    v: jax.Array | None,
    page_table: jax.Array,
    kv_lens: jax.Array,
    runs: SharedRuns,
    options: Scores,
    sinks: jax.Array | None = None,
    scales: tuple[jax.Array, jax.Array] | None = None,
    *,
    prologue: QueryPrologue | None = None,
    is_invariant: bool = False,
    interpret: bool = False,
) -> SharedPart:
    """Softmaxes of blocks over the keys that they share, whole steps of them.

    Arguments are as of `paged_attention`, or with a `prologue` as of `decode_attention`: queries
    [N, 1, num_heads, head_dim] as projections make them. There is no window.
    """
    num_blocks, _, num_heads, head_dim = q_NQDh.shape
    num_runs, run_blocks = runs.members.shape
    (num_queries,) = runs.queries.shape
    keys, sizes = computed_keys(q_NQDh.dtype, k), (run_blocks, num_queries)
    tiling = run_tiling(q_NQDh.shape, keys, page_table.shape[1], sizes, is_invariant=is_invariant)
    given = {"q": q_NQDh, "k": k, "v": v, "page_table": page_table, "kv_lens": kv_lens}
    given |= {"members": runs.members, "num_keys": runs.num_keys, "sinks": sinks}
    if scales is not None:
        given |= {"k_scale": scales[0], "v_scale": scales[1]}
    eps = offset = 0.0
    if prologue is not None:
        given |= {"q": q_NQDh[:, 0], "sin": prologue.rope[0], "cos": prologue.rope[1]}
        if prologue.norms is not None:
            eps, offset = prologue.norms.eps, prologue.norms.offset
            given["q_norm"] = prologue.norms.q
    args = {name: each for name, each in given.items() if each is not None}

    def kernel(*refs: Any) -> None:
        named = _Refs(**dict(zip(args, refs[:-3], strict=True)))
        _attend(named, refs[-3:], num_queries, tiling, options, eps, offset)

    state = (tiling.splits, num_blocks, num_queries, num_heads)
    parts = pl.pallas_call(
        kernel,
        grid=(num_runs, k.shape[1] * tiling.row_tiles, tiling.splits),
        out_shape=[
            jax.ShapeDtypeStruct(x, jnp.float32) for x in (state, state, (*state, head_dim))
        ],
        compiler_params=plgpu.CompilerParams(num_warps=tiling.num_warps, num_stages=NUM_STAGES),
        interpret=interpret,
        name="shared_attention",
    )(*args.values())
    return SharedPart(runs.begins, *parts)


class _Refs(NamedTuple):
    q: Any
    k: Any
    page_table: Any
    kv_lens: Any
    members: Any
    num_keys: Any
    v: Any = None
    sinks: Any = None
    k_scale: Any = None
    v_scale: Any = None
    sin: Any = None
    cos: Any = None
    q_norm: Any = None


def _attend(
    refs: _Refs,
    results: Any,
    num_queries: int,
    tiling: Tiling,
    options: Scores,
    eps: float,
    offset: float,
) -> None:
    """The kernel: a tile of rows of one run and kv head over one split of the shared keys.

    `results` are refs of peaks, totals and accs, as of `SharedPart`.
    """
    run, split = pl.program_id(0), pl.program_id(2)
    kv_head = lax.div(pl.program_id(1), tiling.row_tiles)
    tile = lax.rem(pl.program_id(1), tiling.row_tiles)
    num_blocks = refs.q.shape[0]
    num_heads, head_dim = refs.q.shape[-2:]
    group = num_heads // refs.k.shape[1]
    run_blocks = refs.members.shape[1]

    row = tile * tiling.rows + jnp.arange(tiling.rows, dtype=jnp.int32)
    member, query = lax.div(row, group * num_queries), lax.rem(lax.div(row, group), num_queries)
    head = kv_head * group + lax.rem(row, group)
    is_there = member < run_blocks
    block = plgpu.load(refs.members.at[run, member], mask=is_there, other=num_blocks)
    is_row = block < num_blocks
    dims = dims_of_parts(head_dim)
    if refs.sin is None:
        at_rows = [(block[:, None], query[:, None], head[:, None], dim[None, :]) for dim in dims]
        q = [plgpu.load(refs.q.at[at], mask=is_row[:, None], other=0.0) for at in at_rows]
    else:
        here, angles = jnp.where(is_row, block, 0)[:, None], (refs.sin, refs.cos)
        mask = is_row[:, None]
        q = [rotated_heads(refs.q, refs.q_norm, angles, here, head[:, None], mask, eps, offset)]
    q = tuple(part.astype(computed_dtype(refs.q.dtype, refs.k.dtype)) for part in q)
    # Rows that have all ended need nothing.
    lens = plgpu.load(refs.kv_lens.at[block], mask=is_row, other=0)
    num_steps = jnp.where(jnp.max(lens) > 0, lax.div(refs.num_keys[run], tiling.keys), 0)
    num_keys = num_steps * tiling.keys
    steps = steps_of_split(num_keys, num_keys, split, tiling, options)
    leader = jnp.minimum(refs.members[run, 0], num_blocks - 1)
    scales = refs.k_scale, refs.v_scale
    keys = Keys(refs.k, refs.v, refs.page_table, leader, kv_head, num_keys, *scales)
    sinks = [] if refs.sinks is None else [refs.sinks]
    start = first_softmax(sinks, split == 0, head, is_row, head_dim)
    position = jnp.full((tiling.rows,), num_keys)  # sees all
    peak, total, acc = attend_to_keys(q, position, keys, steps, start, tiling, options)

    peak_ref, total_ref, acc_ref = results
    at = (split, block, query, head)
    plgpu.store(peak_ref.at[at], peak, mask=is_row)
    plgpu.store(total_ref.at[at], total, mask=is_row)
    for part, dim in zip(acc, dims, strict=True):
        at_part = (split, block[:, None], query[:, None], head[:, None], dim[None, :])
        plgpu.store(acc_ref.at[at_part], part, mask=is_row[:, None])
