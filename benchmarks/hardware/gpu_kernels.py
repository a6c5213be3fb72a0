"""Ceilings of a GPU and the speed of paged attention on it, kernel by kernel; see gpu.py.

A kernel is timed in a loop on the device, each of whose rounds uses the result of the one before.
The number of rounds is fixed, so that the host need not ask after each whether to go on. Each round
reads other pages: those of all rounds are more than the cache of the GPU holds. What a round takes
is what the engine sees in a step: launches count where kernels are too short to hide them.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sgljax_engine.attention.base import AttentionOptions, BlockTables
from sgljax_engine.cache.kv_pages import LayerKV

_ROUNDS = 32

Attend = Callable[[jax.Array, LayerKV, BlockTables, AttentionOptions], jax.Array]
"""`Attention.attend`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelSizes:
    """What is measured.

    Attributes:
        matmul: Rows and columns of the square product.
        copy_bytes: Of the buffer that is read and written.
        num_heads, num_kv_heads, head_dim, page_size: Of the attention.
        batches: Decode rows.
        contexts: Keys of a row.
        min_pool_bytes: Of keys and values together; what decode rounds go through in turn.
        prefill_tokens: New tokens of one request, at the end of each context.
        blocks: Query tokens of a prefill block.
        seconds: A measurement takes about so long.
    """

    matmul: int = 8192
    copy_bytes: int = 1 << 31
    num_heads: int = 16
    num_kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16
    batches: tuple[int, ...] = (1, 8, 64, 256)
    contexts: tuple[int, ...] = (512, 2048, 8192)
    min_pool_bytes: int = 1 << 30
    prefill_tokens: int = 2048
    blocks: tuple[int, ...] = (16, 32, 64, 128)
    seconds: float = 0.1

    @classmethod
    def smoke(cls) -> KernelSizes:
        """The same in miniature, for any device."""
        return cls(
            matmul=64,
            copy_bytes=1 << 16,
            num_heads=4,
            num_kv_heads=2,
            head_dim=16,
            batches=(2,),
            contexts=(32, 64),
            min_pool_bytes=1 << 12,
            prefill_tokens=32,
            blocks=(16,),
            seconds=1e-3,
        )


class Ceilings(NamedTuple):
    """What the GPU reached.

    Attributes:
        flops_per_s: Bfloat16 matrix product.
        bytes_per_s: Read and written, of a copy.
    """

    flops_per_s: float
    bytes_per_s: float


class KernelResult(NamedTuple):
    """One attention call.

    Attributes:
        phase: "decode" or "prefill".
        backend: Its name.
        batch: Rows (decode) or blocks (prefill).
        context: Keys of each row, or of the request.
        time_s: Seconds a call.
        limit_s: What the ceilings allow: reading each key and value once, or the products.
    """

    phase: str
    backend: str
    batch: int
    context: int
    time_s: float
    limit_s: float

    @property
    def fraction(self) -> float:
        """The share of the limit that was reached."""
        return self.limit_s / self.time_s


def seconds_per_round(run: Callable[[], object], seconds: float) -> float:
    """Times `run`, which does `_ROUNDS` rounds: the median of five batches of calls."""

    def timed(calls: int) -> float:
        start = time.perf_counter()
        # Only the last is waited for: the device never waits for the host.
        jax.block_until_ready([run() for _ in range(calls)][-1])
        return time.perf_counter() - start

    timed(1)
    calls = max(int(seconds / timed(1)), 1)
    return float(np.median([timed(calls) for _ in range(5)])) / (calls * _ROUNDS)


def measure_ceilings(sizes: KernelSizes) -> Ceilings:
    """The ceilings of the default device."""
    products = jax.jit(lambda x: lax.fori_loop(0, _ROUNDS, lambda _, y: lax.dot(y, x), x))
    copies = jax.jit(lambda x: lax.fori_loop(0, _ROUNDS, lambda _, y: y + 1, x))
    # Scaled so that its powers neither grow nor vanish: what is multiplied decides the clock rate.
    shape = (sizes.matmul, sizes.matmul)
    square = jax.random.normal(jax.random.key(0), shape, jnp.bfloat16) * sizes.matmul**-0.5
    buffer = jnp.zeros(sizes.copy_bytes // 4, jnp.int32)
    product_s = seconds_per_round(lambda: products(square), sizes.seconds)
    copy_s = seconds_per_round(lambda: copies(buffer), sizes.seconds)
    return Ceilings(2.0 * sizes.matmul**3 / product_s, 2.0 * buffer.nbytes / copy_s)


def make_pages(sizes: KernelSizes, num_tokens: int) -> LayerKV:
    """Random pages for so many tokens: a few different ones, repeated."""
    num_pages = -(-num_tokens // sizes.page_size)
    few = min(num_pages, 64)
    shape = (few, sizes.num_kv_heads, sizes.page_size, sizes.head_dim)

    def pages(seed: int) -> jax.Array:
        some = jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)
        return jnp.tile(some, (-(-num_pages // few), 1, 1, 1))[:num_pages]

    return LayerKV(pages(0), pages(1))


def attention_rounds(backend: Attend, options: AttentionOptions) -> Callable[..., Any]:
    """Jits `(q, layer, tables with a leading axis of sets) -> q`, a set a round."""

    @jax.jit
    def rounds_of(q: jax.Array, layer: LayerKV, sets: BlockTables) -> jax.Array:
        def body(i: jax.Array, q: jax.Array) -> jax.Array:
            tables = BlockTables(*(x[i % sets.page_table.shape[0]] for x in sets))
            # Values average towards zero; the next queries are the first ones but for a little.
            return q + backend(q, layer, tables, options) * jnp.asarray(1e-3, q.dtype)

        return lax.fori_loop(0, _ROUNDS, body, q)

    return rounds_of


def _tables(
    sizes: KernelSizes, num_sets: int, rows: int, context: int, positions: np.ndarray
) -> BlockTables:
    """Sets of tables for rows of `context` keys each, in pages that are anywhere in the pool."""
    width = -(-max(sizes.contexts) // sizes.page_size)
    used = -(-context // sizes.page_size)
    order = np.random.default_rng(0).permutation(num_sets * rows * used).astype(np.int32)
    table = np.zeros((num_sets, rows, width), np.int32)
    table[:, :, :used] = order.reshape(num_sets, rows, used)
    return BlockTables(
        page_table=jnp.asarray(table),
        positions=jnp.asarray(np.broadcast_to(positions, (num_sets, *positions.shape))),
        kv_lens=jnp.asarray(
            np.broadcast_to(positions.max(axis=1).astype(np.int32) + 1, (num_sets, rows))
        ),
    )


def measure_decode(
    backends: dict[str, Attend], sizes: KernelSizes, ceilings: Ceilings
) -> Iterator[KernelResult]:
    """Decode attention of every backend, batch and context."""
    options = AttentionOptions(sizes.head_dim**-0.5)
    token_bytes = 2 * 2 * sizes.num_kv_heads * sizes.head_dim
    most = max(sizes.batches) * max(sizes.contexts)
    num_tokens = max(most, -(-sizes.min_pool_bytes // token_bytes))
    layer = make_pages(sizes, num_tokens)
    for name, backend in backends.items():
        # One program a batch, whatever the contexts: as in the engine.
        run = attention_rounds(backend, options)
        for batch in sizes.batches:
            shape = (batch, 1, sizes.num_heads, sizes.head_dim)
            q = jax.random.normal(jax.random.key(2), shape, jnp.bfloat16)
            # The same number of sets for all contexts, or each would be compiled for.
            num_sets = min(max(num_tokens // (batch * max(sizes.contexts)), 1), _ROUNDS)
            for context in sizes.contexts:
                positions = np.full((batch, 1), context - 1, np.int32)
                tables = _tables(sizes, num_sets, batch, context, positions)
                call = functools.partial(run, q, layer, tables)
                time_s = seconds_per_round(call, sizes.seconds)
                limit_s = batch * context * token_bytes / ceilings.bytes_per_s
                yield KernelResult("decode", name, batch, context, time_s, limit_s)


def measure_prefill(
    backends: dict[str, Attend], sizes: KernelSizes, ceilings: Ceilings
) -> Iterator[KernelResult]:
    """Prefill attention of one request's newest tokens, for every backend and context."""
    options = AttentionOptions(sizes.head_dim**-0.5)
    layer = make_pages(sizes, max(sizes.contexts))
    for (name, backend), block in itertools.product(backends.items(), sizes.blocks):
        num_blocks = sizes.prefill_tokens // block
        run = attention_rounds(backend, options)
        shape = (num_blocks, block, sizes.num_heads, sizes.head_dim)
        q = jax.random.normal(jax.random.key(2), shape, jnp.bfloat16)
        for context in sizes.contexts:
            if context < sizes.prefill_tokens:
                continue
            at = context - sizes.prefill_tokens + np.arange(sizes.prefill_tokens, dtype=np.int32)
            tables = _tables(sizes, 1, 1, context, at[None])
            blocks = BlockTables(
                page_table=jnp.repeat(tables.page_table, num_blocks, axis=1),
                positions=jnp.asarray(at.reshape(1, num_blocks, block)),
                kv_lens=jnp.asarray(at.reshape(1, num_blocks, block)[:, :, -1] + 1),
            )
            call = functools.partial(run, q, layer, blocks)
            time_s = seconds_per_round(call, sizes.seconds)
            flops = 4.0 * sizes.head_dim * sizes.num_heads * float(np.sum(at + 1.0))
            limit_s = flops / ceilings.flops_per_s
            yield KernelResult("prefill", name, num_blocks, context, time_s, limit_s)
