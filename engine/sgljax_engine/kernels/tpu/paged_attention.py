"""Paged attention on TPUs that can write the new keys and values too: a Pallas kernel.

One step of the grid handles one block of queries of one request. The request's pages come into VMEM
a *chunk* at a time, by copies that run while the chunk before is computed: the scheme of ragged
paged attention (Jiang et al., arXiv 2604.15464), with softmax accumulated over chunks
(FlashAttention 2, Dao, 2023). Between blocks of one token the first chunk of the next block is
under way too. A page has all heads of its tokens, so one copy brings tens of kilobytes.

New keys and values are put into their page in VMEM, where attention uses them, and the page goes
back to the pool. So the pool is read and written in place, and no program copies it.

Steps run in order on one core. A block may so use keys of blocks before it.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

_MASKED = -1e30
_LANES = 128
_CHUNK_BYTES = 1 << 20
"""Bytes of a chunk's keys, and of its values; two chunks of both are in VMEM at a time."""

_MAX_CHUNK_TOKENS = 512


class Scores(NamedTuple):
    """How products of queries and keys become scores; as of `attention.base.AttentionOptions`."""

    scale: float
    sliding_window: int | None = None
    logit_softcap: float | None = None


class _Sizes(NamedTuple):
    """Static sizes.

    Attributes:
        chunk_pages: Pages of a chunk.
        page_size: Tokens of a page.
        num_groups: Query heads that share a kv head.
        num_write_pages: Pages that the new tokens of a block can lie in.
    """

    chunk_pages: int
    page_size: int
    num_groups: int
    num_write_pages: int

    @property
    def chunk_tokens(self) -> int:
        """Tokens of a chunk."""
        return self.chunk_pages * self.page_size


def paged_attention(
    q_NQDh: jax.Array,
    new: tuple[jax.Array, jax.Array] | None,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table_NP: jax.Array,
    starts_N: jax.Array,
    kv_lens_N: jax.Array,
    scores: Scores,
    *,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
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
        interpret: As of `pl.pallas_call`.

    Returns:
        [N, Q, num_heads, head_dim] in the queries' dtype, unspecified for tokens at or beyond
        `kv_lens`, and both arrays of pages with the new keys and values.
    """
    num_blocks, num_queries, num_heads, head_dim = q_NQDh.shape
    _, num_kv_heads, page_size, _ = k_pages.shape
    num_groups = num_heads // num_kv_heads
    num_rows = num_queries * num_groups
    padded_rows = -(-num_rows // _row_tile(q_NQDh.dtype)) * _row_tile(q_NQDh.dtype)
    sizes = _Sizes(
        _chunk_pages(k_pages, page_table_NP.shape[1]),
        page_size,
        num_groups,
        1 if num_queries == 1 else -(-(num_queries - 1) // page_size) + 1,
    )
    q = q_NQDh.reshape(num_blocks, num_queries, num_kv_heads, num_groups, head_dim)
    q = q.swapaxes(1, 2).reshape(num_blocks, num_kv_heads, num_rows, head_dim)
    q = jnp.pad(q, ((0, 0), (0, 0), (0, padded_rows - num_rows), (0, 0)))
    placed = [] if new is None else [_in_pages(x, starts_N, sizes) for x in new]

    def block(x: jax.Array) -> pl.BlockSpec:
        zeros = (0,) * (x.ndim - 1)
        return pl.BlockSpec((1, *x.shape[1:]), lambda n, *_: (n, *zeros))

    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    chunk = (2, sizes.chunk_pages, *k_pages.shape[1:])
    state = (num_kv_heads, padded_rows)
    pools = [] if new is None else [k_pages, v_pages]
    out, *written = pl.pallas_call(
        functools.partial(
            _kernel,
            is_writing=new is not None,
            sizes=sizes,
            scores=scores,
            prefetches=new is None or num_queries == 1,
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(num_blocks,),
            in_specs=[block(q), *map(block, placed), anywhere, anywhere],
            out_specs=[block(q), *(anywhere for _ in pools)],
            scratch_shapes=[
                pltpu.VMEM(chunk, k_pages.dtype),
                pltpu.VMEM(chunk, v_pages.dtype),
                pltpu.VMEM((*state, _LANES), jnp.float32),
                pltpu.VMEM((*state, _LANES), jnp.float32),
                pltpu.VMEM((*state, head_dim), jnp.float32),
                pltpu.SMEM((1,), jnp.int32),
                pltpu.SemaphoreType.DMA((2, 2)),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, *pools)],
        # Operands are counted with the three prefetched ones.
        input_output_aliases={} if new is None else {6: 1, 7: 2},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        cost_estimate=_cost(q_NQDh, placed, k_pages, page_table_NP.shape[1]),
        interpret=interpret,
        name="paged_attention",
    )(page_table_NP, starts_N, kv_lens_N, q, *placed, k_pages, v_pages)
    if new is not None:
        k_pages, v_pages = written
    out = out[:, :, :num_rows].reshape(num_blocks, num_kv_heads, num_queries, num_groups, head_dim)
    return out.swapaxes(1, 2).reshape(q_NQDh.shape), k_pages, v_pages


def _cost(
    q_NQDh: jax.Array, placed: list[jax.Array], pages: jax.Array, max_pages: int
) -> pl.CostEstimate:
    """What a call takes if each request fills its page table; the compiler schedules by it."""
    num_blocks, num_queries, num_heads, head_dim = q_NQDh.shape
    _, num_kv_heads, page_size, _ = pages.shape
    num_scores = num_blocks * num_queries * num_heads * max_pages * page_size
    page_bytes = num_kv_heads * page_size * head_dim * pages.dtype.itemsize
    # Keys and values of each page once; queries and outputs; the new ones, and their pages back.
    num_bytes = 2 * num_blocks * max_pages * page_bytes + 2 * q_NQDh.size * q_NQDh.dtype.itemsize
    for new in placed:
        num_bytes += new.size * new.dtype.itemsize + num_blocks * new.shape[1] * page_bytes
    return pl.CostEstimate(
        flops=4 * num_scores * head_dim, bytes_accessed=num_bytes, transcendentals=num_scores
    )


def _row_tile(dtype: jnp.dtype) -> int:
    """Rows of a tile in VMEM."""
    return 8 * 4 // jnp.dtype(dtype).itemsize


def _chunk_pages(pages: jax.Array, max_pages: int) -> int:
    page_bytes = pages[0].size * pages.dtype.itemsize
    most = min(_CHUNK_BYTES // page_bytes, _MAX_CHUNK_TOKENS // pages.shape[2], max_pages)
    return max(most, 1)


def _in_pages(x_NQKh: jax.Array, starts_N: jax.Array, sizes: _Sizes) -> jax.Array:
    """New keys or values at their places in their pages: [N, W, K, page_size, h].

    A single token is [N, 1, K, 1, h]: the kernel knows its place.
    """
    x = x_NQKh.swapaxes(1, 2)
    if x.shape[2] == 1:
        return x[:, None]
    offsets = starts_N % sizes.page_size
    places = jnp.arange(sizes.num_write_pages * sizes.page_size)
    index = jnp.clip(places[None] - offsets[:, None], 0, x.shape[2] - 1)
    x = jnp.take_along_axis(x, index[:, None, :, None], axis=2)
    shape = (*x.shape[:2], sizes.num_write_pages, sizes.page_size, x.shape[3])
    return x.reshape(shape).swapaxes(1, 2)


def _kernel(
    table_ref: Any,
    starts_ref: Any,
    lens_ref: Any,
    q_ref: Any,
    *refs: Any,
    is_writing: bool,
    sizes: _Sizes,
    scores: Scores,
    prefetches: bool,
) -> None:
    """One block. `slot_ref` holds which half of the chunk buffers its first chunk is in."""
    if is_writing:  # the pools come in and go out, in the same memory
        k_new_ref, v_new_ref, _, _, out_ref, k_ref, v_ref, *scratch = refs
    else:
        k_ref, v_ref, out_ref, *scratch = refs
        k_new_ref = v_new_ref = None
    k_chunks, v_chunks, max_ref, sum_ref, acc_ref, slot_ref, load_sems, store_sems = scratch
    block, num_blocks = pl.program_id(0), pl.num_programs(0)
    pools = ((k_ref, k_chunks, k_new_ref), (v_ref, v_chunks, v_new_ref))

    def chunks(n: Any) -> tuple[Any, Any]:
        """The first chunk that a block needs, and the one after its last."""
        end = (lens_ref[n] + sizes.chunk_tokens - 1) // sizes.chunk_tokens
        if scores.sliding_window is None:
            return jnp.int32(0), end
        oldest = jnp.maximum(starts_ref[n] - scores.sliding_window + 1, 0)
        return jnp.minimum(oldest // sizes.chunk_tokens, end), end

    def copies(n: Any, chunk: Any, slot: Any, act: Any) -> None:
        """Starts the copies of a chunk, or waits for them."""
        first = chunk * sizes.chunk_pages
        used = (lens_ref[n] + sizes.page_size - 1) // sizes.page_size

        def one(index: Any, _: Any) -> None:
            page = table_ref[n, first + index]
            for which, (pool, buffer, _new) in enumerate(pools):
                act(
                    pltpu.make_async_copy(
                        pool.at[page], buffer.at[slot, index], load_sems.at[slot, which]
                    )
                )

        lax.fori_loop(0, jnp.minimum(sizes.chunk_pages, used - first), one, None)

    def start(n: Any, chunk: Any, slot: Any) -> None:
        copies(n, chunk, slot, lambda copy: copy.start())

    first, end = chunks(block)
    before = jnp.maximum(block - 1, 0)
    after = jnp.minimum(block + 1, num_blocks - 1)
    first_before, end_before = chunks(before)
    first_after, end_after = chunks(after)
    is_started = (block > 0) & (first_before < end_before) if prefetches else False

    @pl.when(block == 0)
    def _() -> None:
        slot_ref[0] = 0

    @pl.when((first < end) & jnp.logical_not(is_started))
    def _() -> None:
        start(block, first, slot_ref[0])

    max_ref[...] = jnp.full_like(max_ref, _MASKED)
    sum_ref[...] = jnp.zeros_like(sum_ref)
    acc_ref[...] = jnp.zeros_like(acc_ref)

    def one_chunk(chunk: Any, slot: Any) -> Any:
        other = 1 - slot

        @pl.when(chunk + 1 < end)
        def _() -> None:
            start(block, chunk + 1, other)

        if prefetches:

            @pl.when((chunk + 1 == end) & (block + 1 < num_blocks) & (first_after < end_after))
            def _() -> None:
                start(after, first_after, other)

        copies(block, chunk, slot, lambda copy: copy.wait())
        store = functools.partial(
            _store_new, table_ref, starts_ref[block], lens_ref[block], pools, store_sems, sizes
        )
        if is_writing:
            store(block, chunk, slot, is_first=True)
        for head in range(q_ref.shape[1]):
            _attend_head(
                head,
                q_ref[0, head],
                k_chunks[slot, :, head],
                v_chunks[slot, :, head],
                (max_ref, sum_ref, acc_ref),
                chunk * sizes.chunk_tokens,
                starts_ref[block],
                lens_ref[block],
                sizes,
                scores,
            )
        if is_writing:
            store(block, chunk, slot, is_first=False)
        return other

    slot_ref[0] = lax.fori_loop(first, end, one_chunk, slot_ref[0])
    total = sum_ref[...][..., :1]
    out = acc_ref[...] / jnp.where(total == 0, 1.0, total)
    out_ref[0] = out.astype(out_ref.dtype)


def _store_new(
    table_ref: Any,
    start: Any,
    kv_len: Any,
    pools: Any,
    sems: Any,
    sizes: _Sizes,
    block: Any,
    chunk: Any,
    slot: Any,
    *,
    is_first: bool,
) -> None:
    """Puts new keys and values into the pages of a chunk and starts to store these, or waits."""
    for index in range(sizes.num_write_pages):
        page = start // sizes.page_size + index
        place = page - chunk * sizes.chunk_pages
        is_here = (place >= 0) & (place < sizes.chunk_pages) & (page * sizes.page_size < kv_len)

        @pl.when(is_here)
        def _(page: Any = page, place: Any = place, index: int = index) -> None:
            for which, (pool, buffer, new_ref) in enumerate(pools):
                copy = pltpu.make_async_copy(
                    buffer.at[slot, place], pool.at[table_ref[block, page]], sems.at[which]
                )
                if not is_first:
                    copy.wait()
                    continue
                old = buffer[slot, place]
                token = page * sizes.page_size + lax.broadcasted_iota(jnp.int32, old.shape, 1)
                is_new = (token >= start) & (token < kv_len)
                buffer[slot, place] = jnp.where(is_new, new_ref[0, index], old)
                copy.start()


def _attend_head(
    head: int,
    q: Any,
    k: Any,
    v: Any,
    state: Any,
    first_token: Any,
    start: Any,
    kv_len: Any,
    sizes: _Sizes,
    scores: Scores,
) -> None:
    """Adds a chunk of keys to the running softmax of one kv head's queries."""
    max_ref, sum_ref, acc_ref = state
    head_dim = q.shape[-1]
    k, v = k.reshape(-1, head_dim), v.reshape(-1, head_dim)
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
    position = start + lax.broadcasted_iota(jnp.int32, s.shape, 0) // sizes.num_groups
    is_seen = (token <= position) & (token < kv_len)
    if scores.sliding_window is not None:
        is_seen &= token > position - scores.sliding_window
    s = jnp.where(is_seen, s, _MASKED)
    old_max = max_ref[head][:, :1]
    new_max = jnp.maximum(old_max, jnp.max(s, axis=1, keepdims=True))
    p = jnp.where(is_seen, jnp.exp(s - new_max), 0.0)
    # Memory that holds no key may hold NaN, which a weight of 0 does not undo.
    exists = first_token + lax.broadcasted_iota(jnp.int32, v.shape, 0) < kv_len
    v = jnp.where(exists, v.astype(jnp.float32), 0.0).astype(v.dtype)
    kept = jnp.exp(old_max - new_max)
    new_sum = kept * sum_ref[head][:, :1] + jnp.sum(p, axis=1, keepdims=True)
    acc_ref[head] = kept * acc_ref[head] + lax.dot_general(
        p.astype(v.dtype),
        v,
        (((1,), (0,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    max_ref[head] = jnp.broadcast_to(new_max, max_ref.shape[1:])
    sum_ref[head] = jnp.broadcast_to(new_sum, sum_ref.shape[1:])
