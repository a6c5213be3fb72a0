"""Decode attention over pages in Pallas' Mosaic GPU, which no GPU has run: an experiment.

It computes what `kernels.gpu.paged_attention` does for one query a row, without windows, caps,
sinks, scales and shared keys, in a dtype of 16 bits, on Hopper (compute capability 9.0).

A block of the grid has two warp groups. One copies the pages of a step by TMA, several steps
ahead; the other multiplies. Instructions of Hopper's tensor cores take 64 rows or more from the
left, and from 8 columns on from the right. So keys are the rows and queries the columns: scores are
K Q^T, and sums are V^T P^T.

Shape legend: B rows; H query heads; K kv heads; h head dim.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from sgljax_engine.kernels.gpu.paged_attention import LOG2_E, MASKED, combine

_COLUMNS = 8
"""Queries of a kv head come in multiples of this."""

_SWIZZLED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
"""How tensor cores read numbers of 16 bits from shared memory: rows of 128 bytes."""

_COPYING_GROUP = 1
_LAYOUT = plgpu.Layout.WGMMA
_PER_COLUMN = plgpu.Layout.WGMMA.reduce(0)


class Steps(NamedTuple):
    """How a row's keys are gone through. Static.

    A step has `keys` keys, a multiple of 64 and of the page size, which is a multiple of 8. Up to
    `stages` steps are in shared memory. `splits` blocks share the keys of a row.
    """

    keys: int = 64
    stages: int = 3
    splits: int = 1


DEFAULT_STEPS = Steps()


class _Refs(NamedTuple):
    """Arrays in global memory; those in shared memory; and barriers, one for each stage."""

    q: Any
    k: Any
    v: Any
    page_table: Any
    kv_lens: Any
    out: Any
    lse: Any
    q_tile: Any
    k_tiles: Any
    v_tiles: Any
    weights: Any
    out_tile: Any
    lse_tile: Any
    q_is_here: Any
    k_are_here: Any
    v_are_here: Any
    are_free: Any


def decode_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    page_table: jax.Array,
    kv_lens: jax.Array,
    scale: float,
    steps: Steps = DEFAULT_STEPS,
    *,
    interpret: Any = None,
) -> jax.Array:
    """Attention of one query a row over the pages of its request.

    Args:
        q: [B, H, h] queries, of a dtype of 16 bits; h is a multiple of 64.
        k: [num_pages, K, page_size, h] keys.
        v: The same of values.
        page_table: [B, P] int32, ids of each row's pages in order.
        kv_lens: [B] int32, keys that exist; 0 for an unused row.
        scale: Multiplies the products.
        steps: How keys are gone through.
        interpret: Pallas' `InterpretGPUParams`, to run on any device. Slow; for tests. Products
            and layouts are then plain JAX operations; copies, barriers and loops are interpreted.

    Returns:
        [B, H, h] in the queries' dtype; 0 where `kv_lens` is 0.
    """
    num_rows, num_heads, head_dim = q.shape
    _, num_kv_heads, page_size, _ = k.shape
    group = num_heads // num_kv_heads
    columns = pl.cdiv(group, _COLUMNS) * _COLUMNS
    q = q.reshape(num_rows, num_kv_heads, group, head_dim)
    q = jnp.pad(q, ((0, 0), (0, 0), (0, columns - group), (0, 0)))

    def kernel(*refs: Any) -> None:
        _attend(_Refs(*refs), steps, scale, is_interpreted=interpret is not None)

    copies = plgpu.Barrier(num_arrivals=steps.keys // page_size, num_barriers=steps.stages)
    tile = functools.partial(plgpu.SMEM, dtype=k.dtype, transforms=_SWIZZLED)
    state = (steps.splits, num_rows, num_kv_heads)
    out, lse = plgpu.kernel(
        kernel,
        out_type=(
            jax.ShapeDtypeStruct((*state, head_dim, columns), jnp.float32),
            jax.ShapeDtypeStruct((*state, columns), jnp.float32),
        ),
        grid=(num_kv_heads, steps.splits, num_rows),
        grid_names=("kv_heads", "splits", "rows"),
        num_threads=2,
        thread_name="group",
        scratch_types=(
            tile((columns, head_dim)),
            tile((steps.stages, steps.keys, head_dim)),
            tile((steps.stages, steps.keys, head_dim)),
            tile((columns, steps.keys)),
            plgpu.SMEM((head_dim, columns), jnp.float32),
            plgpu.SMEM((columns,), jnp.float32),
            plgpu.Barrier(),
            copies,
            copies,
            plgpu.Barrier(num_barriers=steps.stages),
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="mosaic_decode",
        interpret=interpret,
    )(q, k, v, page_table, kv_lens)
    out = jnp.swapaxes(out[..., :group], -1, -2)
    return combine(out, lse[..., :group]).reshape(num_rows, num_heads, head_dim).astype(q.dtype)


def _attend(refs: _Refs, steps: Steps, scale: float, *, is_interpreted: bool) -> None:
    """The kernel: the queries of a row that share a kv head, over one split of its keys."""
    row, split = lax.axis_index("rows"), lax.axis_index("splits")
    kv_len = refs.kv_lens[row]
    num_steps = lax.div(kv_len + steps.keys - 1, jnp.int32(steps.keys))
    each = lax.div(num_steps + steps.splits - 1, jnp.int32(steps.splits))
    begin = split * each
    count = jnp.maximum(jnp.minimum(each, num_steps - begin), 0)
    group = lax.axis_index("group")

    @pl.when(group == _COPYING_GROUP)
    def _() -> None:
        _copy_pages(refs, kv_len, begin, count, steps)

    @pl.when(group != _COPYING_GROUP)
    def _() -> None:
        _multiply(refs, kv_len, begin, count, steps, scale, is_interpreted=is_interpreted)


def _copy_pages(refs: _Refs, kv_len: Any, begin: Any, count: Any, steps: Steps) -> None:
    """Fills the stages one after another, each as soon as it is free."""
    row, kv_head = lax.axis_index("rows"), lax.axis_index("kv_heads")
    page_size = refs.k.shape[2]
    num_pages = steps.keys // page_size
    last = lax.div(jnp.maximum(kv_len - 1, 0), jnp.int32(page_size))

    @pl.loop(0, count)
    def _(index: jax.Array) -> None:
        stage = lax.rem(index, jnp.int32(steps.stages))

        @pl.when(index >= steps.stages)
        def _() -> None:
            plgpu.barrier_wait(refs.are_free.at[stage])

        # The table's entries beyond a row's last page may be anything: that page stands for them.
        first = (begin + index) * num_pages
        pages = [refs.page_table[row, jnp.minimum(first + i, last)] for i in range(num_pages)]
        for source, tiles, are_here in (
            (refs.k, refs.k_tiles, refs.k_are_here),
            (refs.v, refs.v_tiles, refs.v_are_here),
        ):
            for i, page in enumerate(pages):
                target = tiles.at[stage, pl.ds(i * page_size, page_size)]
                plgpu.copy_gmem_to_smem(source.at[page, kv_head], target, are_here.at[stage])


def _multiply(
    refs: _Refs,
    kv_len: Any,
    begin: Any,
    count: Any,
    steps: Steps,
    scale: float,
    *,
    is_interpreted: bool,
) -> None:
    """Goes through the stages with an online softmax in units of log2; writes its result."""
    row, kv_head, split = (lax.axis_index(name) for name in ("rows", "kv_heads", "splits"))
    columns, head_dim = refs.q_tile.shape
    dtype = refs.k_tiles.dtype
    laid_out = (lambda x, _: x) if is_interpreted else plgpu.layout_cast
    product = _interpreted_product if is_interpreted else _product

    def is_key(shape: tuple[int, ...], first: jax.Array) -> jax.Array:
        if is_interpreted:
            return first + lax.broadcasted_iota(jnp.int32, shape, 0) < kv_len
        return first + plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=_LAYOUT) < kv_len

    def add_step(index: jax.Array, carry: Any) -> Any:
        peak, total, acc = carry
        stage = lax.rem(index, jnp.int32(steps.stages))
        first = (begin + index) * steps.keys
        plgpu.barrier_wait(refs.k_are_here.at[stage])
        scores = product(refs.k_tiles.at[stage], refs.q_tile, is_transposed=False)
        scores = jnp.where(is_key(scores.shape, first), scores * (scale * LOG2_E), MASKED)
        new_peak = jnp.maximum(peak, jnp.max(scores, axis=0))
        shrink = jnp.exp2(peak - new_peak)
        weights = jnp.exp2(scores - lax.broadcast_in_dim(new_peak, scores.shape, [1]))
        total = total * shrink + jnp.sum(weights, axis=0)
        weights = weights.astype(dtype)
        if is_interpreted:
            refs.weights[...] = weights.T
        else:
            weights = plgpu.layout_cast(weights, plgpu.Layout.WGMMA_TRANSPOSED)
            refs.weights.T[...] = weights
        plgpu.barrier_wait(refs.v_are_here.at[stage])

        @pl.when(first + steps.keys > kv_len)
        def _() -> None:
            # Memory beyond kv_lens may hold anything, NaN included, and 0 * NaN is NaN.
            values = refs.v_tiles[stage]
            exists = is_key(values.shape, first)
            refs.v_tiles[stage] = jnp.where(exists, values, jnp.zeros_like(values))

        plgpu.commit_smem()
        added = product(refs.v_tiles.at[stage], refs.weights, is_transposed=True)
        plgpu.barrier_arrive(refs.are_free.at[stage])
        return new_peak, total, acc * lax.broadcast_in_dim(shrink, acc.shape, [1]) + added

    plgpu.copy_gmem_to_smem(refs.q.at[row, kv_head], refs.q_tile, refs.q_is_here)
    plgpu.barrier_wait(refs.q_is_here)
    state = (
        laid_out(jnp.full((columns,), MASKED, jnp.float32), _PER_COLUMN),
        laid_out(jnp.zeros((columns,), jnp.float32), _PER_COLUMN),
        laid_out(jnp.zeros((head_dim, columns), jnp.float32), _LAYOUT),
    )
    peak, total, acc = lax.fori_loop(0, count, add_step, state)
    total_or_tiny = jnp.maximum(total, jnp.float32(jnp.finfo(jnp.float32).tiny))
    refs.out_tile[...] = acc / lax.broadcast_in_dim(total_or_tiny, acc.shape, [1])
    lse = peak + jnp.log(total_or_tiny) * LOG2_E
    refs.lse_tile[...] = jnp.where(total > 0.0, lse, MASKED)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(refs.out_tile, refs.out.at[split, row, kv_head])
    plgpu.copy_smem_to_gmem(refs.lse_tile, refs.lse.at[split, row, kv_head])
    plgpu.wait_smem_to_gmem(0)


def _product(a: Any, b: Any, *, is_transposed: bool) -> jax.Array:
    """`a @ b.T` of tiles in shared memory, or `a.T @ b.T`, in float32."""
    left = a.T if is_transposed else a

    def multiply(acc: Any) -> jax.Array:
        plgpu.wgmma(acc, left, b.T)
        return acc[...]

    return pl.run_scoped(
        multiply, plgpu.WGMMAAccumulatorRef((left.shape[0], b.shape[0]), jnp.float32)
    )


def _interpreted_product(a: Any, b: Any, *, is_transposed: bool) -> jax.Array:
    """As `_product`; the interpreter of JAX 0.10 has no transposed references."""
    left, right = a[...].astype(jnp.float32), b[...].astype(jnp.float32)
    return (left.T if is_transposed else left) @ right.T
