"""Host arrays for one dispatch, padded to bucket sizes.

Every array is built anew for its dispatch and never written to afterwards: JAX on CPU may read an
aligned numpy array in place instead of copying it.

The batch types are annotated with `jax.Array`, as inside a program; on the host their leaves are
numpy arrays of the same shapes and dtypes.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from sgljax_engine.kernels.runs import MIN_SHARED_KEYS
from sgljax_engine.runner.batches.page_ids import NO_SLOT, window_slots, window_table
from sgljax_engine.types import NO_ADAPTER, PrefillChunk, Request


class ForwardBatch(NamedTuple):
    """Ragged tokens of several requests, in blocks of `T // N` tokens of one request.

    Shape: input_ids, positions: [T] int32; padding is 0. slot_mapping: [T] int32, slot of each
        token's K and V; `NO_SLOT` for padding. page_table: [N, P] int32, the pages of each block's
        request. seq_lens: [N] int32, keys that each block may see, itself included; 0 for unused
        blocks. adapters: [N] int32, the adapter slot of each block's request, -1 for none; None for
        an engine without adapters. window_slots, window_table: The same as slot_mapping and
        page_table for window pages, see `cache.window`; None without. Entries of pages without one
        are negative. state_slots: [N] int32, slot of the recurrent state of each block's request,
        see `cache.states`; `NO_SLOT` for unused blocks. None for models without such states.
    """

    input_ids: jax.Array
    positions: jax.Array
    slot_mapping: jax.Array
    page_table: jax.Array
    seq_lens: jax.Array
    adapters: jax.Array | None = None
    window_slots: jax.Array | None = None
    window_table: jax.Array | None = None
    state_slots: jax.Array | None = None


class DecodeBatch(NamedTuple):
    """Rows that decode together, one request each.

    Shape (all [B] unless said): input_ids: int32, each request's newest token. positions: int32,
        that token's position. page_table: [B, P] int32. step_limits: int32, tokens that the row may
        take; 0 for padding rows. ends_at_limit: bool, whether the row reaches its max_new_tokens at
        `step_limits`. adapters: int32, the adapter slot of each request, -1 for none; None for an
        engine without adapters. window_table, state_slots: See `ForwardBatch`.
    """

    input_ids: jax.Array
    positions: jax.Array
    page_table: jax.Array
    step_limits: jax.Array
    ends_at_limit: jax.Array
    adapters: jax.Array | None = None
    window_table: jax.Array | None = None
    state_slots: jax.Array | None = None


def pick_bucket(buckets: Sequence[int], size: int) -> int:
    """The smallest bucket that holds `size`. `buckets` ascend, and the last holds any size."""
    return buckets[bisect.bisect_left(buckets, size)]


def rows_above_smaller_bucket(buckets: Sequence[int], size: int) -> int:
    """Number of rows that must finish before the rest fits a smaller bucket; > `size` if none is.

    `buckets` ascend.
    """
    smaller = [bucket for bucket in buckets if bucket < size]
    return size - smaller[-1] if smaller else size + 1


def grow_buckets(first: int, factor: int, last: int) -> tuple[int, ...]:
    """`first` times powers of `factor` while below `last`, then `last`."""
    sizes = []
    while first < last:
        sizes.append(first)
        first *= factor
    return (*sizes, last)


def prefill_sizes(buckets: Sequence[int], per_pass: int | None) -> tuple[int, ...]:
    """Token counts that determine the time of a prefill, ascending: see `prefill_parts`."""
    sizes = [0]
    for bucket in buckets:
        step = _tokens_per_part(buckets, per_pass) if _has_passes(bucket, per_pass) else bucket
        last = sizes[-1]
        sizes += [size for size in range(step, bucket + 1, step) if size > last]
    return tuple(sizes[1:])


def prefill_parts(
    num_tokens: int, buckets: Sequence[int], per_pass: int | None
) -> list[tuple[int, int]]:
    """The programs that together prefill that many tokens: the tokens and bucket of each.

    A program of several passes gets whole passes. The smallest bucket's program takes the rest,
    repeatedly if needed, unless the rest fills a pass up to less than that bucket.
    """
    bucket, part = pick_bucket(buckets, num_tokens), _tokens_per_part(buckets, per_pass)
    if per_pass is None or not _has_passes(bucket, per_pass) or part == per_pass:
        return [(num_tokens, bucket)]
    left = num_tokens % per_pass
    if left > per_pass - part:
        left = 0
    whole = num_tokens - left
    parts = [(whole, pick_bucket(buckets, whole))] if whole else []
    return parts + [(min(left - done, part), part) for done in range(0, left, part)]


def _has_passes(bucket: int, per_pass: int | None) -> bool:
    return per_pass is not None and bucket % per_pass == 0


def _tokens_per_part(buckets: Sequence[int], per_pass: int | None) -> int:
    """The smallest bucket if a pass is a multiple of it, else a pass."""
    if per_pass is None or per_pass % buckets[0]:
        return per_pass or buckets[0]
    return buckets[0]


def build_prefill_batches(
    chunks: Sequence[PrefillChunk],
    *,
    buckets: Sequence[int],
    per_pass: int | None,
    block: int,
    page_size: int,
    table_width: int,
    has_adapters: bool = False,
    has_states: bool = False,
    windows: np.ndarray | None = None,
) -> list[ForwardBatch]:
    """Packs chunks block by block into one batch for each of `prefill_parts`, in order.

    `windows` has the window page of each page, or -1; see `cache.window`.
    """
    num_tokens = sum(-(-chunk.num_tokens // block) for chunk in chunks) * block
    packed = _pack(chunks, num_tokens, block, page_size, table_width, has_adapters, windows)
    if has_states:
        packed = packed._replace(state_slots=_state_slots(chunks, block))
    batches, start = [], 0
    for count, bucket in prefill_parts(num_tokens, buckets, per_pass):
        batches.append(_cut(packed, start, count, bucket, block))
        start += count
    return batches


def empty_prefill_batch(
    bucket: int,
    *,
    block: int,
    table_width: int,
    has_adapters: bool = False,
    has_states: bool = False,
    has_windows: bool = False,
) -> ForwardBatch:
    windows = np.zeros(1, np.int32) if has_windows else None
    packed = _pack([], 0, block, 1, table_width, has_adapters, windows)
    if has_states:
        packed = packed._replace(state_slots=_state_slots([], block))
    return _cut(packed, 0, 0, bucket, block)


def _state_slots(chunks: Sequence[PrefillChunk], block: int) -> Any:
    counts = [-(-chunk.num_tokens // block) for chunk in chunks]
    return np.repeat(np.array([chunk.request.state_slot for chunk in chunks], np.int32), counts)


def _pack(
    chunks: Sequence[PrefillChunk],
    size: int,
    block: int,
    page_size: int,
    table_width: int,
    has_adapters: bool,
    windows: np.ndarray | None,
) -> ForwardBatch:
    input_ids = np.zeros(size, np.int32)
    positions = np.zeros(size, np.int32)
    slot_mapping = np.full(size, NO_SLOT, np.int32)
    page_table = np.zeros((size // block, table_width), np.int32)
    seq_lens = np.zeros(size // block, np.int32)
    adapters = np.full(size // block, NO_ADAPTER, np.int32) if has_adapters else None
    token = row = 0
    for chunk in chunks:
        count = -(-chunk.num_tokens // block)
        request, end = chunk.request, chunk.start + chunk.num_tokens
        where = slice(token, token + chunk.num_tokens)
        input_ids[where] = request.tokens(chunk.start, end)
        at = np.arange(chunk.start, end, dtype=np.int32)
        positions[where] = at
        pages = np.asarray(chunk.pages, np.int32)
        slots = pages[at // page_size] * page_size + at % page_size
        slot_mapping[where] = np.where(at < chunk.num_shared, NO_SLOT, slots)
        page_table[row : row + count, : len(pages)] = pages
        ends = chunk.start + block * np.arange(1, count + 1)
        seq_lens[row : row + count] = np.minimum(ends, end)
        if adapters is not None:
            adapters[row : row + count] = request.adapter
        token += count * block
        row += count
    arrays: Any = (input_ids, positions, slot_mapping, page_table, seq_lens, adapters)
    if windows is not None:
        slots = window_slots(slot_mapping, windows, page_size)
        arrays = (*arrays, slots, window_table(page_table, windows))
    return ForwardBatch(*arrays)


def _cut(packed: ForwardBatch, start: int, count: int, bucket: int, block: int) -> ForwardBatch:
    def cut(x: jax.Array, unit: int, fill: int = 0) -> Any:
        out = np.full((bucket // unit, *x.shape[1:]), fill, np.int32)
        out[: count // unit] = x[start // unit : (start + count) // unit]
        return out

    return ForwardBatch(
        input_ids=cut(packed.input_ids, 1),
        positions=cut(packed.positions, 1),
        slot_mapping=cut(packed.slot_mapping, 1, NO_SLOT),
        page_table=cut(packed.page_table, block),
        seq_lens=cut(packed.seq_lens, block),
        adapters=None if packed.adapters is None else cut(packed.adapters, block, NO_ADAPTER),
        window_slots=None if packed.window_slots is None else cut(packed.window_slots, 1, NO_SLOT),
        window_table=None if packed.window_table is None else cut(packed.window_table, block),
        state_slots=None if packed.state_slots is None else cut(packed.state_slots, block, NO_SLOT),
    )


def decode_order(requests: Sequence[Request], page_size: int) -> tuple[list[int], bool]:
    """The order in which requests become rows, and whether neighbours share first pages.

    Requests that share first pages of their prompts are neighbours, since attention reads what
    neighbours share once. They come first, the longest before shorter ones: threads that take rows
    in order then end together.
    """
    prefixes = [_prefix_of_prompt(request, page_size) for request in requests]
    sharing: dict[int, list[int]] = {}
    for index, prefix in enumerate(prefixes):
        sharing.setdefault(prefix[0] if prefix else -1, []).append(index)
    alone = sharing.pop(-1, [])
    groups = []
    for indices in sharing.values():
        if len(indices) > 1:
            groups.append(sorted(indices, key=lambda i: (prefixes[i], -requests[i].kv_len)))
        else:
            alone += indices
    groups.sort(key=lambda group: -max(requests[i].kv_len for i in group))
    alone.sort(key=lambda i: (-requests[i].kv_len, i))
    return [*itertools.chain.from_iterable(groups), *alone], bool(groups)


def _prefix_of_prompt(request: Request, page_size: int) -> list[int]:
    """Some pages of a prompt, the last whole one included; none if there is little to share.

    A page belongs to one prefix. So of requests whose lists begin alike, the pages before are alike
    too, and the lists need only pages at doubling distances.
    """
    # The last token of a prompt is the first decode step's input, so its page is not shared.
    num_shared = (len(request.prompt_ids) - 1) // page_size
    count, pages = -(-MIN_SHARED_KEYS // page_size), []
    while count <= num_shared:
        pages.append(request.pages[count - 1])
        count *= 2
    return [*pages, request.pages[num_shared - 1]] if pages else []


def build_decode_batch(
    requests: Sequence[Request],
    step_limits: Sequence[int],
    *,
    buckets: Sequence[int],
    table_width: int,
    has_adapters: bool = False,
    has_states: bool = False,
    windows: np.ndarray | None = None,
) -> DecodeBatch:
    """One row per request, padded to a batch bucket with rows that take no step."""
    size = pick_bucket(buckets, len(requests))
    input_ids = np.zeros(size, np.int32)
    positions = np.zeros(size, np.int32)
    page_table = np.zeros((size, table_width), np.int32)
    limits = np.zeros(size, np.int32)
    ends_at_limit = np.zeros(size, bool)
    used = slice(len(requests))
    input_ids[used] = [request.last_token for request in requests]
    positions[used] = [request.kv_len for request in requests]
    limits[used] = step_limits
    ends_at_limit[used] = limits[used] == [request.num_remaining for request in requests]
    for row, request in enumerate(requests):
        page_table[row, : len(request.pages)] = request.pages
    adapters = None
    if has_adapters:
        adapters = np.full(size, NO_ADAPTER, np.int32)
        adapters[used] = [request.adapter for request in requests]
    states = None
    if has_states:
        states = np.full(size, NO_SLOT, np.int32)
        states[used] = [request.state_slot for request in requests]
    table = None if windows is None else window_table(page_table, windows)
    arrays: Any = (
        input_ids,
        positions,
        page_table,
        limits,
        ends_at_limit,
        adapters,
        table,
        states,
    )
    return DecodeBatch(*arrays)
