"""Attention over the paged KV cache as JIT-compiled CPU kernels, in float32."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from sgljax_engine.kernels.cpu.attention_tile import Attention, AttentionShape, Pages, Queries
from sgljax_engine.kernels.cpu.emit import F32, I32, I64, PTR, VOID, Code, Module, Value, f32
from sgljax_engine.kernels.cpu.ffi import Buffer, Job, Operation, read_values, register
from sgljax_engine.kernels.cpu.machine import Vectors

_QUERY_ROWS = 8
"""Query heads times queries in a tile of prefill, at least one query."""

_ROWS_OF_A_LINE = 16
"""Rows of a decode batch whose results share cache lines."""

_CHUNKS_PER_THREAD = 4


def decode_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: jax.Array,
    kv_lens: jax.Array,
    shape: AttentionShape,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Writes the newest token's key and value of each row to its page, and attends.

    Args:
        q: [num_heads, head_dim, B] float32.
        k: [num_kv_heads, head_dim, B] float32.
        v: Likewise.
        k_pages: [num_pages, num_kv_heads, page_size, head_dim] float32; updated in place and
            returned.
        v_pages: Likewise.
        page_table: [B, P] int32. No two rows have their newest token in the same page.
        kv_lens: [B] int32, keys of each row, the new one included; 0 for unused rows, which write
            nothing.
        shape: The shape that the kernel is compiled for.

    Returns:
        [num_heads * head_dim, B], 0 for unused rows, and the pages.
    """
    out = jax.ShapeDtypeStruct((shape.num_heads * shape.head_dim, q.shape[2]), jnp.float32)
    pages = jax.ShapeDtypeStruct(k_pages.shape, k_pages.dtype)
    call = jax.ffi.ffi_call(
        register(_decode(shape)), (out, pages, pages), input_output_aliases={3: 1, 4: 2}
    )
    found, k_pages, v_pages = call(q, k, v, k_pages, v_pages, page_table, kv_lens)
    return found, k_pages, v_pages


def block_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: jax.Array,
    positions: jax.Array,
    kv_lens: jax.Array,
    shape: AttentionShape,
) -> jax.Array:
    """Causal attention of blocks of queries, each block of one request.

    Args:
        q: [num_heads, head_dim, N * Q] float32, blocks one after another.
        k_pages: [num_pages, num_kv_heads, page_size, head_dim] float32, the blocks' own keys
            included.
        v_pages: Likewise.
        page_table: [N, P] int32.
        positions: [N, Q] int32.
        kv_lens: [N] int32, keys that exist; 0 for unused blocks.
        shape: The shape that the kernel is compiled for.

    Returns:
        [num_heads * head_dim, N * Q], 0 for unused blocks.
    """
    out = jax.ShapeDtypeStruct((shape.num_heads * shape.head_dim, q.shape[2]), jnp.float32)
    call = jax.ffi.ffi_call(register(_blocks(shape)), out)
    return call(q, k_pages, v_pages, page_table, positions, kv_lens)


@functools.cache
def _decode(shape: AttentionShape) -> Operation:
    return Operation(
        "decode_attention",
        7,
        3,
        functools.partial(_write_decode_chunk, shape=shape),
        functools.partial(_plan_decode, shape=shape),
    )


@functools.cache
def _blocks(shape: AttentionShape) -> Operation:
    return Operation(
        "block_attention",
        6,
        1,
        functools.partial(_write_block_chunk, shape=shape),
        functools.partial(_plan_blocks, shape=shape),
    )


# ---------------------------------------------------------------------- decode


def _plan_decode(
    code: Code, buffers: Sequence[Buffer], threads: Value, shape: AttentionShape
) -> Job:
    *_, page_table, kv_lens, out, _, _ = buffers
    num_rows, width = kv_lens.dim(0), page_table.dim(1)
    # One thread takes the rows of one prompt, and one takes each cache line of the result.
    pairs = code.mul(num_rows, shape.num_kv_heads)
    size = code.div(pairs, code.mul(threads, _CHUNKS_PER_THREAD))
    size = code.max(code.min(size, _ROWS_OF_A_LINE), 1)
    count = code.mul(code.ceil_div(num_rows, size), shape.num_kv_heads)
    pointers = [buffer.data for buffer in (*buffers[:7], out)]
    return Job(count, [*pointers, num_rows, width, size])


def _write_decode_chunk(module: Module, vectors: Vectors, shape: AttentionShape) -> Value:
    """Writes f(values, chunk): some rows of one kv head."""
    one_row = _write_row(module, vectors.lanes, shape)
    with Code(module, "rows", VOID, [PTR, I64]) as code:
        values, chunk = code.arguments
        *_, num_rows, _, size = read_values(code, values, 8, 3)
        head = code.rem(chunk, shape.num_kv_heads)
        first = code.mul(code.div(chunk, shape.num_kv_heads), size)
        with code.loop(first, code.min(code.add(first, size), num_rows)) as row:
            code.call(one_row, VOID, [values, row, head])
    return code.function


def _write_row(module: Module, lanes: int, shape: AttentionShape) -> Value:
    """Writes f(values, row, kv_head): one row's query heads of a kv head."""
    with Code(module, "row", VOID, [PTR, I64, I64]) as code:
        values, row, head = code.arguments
        q, k, v, k_pages, v_pages, table, kv_lens, out, *sizes = read_values(code, values, 8, 3)
        num_rows, width, _ = sizes
        num_keys = _load_int(code, kv_lens, row)
        channels = shape.group * shape.head_dim
        first = code.add(code.mul(code.mul(head, channels), num_rows), row)
        result = code.at(out, first)
        with code.when(code.less(num_keys, 1)):
            _scatter_zeros(code, result, num_rows, channels)
            code.give()
        pages = Pages(code, shape, code.at(table, code.mul(row, width), I32), head, num_keys)

        source = code.add(code.mul(code.mul(head, shape.head_dim), num_rows), row)
        newest = code.sub(num_keys, 1)
        for new, kept in ((k, k_pages), (v, v_pages)):
            _gather(code, code.at(new, source), num_rows, pages.key(kept, newest), shape.head_dim)

        queries = code.stack(f"[{channels} x float]")
        _gather(code, code.at(q, first), num_rows, queries, channels, shape.scale)
        tile = Queries(queries, [num_keys] * shape.group, num_keys, num_keys)
        found = Attention(code, lanes, pages, k_pages, v_pages, tile).write()
        _scatter(code, found, result, num_rows, channels)
    return code.function


# ---------------------------------------------------------------------- blocks


def _plan_blocks(
    code: Code, buffers: Sequence[Buffer], threads: Value, shape: AttentionShape
) -> Job:
    page_table, positions = buffers[3:5]
    num_blocks, width, num_queries = positions.dim(0), page_table.dim(1), positions.dim(1)
    tiles = code.ceil_div(num_queries, _queries_of_a_tile(shape))
    count = code.mul(code.mul(num_blocks, tiles), shape.num_kv_heads)
    pointers = [buffer.data for buffer in buffers]
    return Job(count, [*pointers, code.mul(num_blocks, num_queries), width, num_queries, tiles])


def _queries_of_a_tile(shape: AttentionShape) -> int:
    return max(_QUERY_ROWS // shape.group, 1)


def _write_block_chunk(module: Module, vectors: Vectors, shape: AttentionShape) -> Value:
    """Writes f(values, chunk): some queries of a block, for one kv head."""
    per_tile = _queries_of_a_tile(shape)
    with Code(module, "block", VOID, [PTR, I64]) as code:
        values, chunk = code.arguments
        q, k_pages, v_pages, table, positions, kv_lens, out, *sizes = read_values(
            code, values, 7, 4
        )
        num_tokens, width, num_queries, tiles = sizes
        with code.when(code.less(num_tokens, 1)):
            code.give()
        head = code.rem(chunk, shape.num_kv_heads)
        tile = code.div(chunk, shape.num_kv_heads)
        block, begin = code.div(tile, tiles), code.mul(code.rem(tile, tiles), per_tile)
        num_keys = _load_int(code, kv_lens, block)
        channels = shape.group * shape.head_dim
        row = code.mul(code.mul(head, channels), num_tokens)
        tokens = []  # of the tile; past the block's end its last one repeats
        for i in range(per_tile):
            query = code.min(code.add(begin, i), code.sub(num_queries, 1))
            tokens.append(code.add(code.mul(block, num_queries), query))
        with code.when(code.less(num_keys, 1)):
            for token in tokens:
                _scatter_zeros(code, code.at(out, code.add(row, token)), num_tokens, channels)
            code.give()
        queries = code.stack(f"[{per_tile * channels} x float]")
        ends = []
        for i, token in enumerate(tokens):
            source, target = code.at(q, code.add(row, token)), code.at(queries, i * channels)
            _gather(code, source, num_tokens, target, channels, shape.scale)
            ends.append(code.min(code.add(_load_int(code, positions, token), 1), num_keys))
        pages = Pages(code, shape, code.at(table, code.mul(block, width), I32), head, num_keys)
        last, first = functools.reduce(code.max, ends), functools.reduce(code.min, ends)
        of_rows = [end for end in ends for _ in range(shape.group)]
        found = Attention(
            code, vectors.lanes, pages, k_pages, v_pages, Queries(queries, of_rows, last, first)
        ).write()
        for i, token in enumerate(tokens):
            result = code.at(out, code.add(row, token))
            _scatter(code, code.at(found, i * channels), result, num_tokens, channels)
    return code.function


# ---------------------------------------------------------------------- both


def _load_int(code: Code, base: Value, index: Value) -> Value:
    """Loads an int32 as an i64."""
    return code.convert("sext", code.load(code.at(base, index, I32), I32), I64)


def _gather(
    code: Code, source: Value, stride: Value, target: Value, count: int, factor: float = 1.0
) -> None:
    """Packs floats that lie a stride apart, times a factor."""
    with code.loop(0, count) as index:
        value = code.load(code.at(source, code.mul(index, stride)), F32)
        if factor != 1.0:
            value = code.float_op("fmul", value, f32(factor))
        code.store(value, code.at(target, index))


def _scatter(code: Code, source: Value, target: Value, stride: Value, count: int) -> None:
    """Stores adjacent floats a stride apart."""
    with code.loop(0, count) as index:
        value = code.load(code.at(source, index), F32)
        code.store(value, code.at(target, code.mul(index, stride)))


def _scatter_zeros(code: Code, target: Value, stride: Value, count: int) -> None:
    with code.loop(0, count) as index:
        code.store(f32(0.0), code.at(target, code.mul(index, stride)))
