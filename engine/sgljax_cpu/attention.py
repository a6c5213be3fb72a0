"""Attention over the paged KV cache, and writing to it, as JIT-compiled CPU kernels.

A token has the same bits in decode, where each block has one query, and in prefill.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from sgljax_cpu.attention_tile import (
    SPAN,
    Ahead,
    Attention,
    AttentionShape,
    Pages,
    Queries,
    Softmax,
)
from sgljax_cpu.emit import (
    F32,
    I1,
    I8,
    I32,
    I64,
    PTR,
    VOID,
    Code,
    Module,
    Number,
    Value,
    f32,
    vector,
)
from sgljax_cpu.machine import Vectors
from sgljax_cpu.numbers import STORED, store_float
from sgljax_cpu.operation import Operation, Plan, Shapes, read_values
from sgljax_cpu.primitive import run, run_one

_QUERY_ROWS = 8
"""Query heads times queries in a tile, at least one query."""

_RUN_QUERIES = 4
"""Query heads times rows of a decode batch in a tile of a run, at least one row; see `_Kernel`."""

_MAX_TILES = 16
"""Tiles of a chunk: of neighbouring rows of a decode batch, which may share a prompt."""

MAX_RUN_BYTES = 1 << 16
"""Bytes of the softmax of a run's rows, see `_Kernel`; 0 for no runs."""

_CHUNKS_PER_THREAD = 8
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
    operation = _attention(shape, per_tile, sinks is not None, MAX_RUN_BYTES)
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
def _attention(
    shape: AttentionShape, per_tile: int, has_sinks: bool, max_run_bytes: int
) -> Operation:
    return Operation(
        "attention",
        functools.partial(
            _write_chunk,
            shape=shape,
            per_tile=per_tile,
            has_sinks=has_sinks,
            max_run_bytes=max_run_bytes,
        ),
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
    module: Module,
    vectors: Vectors,
    *,
    shape: AttentionShape,
    per_tile: int,
    has_sinks: bool,
    max_run_bytes: int,
) -> Value:
    """Writes f(values, chunk): some tiles of one part of the heads."""
    kernel = _Kernel(module, vectors.lanes, shape, has_sinks)
    one_tile = kernel.write_tile(per_tile)
    most = min(max_run_bytes // (4 * kernel.row_size), _MAX_TILES) if per_tile == 1 else 1
    run = kernel.write_run() if most > 1 else None
    with Code(module, "tiles", VOID, [PTR, I64]) as code:
        values, chunk = code.arguments
        *_, total, _, _, _, size = kernel.read(code, values)
        state = code.stack(f"[{max(most, per_tile) * kernel.row_size} x float]")
        num_shared = code.stack(I64)
        # Neighbouring rows, which may share keys, come one after another.
        per_head = code.ceil_div(total, size)
        part, first = code.div(chunk, per_head), code.mul(code.rem(chunk, per_head), size)
        last = code.min(code.add(first, size), total)
        tile = code.variable(first)
        with code.repeat(lambda: code.less(tile.get(), last)):
            begin, end, shared = tile.get(), code.add(tile.get(), 1), Value(I64, "0")
            if run is not None:
                limit = code.min(code.add(begin, most), last)
                end = code.call(run, I64, [values, begin, limit, part, state, num_shared])
                shared = code.load(num_shared, I64)
            tile.set(end)
            with code.loop(begin, end) as row:
                place = code.at(state, code.mul(code.sub(row, begin), kernel.row_size))
                code.call(one_tile, VOID, [values, row, part, place, shared])
    return code.function


class _Kernel(NamedTuple):
    """The functions of a kernel of attention.

    Neighbouring rows of a decode batch may begin with the same pages: samples of one prompt do.
    They are a *run*, which takes the keys that all of its rows share span by span, so that each
    comes from memory once; then each row goes on alone.
    """

    module: Module
    lanes: int
    shape: AttentionShape
    has_sinks: bool

    @property
    def row_size(self) -> int:
        """Floats of the softmax of a row."""
        return self.shape.tile_heads * Softmax.size_of(self.shape.head_dim, self.lanes)

    def read(self, code: Code, values: Value) -> list[Value]:
        """The addresses of arguments and results, and sizes; sinks and scales come before `out`."""
        return read_values(code, values, 7 + self.has_sinks + self.shape.num_scales, 5)

    def sinks(self, code: Code, arrays: list[Value], part: Value, count: int) -> list[Value]:
        """Those of a part's queries, of `count` tokens."""
        own = code.mul(part, self.shape.tile_heads)
        found = [
            code.load(code.at(each, code.add(own, i)), F32)
            for each in (arrays[6:7] if self.has_sinks else ())
            for i in range(self.shape.tile_heads)
        ]
        return found * count

    def queries(
        self, code: Code, arrays: list[Value], places: list[Value], ends: list[Value]
    ) -> Queries:
        """Scaled copies of queries at places."""
        channels, shape = self.shape.tile_heads * self.shape.head_dim, self.shape
        copies = code.stack(f"[{len(places) * channels} x float]")
        for i, place in enumerate(places):
            target = code.at(copies, i * channels)
            _copy(code, code.at(arrays[0], place), target, channels, self.lanes, shape.scale)
        last, first = functools.reduce(code.max, ends), functools.reduce(code.min, ends)
        return Queries(copies, [end for end in ends for _ in range(shape.tile_heads)], last, first)

    def place(self, code: Code, token: Value, part: Value) -> Value:
        """Where the queries of a token are, and their results."""
        row = code.add(code.mul(token, self.shape.num_parts), part)
        return code.mul(row, self.shape.tile_heads * self.shape.head_dim)

    def end(self, code: Code, arrays: list[Value], token: Value, num_keys: Value) -> Value:
        """The first key past those that a token sees."""
        return code.min(code.add(code.load_int(arrays[4], token), 1), num_keys)

    def pages(
        self, code: Code, arrays: list[Value], block: Value, part: Value, num_keys: Value
    ) -> Pages:
        """Those of a block."""
        width, parts = arrays[-4], self.shape.group // self.shape.tile_heads
        head = part if parts == 1 else code.div(part, parts)
        table = code.at(arrays[3], code.mul(block, width), I32)
        scales = arrays[6 + self.has_sinks : -6]
        return Pages(code, self.shape, table, head, num_keys, scales)

    def write_tile(self, per_tile: int) -> Value:
        """Writes f(values, tile, part, softmax, begin): some queries of a block.

        Their softmax has the keys up to `begin` already, a multiple of `SPAN`.
        """
        lanes, shape = self.lanes, self.shape
        with Code(self.module, "tile", VOID, [PTR, I64, I64, PTR, I64]) as code:
            values, tile, part, state, begin = code.arguments
            arrays = self.read(code, values)
            out = arrays[-6]
            _, _, num_queries, tiles, _ = arrays[-5:]
            block, first = code.div(tile, tiles), code.mul(code.rem(tile, tiles), per_tile)
            num_keys = code.load_int(arrays[5], block)
            channels = shape.tile_heads * shape.head_dim
            tokens = []  # past the block's end its last token repeats
            for i in range(per_tile):
                query = code.min(code.add(first, i), code.sub(num_queries, 1))
                tokens.append(code.add(code.mul(block, num_queries), query))
            places = [self.place(code, token, part) for token in tokens]
            with code.when(code.less(num_keys, 1)):
                for place in places:
                    _copy(code, None, code.at(out, place), channels, lanes)
                code.ret()
            ends = [self.end(code, arrays, token, num_keys) for token in tokens]
            queries = self.queries(code, arrays, places, ends)
            softmax = Softmax(code, state, shape.head_dim, lanes)
            count = len(queries.ends)
            with code.when(code.equal(begin, 0)):
                softmax.start(count, self.sinks(code, arrays, part, per_tile))
            pages = self.pages(code, arrays, block, part, num_keys)
            attention = Attention(pages, arrays[1], arrays[2], queries, softmax)
            attention.add_keys(begin, queries.last_end)
            softmax.finish(count)
            for i, place in enumerate(places):
                for query in range(shape.tile_heads):
                    target = code.at(out, code.add(place, query * shape.head_dim))
                    found = softmax.sums(i * shape.tile_heads + query)
                    _copy(code, found, target, shape.head_dim, lanes)
        return code.function

    def write_run(self) -> Value:
        """Writes f(values, row, limit, part, softmax, place): the shared keys of a run.

        It returns the row behind the run that begins at a row and ends before a limit, and stores
        how many keys its rows share: whole spans, 0 if the row is alone.
        """
        at_once = max(_RUN_QUERIES // self.shape.tile_heads, 1)
        tiles = {count: self._write_tile_of_run(count) for count in {1, at_once}}
        num_shared = self._write_num_shared()
        with Code(self.module, "run", I64, [PTR, I64, I64, I64, PTR, PTR]) as code:
            values, first, limit, part, state, place = code.arguments
            after, found = code.variable(code.add(first, 1)), code.variable(0)
            with code.when(code.less(after.get(), limit)):
                found.set(code.call(num_shared, I64, [values, first]))
            shared = found.get()
            goes_on = code.variable(code.less(0, shared))
            with code.repeat(goes_on.get):
                after.set(code.add(after.get(), 1))
                goes_on.set(Value(I1, "false"))
                with code.when(code.less(after.get(), limit)):
                    more = code.call(num_shared, I64, [values, code.sub(after.get(), 1)])
                    goes_on.set(code.compare("sge", more, shared))
            code.store(shared, place)
            end = after.get()
            turns = code.ceil_div(code.sub(end, first), Value(I64, str(at_once)))

            def add(row: Value, count: int, key: Value) -> None:
                index = code.sub(row, first)
                own, turn = code.at(state, code.mul(index, self.row_size)), code.div(index, at_once)
                code.call(tiles[count], VOID, [values, row, part, own, key, shared, turn, turns])

            rest = code.sub(end, code.rem(code.sub(end, first), at_once))
            with code.loop(0, shared, SPAN) as key:
                with code.loop(first, rest, at_once) as row:
                    add(row, at_once, key)
                if at_once > 1:
                    with code.loop(rest, end) as row:
                        add(row, 1, key)
            code.ret(end)
        return code.function

    def _write_tile_of_run(self, num_rows: int) -> Value:
        """Writes f(values, row, part, softmax, key, shared, turn, turns): a span, for rows."""
        types = [PTR, I64, I64, PTR, I64, I64, I64, I64]
        with Code(self.module, f"rows{num_rows}", VOID, types) as code:
            values, row, part, state, key, shared, turn, turns = code.arguments
            arrays = self.read(code, values)
            tokens = [code.add(row, i) for i in range(num_rows)]
            places = [self.place(code, token, part) for token in tokens]
            ends = [
                self.end(code, arrays, token, code.load_int(arrays[5], token)) for token in tokens
            ]
            queries = self.queries(code, arrays, places, ends)
            softmax = Softmax(code, state, self.shape.head_dim, self.lanes)
            with code.when(code.equal(key, 0)):
                softmax.start(len(queries.ends), self.sinks(code, arrays, part, num_rows))
            pages = self.pages(code, arrays, row, part, shared)
            attention = Attention(pages, arrays[1], arrays[2], queries, softmax, Ahead(turn, turns))
            attention.add_keys(key, code.add(key, SPAN))
        return code.function

    def _write_num_shared(self) -> Value:
        """Writes f(values, row): the keys that a row and the next one share, in whole spans."""
        with Code(self.module, "num_shared", I64, [PTR, I64]) as code:
            values, row = code.arguments
            arrays = self.read(code, values)
            width, size = arrays[-4], self.shape.page_size
            following = code.add(row, 1)
            num_keys = code.min(code.load_int(arrays[5], row), code.load_int(arrays[5], following))
            here, there = (
                code.at(arrays[3], code.mul(each, width), I32) for each in (row, following)
            )
            with code.loop(0, code.div(num_keys, size)) as page:
                ids = [code.load(code.at(each, page, I32), I32) for each in (here, there)]
                with code.when(code.compare("ne", *ids)):
                    code.ret(_whole_spans(code, code.mul(page, size)))
            code.ret(_whole_spans(code, num_keys))
        return code.function


def _whole_spans(code: Code, num_keys: Number) -> Value:
    return code.mul(code.div(num_keys, SPAN), SPAN)


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
