"""Attention over the paged KV cache, and writing to it, as JIT-compiled CPU kernels.

A token has the same bits in decode, where each block has one query, and in prefill.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from sgljax_cpu.attention_tile import (
    SPAN,
    Attention,
    AttentionShape,
    Pages,
    Queries,
    Softmax,
)
from sgljax_cpu.emit import F32, I32, I64, PTR, VOID, Code, Module, Number, Value, f32, vector
from sgljax_cpu.machine import Vectors
from sgljax_cpu.numbers import STORED, store_float
from sgljax_cpu.operation import Operation, Plan, Shapes, read_values
from sgljax_cpu.primitive import run, run_one

_QUERY_ROWS = 8
"""Query heads times queries in a tile, at least one query."""

_RUN_ROWS = 8
"""Query heads times rows of a decode batch whose shared keys are read together, see `_Kernel`."""

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
) -> jax.Array:
    """Causal attention of blocks of queries, each block of one request, inside a program.

    Args:
        q: [N * Q, num_heads, head_dim] float32, blocks one after another.
        k_pages: [num_pages, num_kv_heads, page_size, head_dim] of the shape's dtype, the blocks'
            own keys included.
        v_pages: Likewise.
        page_table: [N, P] int32.
        positions: [N, Q] int32.
        kv_lens: [N] int32, keys that exist; 0 for unused blocks.
        shape: The shape that the kernel is compiled for.
        sinks: [num_heads] float32, for each head the score of a key without a value that every
            query sees; None without.

    Returns:
        [N * Q, num_heads, head_dim] float32, 0 for unused blocks.
    """
    assert q.dtype == jnp.float32, q.dtype
    per_tile = min(max(_QUERY_ROWS // shape.group, 1), positions.shape[1])
    arrays = [q, k_pages, v_pages, page_table, positions, kv_lens]
    arrays += [] if sinks is None else [sinks]
    operation = _attention(shape, per_tile, sinks is not None)
    return run_one(operation, arrays, jax.ShapeDtypeStruct(q.shape, jnp.float32))


def write_kv(
    k: jax.Array, v: jax.Array, k_pages: jax.Array, v_pages: jax.Array, slots: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Writes tokens' keys and values to slots of pages, in place, inside a program.

    Args:
        k: [T, num_kv_heads, head_dim] float32.
        v: Likewise.
        k_pages: As for `paged_attention`.
        v_pages: Likewise.
        slots: [T] int32, page * page_size + offset; those beyond the pool are dropped.

    Returns:
        The pages.
    """
    assert k.dtype == v.dtype == jnp.float32, k.dtype
    pages = jax.ShapeDtypeStruct(k_pages.shape, k_pages.dtype)
    operation = _write_operation(k_pages.dtype.name)
    new_k, new_v = run(operation, [k, v, k_pages, v_pages, slots], [pages, pages])
    return new_k, new_v


# ---------------------------------------------------------------------- writing


@functools.cache
def _write_operation(dtype: str) -> Operation:
    write = functools.partial(_write_tokens, dtype=dtype)
    return Operation("write_kv", write, _plan_write, in_place=((2, 0), (3, 1)))


def _plan_write(arguments: Shapes, results: Shapes, threads: int) -> Plan:
    del results, threads
    num_tokens, num_heads, head_dim = arguments[0].shape
    num_pages, _, page_size, _ = arguments[2].shape
    sizes = (num_tokens, num_heads, head_dim, page_size, num_pages * page_size)
    return Plan(-(-num_tokens // _WRITE_CHUNK), sizes)


def _write_tokens(module: Module, vectors: Vectors, *, dtype: str) -> Value:
    """Writes f(values, chunk): some tokens."""
    lanes = vectors.lanes
    with Code(module, "tokens", VOID, [PTR, I64]) as code:
        values, chunk = code.arguments
        arrays = read_values(code, values, 7, 5)
        k, v, k_pages, v_pages, slots = arrays[:5]
        num_tokens, num_heads, head_dim, page_size, num_slots = arrays[7:]
        first = code.mul(chunk, _WRITE_CHUNK)
        with code.loop(first, code.min(code.add(first, _WRITE_CHUNK), num_tokens)) as token:
            slot = code.load_int(slots, token)
            is_there = code.both(code.less(slot, num_slots), code.compare("sge", slot, 0))
            with code.when(is_there), code.loop(0, num_heads) as head:
                source = code.mul(code.add(code.mul(token, num_heads), head), head_dim)
                page = code.mul(code.div(slot, page_size), num_heads)
                row = code.mul(code.add(page, head), page_size)
                target = code.mul(code.add(row, code.rem(slot, page_size)), head_dim)
                for new, kept in ((k, k_pages), (v, v_pages)):
                    with code.loop(0, head_dim, lanes) as channel:
                        place = code.at(new, code.add(source, channel))
                        found = code.load(place, vector(lanes), 4)
                        to = code.at(kept, code.add(target, channel), STORED[dtype])
                        store_float(code, found, to, dtype)
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
    size = total * shape.num_kv_heads // (threads * _CHUNKS_PER_THREAD)
    size = max(min(size, _MAX_TILES), 1) if tiles == 1 else 1
    count = -(-total // size) * shape.num_kv_heads
    return Plan(count, (total, page_table.shape[1], num_queries, tiles, size))


def _write_chunk(
    module: Module, vectors: Vectors, *, shape: AttentionShape, per_tile: int, has_sinks: bool
) -> Value:
    """Writes f(values, chunk): some tiles of one kv head."""
    kernel = _Kernel(module, vectors.lanes, shape, has_sinks)
    num_rows = max(_RUN_ROWS // shape.group, 1) if per_tile == 1 else 1
    one_tile = kernel.write_tile(per_tile)
    if num_rows > 1:
        of_run, num_shared = kernel.write_run(num_rows), kernel.write_num_shared(num_rows)
    with Code(module, "tiles", VOID, [PTR, I64]) as code:
        values, chunk = code.arguments
        *_, total, _, _, _, size = kernel.read(code, values)
        state = kernel.softmax(code, max(num_rows, per_tile))
        # Neighbouring rows, which may share keys, come one after another.
        per_head = code.ceil_div(total, size)
        head, first = code.div(chunk, per_head), code.mul(code.rem(chunk, per_head), size)
        last = code.min(code.add(first, size), total)
        tile = code.variable(first)
        with code.repeat(lambda: code.less(tile.get(), last)):
            count, shared = code.variable(1), code.variable(0)
            if num_rows > 1:
                is_run = code.less(code.add(tile.get(), num_rows - 1), last)
                with code.when(is_run):
                    shared.set(code.call(num_shared, I64, [values, tile.get()]))
                    with code.when(code.less(0, shared.get())):
                        code.call(
                            of_run, VOID, [values, tile.get(), head, state.base, shared.get()]
                        )
                        count.set(Value(I64, str(num_rows)))
            with code.loop(0, count.get()) as i:
                place = code.at(state.base, code.mul(i, shape.group * state.size))
                code.call(
                    one_tile,
                    VOID,
                    [values, code.add(tile.get(), i), head, place, shared.get()],
                )
            tile.set(code.add(tile.get(), count.get()))
    return code.function


class _Kernel(NamedTuple):
    """The functions of a kernel of attention.

    Neighbouring rows of a decode batch may begin with the same pages: samples of one prompt do. The
    keys of these are read once for some rows together, span by span; then each row goes on alone.
    """

    module: Module
    lanes: int
    shape: AttentionShape
    has_sinks: bool

    def read(self, code: Code, values: Value) -> list[Value]:
        """The addresses of arguments and results, and sizes; of sinks at the end, if any."""
        return read_values(code, values, 7 + self.has_sinks, 5)

    def softmax(self, code: Code, num_queries: int) -> Softmax:
        """Memory for the heads of some queries."""
        shape = self.shape
        size = Softmax(code, Value(PTR, "null"), shape.head_dim, self.lanes).size
        place = code.stack(f"[{num_queries * shape.group * size} x float]")
        return Softmax(code, place, shape.head_dim, self.lanes)

    def sinks(self, code: Code, arrays: list[Value], head: Value, count: int) -> list[Value]:
        """Those of a kv head's queries, of `count` tokens."""
        own = code.mul(head, self.shape.group)
        found = [
            code.load(code.at(each, code.add(own, i)), F32)
            for each in (arrays[6:7] if self.has_sinks else ())
            for i in range(self.shape.group)
        ]
        return found * count

    def queries(
        self, code: Code, arrays: list[Value], places: list[Value], ends: list[Value]
    ) -> Queries:
        """Scaled copies of queries at places."""
        channels, shape = self.shape.group * self.shape.head_dim, self.shape
        copies = code.stack(f"[{len(places) * channels} x float]")
        for i, place in enumerate(places):
            target = code.at(copies, i * channels)
            _copy(code, code.at(arrays[0], place), target, channels, self.lanes, shape.scale)
        last, first = functools.reduce(code.max, ends), functools.reduce(code.min, ends)
        return Queries(copies, [end for end in ends for _ in range(shape.group)], last, first)

    def place(self, code: Code, token: Value, head: Value) -> Value:
        """Where the queries of a token are, and their results."""
        row = code.add(code.mul(token, self.shape.num_kv_heads), head)
        return code.mul(row, self.shape.group * self.shape.head_dim)

    def end(self, code: Code, arrays: list[Value], token: Value, num_keys: Value) -> Value:
        """The first key past those that a token sees."""
        return code.min(code.add(code.load_int(arrays[4], token), 1), num_keys)

    def pages(
        self, code: Code, arrays: list[Value], block: Value, head: Value, num_keys: Value
    ) -> Pages:
        """Those of a block."""
        width = arrays[-4]
        table = code.at(arrays[3], code.mul(block, width), I32)
        return Pages(code, self.shape, table, head, num_keys)

    def write_tile(self, per_tile: int) -> Value:
        """Writes f(values, tile, kv_head, softmax, begin): some queries of a block.

        Their softmax has the keys up to `begin` already, a multiple of `SPAN`.
        """
        lanes, shape = self.lanes, self.shape
        with Code(self.module, "tile", VOID, [PTR, I64, I64, PTR, I64]) as code:
            values, tile, head, state, begin = code.arguments
            arrays = self.read(code, values)
            out = arrays[6 + self.has_sinks]
            _, _, num_queries, tiles, _ = arrays[-5:]
            block, first = code.div(tile, tiles), code.mul(code.rem(tile, tiles), per_tile)
            num_keys = code.load_int(arrays[5], block)
            channels = shape.group * shape.head_dim
            tokens = []  # past the block's end its last token repeats
            for i in range(per_tile):
                query = code.min(code.add(first, i), code.sub(num_queries, 1))
                tokens.append(code.add(code.mul(block, num_queries), query))
            places = [self.place(code, token, head) for token in tokens]
            with code.when(code.less(num_keys, 1)):
                for place in places:
                    _copy(code, None, code.at(out, place), channels, lanes)
                code.ret()
            ends = [self.end(code, arrays, token, num_keys) for token in tokens]
            queries = self.queries(code, arrays, places, ends)
            softmax = Softmax(code, state, shape.head_dim, lanes)
            count = len(queries.ends)
            with code.when(code.equal(begin, 0)):
                softmax.start(count, self.sinks(code, arrays, head, per_tile))
            pages = self.pages(code, arrays, block, head, num_keys)
            attention = Attention(pages, arrays[1], arrays[2], queries, softmax)
            attention.add_keys(begin, queries.last_end)
            softmax.finish(count)
            for i, place in enumerate(places):
                for query in range(shape.group):
                    target = code.at(out, code.add(place, query * shape.head_dim))
                    found = softmax.sums(i * shape.group + query)
                    _copy(code, found, target, shape.head_dim, lanes)
        return code.function

    def write_run(self, num_rows: int) -> Value:
        """Writes f(values, block, kv_head, softmax, end): blocks of one query, up to a key.

        All of them have the pages of the first one up to that key, a multiple of `SPAN`.
        """
        lanes, shape = self.lanes, self.shape
        with Code(self.module, "run", VOID, [PTR, I64, I64, PTR, I64]) as code:
            values, block, head, state, end = code.arguments
            arrays = self.read(code, values)
            tokens = [code.add(block, i) for i in range(num_rows)]
            places = [self.place(code, token, head) for token in tokens]
            ends = [
                self.end(code, arrays, token, code.load_int(arrays[5], token)) for token in tokens
            ]
            queries = self.queries(code, arrays, places, ends)
            softmax = Softmax(code, state, shape.head_dim, lanes)
            softmax.start(len(queries.ends), self.sinks(code, arrays, head, num_rows))
            pages = self.pages(code, arrays, block, head, end)
            Attention(pages, arrays[1], arrays[2], queries, softmax).add_keys(Value(I64, "0"), end)
        return code.function

    def write_num_shared(self, num_rows: int) -> Value:
        """Writes f(values, block): the first keys that blocks share, a multiple of `SPAN`."""
        with Code(self.module, "num_shared", I64, [PTR, I64]) as code:
            values, block = code.arguments
            arrays = self.read(code, values)
            table, width, size = arrays[3], arrays[-4], self.shape.page_size
            lengths = [code.load_int(arrays[5], code.add(block, i)) for i in range(num_rows)]
            num_keys = functools.reduce(code.min, lengths)
            rows = [
                code.at(table, code.mul(code.add(block, i), width), I32) for i in range(num_rows)
            ]
            with code.loop(0, code.div(num_keys, size)) as page:
                first = code.load(code.at(rows[0], page, I32), I32)
                differing = [
                    code.differ(first, code.load(code.at(row, page, I32), I32)) for row in rows[1:]
                ]
                with code.when(code.compare("ne", functools.reduce(code.either, differing), _ZERO)):
                    code.ret(_whole_spans(code, code.mul(page, size)))
            code.ret(_whole_spans(code, num_keys))
        return code.function


_ZERO = Value(I32, "0")


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
