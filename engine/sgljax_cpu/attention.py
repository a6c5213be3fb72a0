"""Attention over the paged KV cache, and writing to it, as JIT-compiled CPU kernels.

A token has the same bits in decode, where each block has one query, and in prefill.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from sgljax_cpu.attention_tile import Attention, AttentionShape, Pages, Queries
from sgljax_cpu.emit import F32, I8, I32, I64, PTR, VOID, Code, Module, Value, f32, vector
from sgljax_cpu.machine import Vectors
from sgljax_cpu.numbers import STORED, store_float
from sgljax_cpu.operation import Operation, Plan, Shapes, read_values
from sgljax_cpu.primitive import run, run_one

_QUERY_ROWS = 8
"""Query heads times queries in a tile, at least one query."""

_MAX_TILES = 16
"""Tiles of a chunk: of neighbouring rows of a decode batch, which may share a prompt."""

_CHUNKS_PER_THREAD = 32
"""Chunks of a thread, if there are so many tiles: it may have to wait for another one's last."""

_WRITE_CHUNK = 16
"""Tokens of a chunk when keys are written."""


def paged_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: jax.Array,
    positions: jax.Array,
    kv_lens: jax.Array,
    shape: AttentionShape,
    sinks: jax.Array | None = None,
    scales: tuple[jax.Array, jax.Array] | None = None,
) -> jax.Array:
    """Causal attention of blocks of queries, each block of one request, inside a program.

    Args:
        q: [N * Q, num_heads, head_dim] float32, blocks one after another.
        k_pages: [num_pages, num_kv_heads, page_size, head_dim] of the shape's dtype, the blocks'
            own keys included.
        v_pages: Likewise; the same array where keys are values too.
        page_table: [N, P] int32.
        positions: [N, Q] int32.
        kv_lens: [N] int32, keys that exist; 0 for unused blocks.
        shape: The shape that the kernel is compiled for.
        sinks: [num_heads] float32, for each head the score of a key without a value that every
            query sees; None without.
        scales: [num_pages, num_kv_heads, page_size] float32, by which keys and values of int8 are
            multiplied; those of values are finite where keys exist. None for other dtypes.

    Returns:
        [N * Q, num_heads, head_dim] float32, 0 for unused blocks.
    """
    assert q.dtype == jnp.float32, q.dtype
    assert shape.has_scales == (scales is not None), shape
    per_tile = min(max(_QUERY_ROWS // shape.tile_heads, 1), positions.shape[1])
    arrays = [q, k_pages, v_pages, page_table, positions, kv_lens]
    arrays += [*([] if sinks is None else [sinks]), *(scales or ())]
    operation = _attention(shape, per_tile, sinks is not None)
    return run_one(operation, arrays, jax.ShapeDtypeStruct(q.shape, jnp.float32))


def write_kv(
    new: Sequence[jax.Array], pages: Sequence[jax.Array], slots: jax.Array
) -> tuple[jax.Array, ...]:
    """Writes tokens' keys and values, or keys alone, to slots of pages; in place, in a program.

    Args:
        new: Keys [T, num_kv_heads, head_dim] float32, and values; for pages of int8, both of int8,
            and scales [T, num_kv_heads] of each.
        pages: As for `paged_attention`, of each.
        slots: [T] int32, page * page_size + offset; those beyond the pool are dropped.

    Returns:
        The pages.
    """
    stored = tuple(
        _Stored(x.dtype.name, kept.dtype.name, x.ndim == 2)
        for x, kept in zip(new, pages, strict=True)
    )
    assert all(each.is_copied or each.given == "float32" for each in stored), stored
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in pages]
    operation = _write_operation(stored)
    return tuple(run(operation, [*new, *pages, slots], shapes))


# ---------------------------------------------------------------------- writing


class _Stored(NamedTuple):
    """An array whose tokens are written: dtypes before and after, and whether it is of scales."""

    given: str
    kept: str
    is_scale: bool

    @property
    def is_copied(self) -> bool:
        return self.given == self.kept

    def write(self, code: Code, new: Value, kept: Value, count: Value, lanes: int) -> None:
        """Emits the writing of a head, from one address to another."""
        if self.is_scale:
            code.store(code.load(new, F32), kept)
            return
        with code.loop(0, count, lanes) as channel:
            place, to = (
                code.at(base, channel, STORED[dtype])
                for base, dtype in ((new, self.given), (kept, self.kept))
            )
            if self.kept == "int8":
                code.store(code.load(place, vector(lanes, I8), 1), to, 1)
            else:
                store_float(code, code.load(place, vector(lanes), 4), to, self.kept)


@functools.cache
def _write_operation(stored: tuple[_Stored, ...]) -> Operation:
    count = len(stored)
    in_place = tuple((count + i, i) for i in range(count))
    write = functools.partial(_write_tokens, stored=stored)
    return Operation("write_kv", write, _plan_write, in_place=in_place)


def _plan_write(arguments: Shapes, results: Shapes, threads: int) -> Plan:
    del threads
    num_tokens, num_heads, head_dim = arguments[0].shape
    num_pages, _, page_size, _ = results[0].shape
    sizes = (num_tokens, num_heads, head_dim, page_size, num_pages * page_size)
    return Plan(-(-num_tokens // _WRITE_CHUNK), sizes)


def _write_tokens(module: Module, vectors: Vectors, *, stored: Sequence[_Stored]) -> Value:
    """Writes f(values, chunk): some tokens."""
    count = len(stored)
    with Code(module, "tokens", VOID, [PTR, I64]) as code:
        values, chunk = code.arguments
        arrays = read_values(code, values, 3 * count + 1, 5)
        pairs, slots = list(zip(arrays[:count], arrays[count:], strict=False)), arrays[2 * count]
        num_tokens, num_heads, head_dim, page_size, num_slots = arrays[3 * count + 1 :]
        first = code.mul(chunk, _WRITE_CHUNK)
        with code.loop(first, code.min(code.add(first, _WRITE_CHUNK), num_tokens)) as token:
            slot = code.load_int(slots, token)
            is_there = code.both(code.less(slot, num_slots), code.compare("sge", slot, 0))
            with code.when(is_there), code.loop(0, num_heads) as head:
                source = code.add(code.mul(token, num_heads), head)
                page = code.mul(code.div(slot, page_size), num_heads)
                row = code.mul(code.add(page, head), page_size)
                target = code.add(row, code.rem(slot, page_size))
                for each, (new, kept) in zip(stored, pairs, strict=True):
                    width = Value(I64, "1") if each.is_scale else head_dim
                    place = code.at(new, code.mul(source, width), STORED[each.given])
                    to = code.at(kept, code.mul(target, width), STORED[each.kept])
                    each.write(code, place, to, head_dim, vectors.lanes)
    return code.function


# ---------------------------------------------------------------------- attention


@functools.cache
def _attention(shape: AttentionShape, per_tile: int, has_sinks: bool) -> Operation:
    return Operation(
        "attention",
        functools.partial(_write_chunk, shape=shape, per_tile=per_tile, has_sinks=has_sinks),
        functools.partial(_plan, shape=shape, per_tile=per_tile),
    )


def _plan(
    arguments: Shapes, results: Shapes, threads: int, *, shape: AttentionShape, per_tile: int
) -> Plan:
    del results
    page_table, positions = arguments[3:5]
    num_blocks, num_queries = positions.shape
    tiles = -(-num_queries // per_tile)
    total = num_blocks * tiles
    size = total * shape.num_parts // (threads * _CHUNKS_PER_THREAD)
    size = max(min(size, _MAX_TILES), 1) if tiles == 1 else 1
    count = -(-total // size) * shape.num_parts
    return Plan(count, (total, page_table.shape[1], num_queries, tiles, size))


def _write_chunk(
    module: Module, vectors: Vectors, *, shape: AttentionShape, per_tile: int, has_sinks: bool
) -> Value:
    """Writes f(values, chunk): some tiles of one part of the heads."""
    one_tile = _write_tile(module, vectors.lanes, shape, per_tile, has_sinks)
    with Code(module, "tiles", VOID, [PTR, I64]) as code:
        values, chunk = code.arguments
        num_arrays = 7 + has_sinks + shape.num_scales
        *_, total, _, _, _, size = read_values(code, values, num_arrays, 5)
        # Neighbouring rows, which may share keys, come one after another.
        per_head = code.ceil_div(total, size)
        part, first = code.div(chunk, per_head), code.mul(code.rem(chunk, per_head), size)
        with code.loop(first, code.min(code.add(first, size), total)) as tile:
            code.call(one_tile, VOID, [values, tile, part])
    return code.function


def _write_tile(
    module: Module, lanes: int, shape: AttentionShape, per_tile: int, has_sinks: bool
) -> Value:
    """Writes f(values, tile, part): some queries of a block, and a part of their heads."""
    with Code(module, "tile", VOID, [PTR, I64, I64]) as code:
        values, tile, part = code.arguments
        num_others = 1 + has_sinks + shape.num_scales
        q, k_pages, v_pages, table, positions, kv_lens, *others = read_values(
            code, values, 6 + num_others, 5
        )
        sinks, scales = others[:has_sinks], others[has_sinks : num_others - 1]
        out, sizes = others[num_others - 1], others[num_others:]
        _, width, num_queries, tiles, _ = sizes
        block, begin = code.div(tile, tiles), code.mul(code.rem(tile, tiles), per_tile)
        num_keys = code.load_int(kv_lens, block)
        channels = shape.tile_heads * shape.head_dim
        tokens, places = [], []  # past the block's end its last token repeats
        for i in range(per_tile):
            query = code.min(code.add(begin, i), code.sub(num_queries, 1))
            tokens.append(code.add(code.mul(block, num_queries), query))
            row = code.add(code.mul(tokens[i], shape.num_parts), part)
            places.append(code.mul(row, channels))
        with code.when(code.less(num_keys, 1)):
            for place in places:
                _copy(code, None, code.at(out, place), channels, lanes)
            code.ret()
        queries = code.stack(f"[{per_tile * channels} x float]")
        ends = []
        for i, (token, place) in enumerate(zip(tokens, places, strict=True)):
            target = code.at(queries, i * channels)
            _copy(code, code.at(q, place), target, channels, lanes, shape.scale)
            ends.append(code.min(code.add(code.load_int(positions, token), 1), num_keys))
        tiles_of_head = shape.group // shape.tile_heads
        head = part if tiles_of_head == 1 else code.div(part, tiles_of_head)
        own_table = code.at(table, code.mul(block, width), I32)
        pages = Pages(code, shape, own_table, head, num_keys, scales)
        last, first = functools.reduce(code.max, ends), functools.reduce(code.min, ends)
        of_rows = [end for end in ends for _ in range(shape.tile_heads)]
        own = code.mul(part, shape.tile_heads)
        of_heads = [
            code.load(code.at(each, code.add(own, i)), F32)
            for each in sinks
            for i in range(shape.tile_heads)
        ]
        tile_queries = Queries(queries, of_rows, last, first, of_heads * per_tile)
        found = Attention(code, lanes, pages, k_pages, v_pages, tile_queries).write()
        for i, place in enumerate(places):
            _copy(code, code.at(found, i * channels), code.at(out, place), channels, lanes)
    return code.function


def _copy(
    code: Code, source: Value | None, target: Value, count: int, lanes: int, factor: float = 1.0
) -> None:
    """Copies floats, times a factor; zeros without a source. `count` is a multiple of `lanes`."""
    with code.loop(0, count, lanes) as index:
        value = code.zeros(lanes)
        if source is not None:
            value = code.load(code.at(source, index), vector(lanes), 4)
        if source is not None and factor != 1.0:
            value = code.float_op("fmul", value, code.splat(f32(factor), lanes))
        code.store(value, code.at(target, index), 4)
