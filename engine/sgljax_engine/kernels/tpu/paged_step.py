from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from sgljax_engine.kernels.tpu.chunk_softmax import MASKED, softmax_part
from sgljax_engine.kernels.tpu.paged_sizes import LANES, Scores, Sizes
from sgljax_engine.kernels.tpu.step_refs import Run, Step


def attend_step(*refs: Any, names: tuple[str, ...], sizes: Sizes, scores: Scores) -> None:
    # Pallas' interpreter knows the place in the grid outside of branches and loops only.
    first_block = pl.program_id(0) * sizes.step_blocks
    num_blocks = pl.num_programs(0) * sizes.step_blocks
    named = dict(zip(names, refs, strict=True))
    step = Step.of(named, first_block, num_blocks, sizes, scores)

    @pl.when(first_block == 0)
    def _() -> None:
        step.next_ref[0] = 0
        step.next_ref[1] = 0

    max_ref, sum_ref, acc_ref = step.state
    max_ref[...] = jnp.full_like(max_ref, MASKED)
    sum_ref[...] = jnp.zeros_like(sum_ref)
    acc_ref[...] = jnp.zeros_like(acc_ref)
    if "sinks" in named:  # the first key of each row, whose value adds nothing
        max_ref[...] = jnp.broadcast_to(named["sinks"][...], max_ref.shape)
        sum_ref[...] = jnp.ones_like(sum_ref)
    if "lses" in named:  # of keys before, whose weighted sum is that of one key
        num_rows = named["lses"].shape[3]
        max_ref[:, :, :num_rows] = named["lses"][0]
        acc_ref[:, :, :num_rows] = named["outs"][0]
        sum_ref[...] = jnp.ones_like(sum_ref)

    def one_run(index: Any) -> None:
        first = first_block + index
        length = step.runs_ref[first]
        pl.when(length > 0)(lambda: _attend_run(step, step.run_from(first)))

    _repeat(sizes.step_blocks, one_run)
    for head in range(acc_ref.shape[0]):
        for group in range(acc_ref.shape[1]):
            total = sum_ref[head, group][:, :1]
            out = acc_ref[head, group] / jnp.where(total == 0, 1.0, total)
            where = step.place_of(head, group, slice(0, acc_ref.shape[2]))
            step.out_ref[where] = out.astype(step.out_ref.dtype)
            if "lse" in named:
                log_sum = jnp.log(jnp.where(total == 0, 1.0, total))
                named["lse"][0, head, group] = max_ref[head, group] + log_sum


def _repeat(count: Any, act: Callable[[Any], None]) -> None:
    """Calls `act` with 0, 1 and so on; without a loop where that is once."""
    if isinstance(count, int) and count == 1:
        act(0)
    else:
        lax.fori_loop(0, count, lambda index, _: act(index), None)


def _attend_run(step: Step, run: Run) -> None:
    after = step.run_from(jnp.minimum(run.last + 1, step.num_blocks - 1))
    # The next run may use what this one writes, unless both are rows of a decode batch.
    prefetches = not step.is_writing or step.sizes.num_queries == 1
    is_next = (run.last + 1 < step.num_blocks) & (after.chunk < after.end_chunk) & prefetches
    is_next &= run.chunk < run.end_chunk

    @pl.when((run.chunk < run.end_chunk) & (step.next_ref[1] == 0))
    def _() -> None:
        _copy_chunk(step, run, run.chunk, step.next_ref[0], lambda copy: copy.start())

    def one_chunk(chunk: Any, slot: Any) -> Any:
        other = 1 - slot

        @pl.when(chunk + 1 < run.end_chunk)
        def _() -> None:
            _copy_chunk(step, run, chunk + 1, other, lambda copy: copy.start())

        if prefetches:

            @pl.when((chunk + 1 == run.end_chunk) & is_next)
            def _() -> None:
                _copy_chunk(step, after, after.chunk, other, lambda copy: copy.start())

        _copy_chunk(step, run, chunk, slot, lambda copy: copy.wait())
        if step.is_writing:
            _put_new(step, run, chunk, slot)
            _store_new(step, run, chunk, slot, lambda copy: copy.start())
        _attend_chunk(step, run, chunk, slot)
        if step.is_writing:
            _store_new(step, run, chunk, slot, lambda copy: copy.wait())
        return other

    step.next_ref[0] = lax.fori_loop(run.chunk, run.end_chunk, one_chunk, step.next_ref[0])
    step.next_ref[1] = is_next.astype(jnp.int32)


def _copy_chunk(step: Step, run: Run, chunk: Any, slot: Any, act: Callable[[Any], None]) -> None:
    """Starts the copies of a chunk into a half of the buffers, or waits for them."""
    first, page_size = chunk * step.sizes.chunk_pages, step.sizes.page_size
    used = (run.kv_len + page_size - 1) // page_size

    def copy(index: Any) -> None:
        page = step.table_ref[run.last, first + index]
        for which, (pool, buffer, _new) in enumerate(step.pools):
            sem = step.load_sems.at[slot, which]
            act(pltpu.make_async_copy(pool.at[page], buffer.at[slot, index], sem))

    def one(index: Any, _: Any) -> None:
        if not step.is_writing or step.sizes.num_queries == 1:
            copy(index)
            return
        token = (first + index) * page_size
        will_be_new = (token >= run.start) & (token + page_size <= run.kv_len)
        pl.when(~will_be_new)(lambda: copy(index))

    lower = jnp.maximum(run.page - first, 0)
    lax.fori_loop(lower, jnp.minimum(step.sizes.chunk_pages, used - first), one, None)


def _put_new(step: Step, run: Run, chunk: Any, slot: Any) -> None:
    sizes = step.sizes

    def one_block(index: Any) -> None:
        block = run.first + index
        start, kv_len = step.starts_ref[block], step.lens_ref[block]
        for page in (start // sizes.page_size + i for i in range(sizes.block_pages)):
            place = page - chunk * sizes.chunk_pages
            is_here = (place >= 0) & (place < sizes.chunk_pages)

            @pl.when(is_here & (page * sizes.page_size < kv_len))
            def _(page: Any = page, place: Any = place) -> None:
                token = page * sizes.page_size
                for _pool, buffer, new_ref in step.pools:
                    new = _new_of_page(step, new_ref, block, start - token)
                    shape = buffer.shape[3:]
                    tokens = token + lax.broadcasted_iota(jnp.int32, shape, 0)
                    is_new = (tokens >= start) & (tokens < kv_len)
                    for head, values in enumerate(new):
                        old = buffer[slot, place, head]
                        values = values.astype(old.dtype)
                        buffer[slot, place, head] = jnp.where(is_new, values, old)

    _repeat(1 if sizes.step_blocks == 1 else run.last - run.first + 1, one_block)


def _new_of_page(step: Step, new_ref: Any, block: Any, offset: Any) -> list[Any]:
    """Each head's new keys or values as in a page that a block starts at `offset` of."""
    sizes, (num_heads, *_, head_dim) = step.sizes, step.state[2].shape
    if sizes.num_queries == 1:
        return [new_ref[0, head] for head in range(num_heads)]
    new = new_ref[0, pl.ds(step.tokens_before(block), sizes.num_queries)]
    # Numbers of 32 bits can be rotated.
    shift = jnp.remainder(offset, sizes.num_queries)
    rotated = pltpu.roll(new.astype(jnp.float32), shift, axis=0)
    repeats = -(-sizes.page_size // sizes.num_queries)
    page = jnp.concatenate([rotated] * repeats, axis=0)[: sizes.page_size]
    return [page[:, head * head_dim :][:, :head_dim] for head in range(num_heads)]


def _store_new(step: Step, run: Run, chunk: Any, slot: Any, act: Callable[[Any], None]) -> None:
    """Starts to store the pages of a chunk that new tokens are in, or waits for that."""
    first = chunk * step.sizes.chunk_pages
    end = (run.kv_len + step.sizes.page_size - 1) // step.sizes.page_size

    def one(page: Any, _: Any) -> None:
        for which, (pool, buffer, _new) in enumerate(step.pools):
            target = pool.at[step.table_ref[run.last, page]]
            source, sem = buffer.at[slot, page - first], step.store_sems.at[which]
            act(pltpu.make_async_copy(source, target, sem))

    lower = jnp.maximum(run.start // step.sizes.page_size, first)
    lax.fori_loop(lower, jnp.minimum(end, first + step.sizes.chunk_pages), one, None)


def _attend_chunk(step: Step, run: Run, chunk: Any, slot: Any) -> None:
    """Adds a chunk of keys: to all queries of the step if the run has all, else by blocks."""
    sizes, num_rows = step.sizes, step.q_ref.shape[-2]
    if sizes.step_blocks == 1:
        _attend_tokens(step, run, chunk, slot, slice(0, num_rows))
        return
    is_whole = run.last - run.first + 1 == sizes.step_blocks

    @pl.when(is_whole)
    def _() -> None:
        _attend_tokens(step, run, chunk, slot, slice(0, num_rows))

    def one_block(index: Any) -> None:
        block = run.first + index
        start, kv_len = step.starts_ref[block], step.lens_ref[block]
        is_seen = chunk * sizes.chunk_tokens < kv_len
        is_seen &= chunk >= step.first_page(start) // sizes.chunk_pages
        tokens = pl.ds(step.tokens_before(block), sizes.num_queries)
        part = run._replace(start=start, kv_len=kv_len)
        pl.when(is_seen)(lambda: _attend_tokens(step, part, chunk, slot, tokens))

    pl.when(~is_whole)(lambda: _repeat(run.last - run.first + 1, one_block))


def _attend_tokens(step: Step, run: Run, chunk: Any, slot: Any, tokens: Any) -> None:
    """Adds a chunk of keys to the running softmax of queries from position `run.start` on."""
    (_, k_chunks, _), (_, v_chunks, _) = step.pools
    first_token = chunk * step.sizes.chunk_tokens
    has_first = step.scores.sliding_window is not None or step.begins_ref is not None
    exists = run.page * step.sizes.page_size if has_first else None, run.kv_len
    num_heads, num_groups, *_ = step.state[2].shape
    for head in range(num_heads):
        places = [step.place_of(head, group, tokens) for group in range(num_groups)]
        parts = [step.q_ref[place] for place in places]
        rows = num_groups, parts[0].shape[0]
        q = jnp.concatenate(parts, axis=0) if num_groups > 1 else parts[0]
        k, v = (x[slot, :, head].reshape(-1, q.shape[-1]) for x in (k_chunks, v_chunks))
        max_ref, sum_ref, acc_ref = (ref.at[head, :, tokens] for ref in step.state)
        # A row is a query; of a block of one token, all rows are at its position.
        position = jnp.full((*rows, k.shape[0]), run.start, jnp.int32)
        if step.sizes.num_queries > 1:
            position += lax.broadcasted_iota(jnp.int32, position.shape, 1)
        old = max_ref[...].reshape(-1, LANES)[:, :1], sum_ref[...].reshape(-1, LANES)[:, :1]
        new_max, new_sum, kept, change = softmax_part(
            q, k, v, old, position.reshape(-1, k.shape[0]), first_token, exists, step.scores
        )
        acc = kept * acc_ref[...].reshape(q.shape) + change
        acc_ref[...] = acc.reshape(acc_ref.shape)
        max_ref[...] = jnp.broadcast_to(new_max, (q.shape[0], LANES)).reshape(max_ref.shape)
        sum_ref[...] = jnp.broadcast_to(new_sum, (q.shape[0], LANES)).reshape(sum_ref.shape)
