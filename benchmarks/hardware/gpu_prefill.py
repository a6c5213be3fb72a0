"""Prefill attention with whole tiles of queries and without, on one GPU; see gpu_ladder.py.

A kernel is timed in a loop on the device, each of whose rounds uses the result of the one before.
The number of rounds is fixed, so that the host need not ask after each whether to go on.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sgljax_engine.attention.base import AttentionOptions, BlockTables
from sgljax_engine.cache.kv_pages import LayerKV
from sgljax_engine.kernels.gpu.paged_attention import Scores, paged_attention
from sgljax_engine.kernels.gpu.prefill_attention import choose_prefill_tiling, prefill_attention

_ROUNDS = 32
_PAGE_SIZE = _BLOCK = 16
_TOLERANCE = 0.03
"""The largest difference of outputs in bfloat16, averages of standard normal values."""

_STEPS = {"tiles": None, "tiles, 64 keys a step": 64, "tiles, 32 keys a step": 32}
"""Keys in a step of the kernel with tiles; None for its own choice."""

Attend = Callable[[jax.Array, LayerKV, BlockTables, AttentionOptions], jax.Array]
"""`Attention.attend`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelSizes:
    """What is measured.

    Attributes:
        matmul: Rows and columns of the square product.
        num_heads, num_kv_heads, head_dim: Of the attention.
        num_tokens: New tokens of one request, at the end of each context.
        contexts: Keys of the request.
        seconds: A measurement takes about so long.
    """

    matmul: int = 8192
    num_heads: int = 16
    num_kv_heads: int = 8
    head_dim: int = 128
    num_tokens: int = 2048
    contexts: tuple[int, ...] = (2048, 8192)
    seconds: float = 0.1


_SMOKE = KernelSizes(
    matmul=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    num_tokens=32,
    contexts=(32, 64),
    seconds=1e-3,
)


def measure_prefill_kernels(*, is_smoke: bool) -> Iterator[tuple[str, float]]:
    """Microseconds of each kernel and its share of the matrix rate; NaN for one that is wrong.

    2,048 tokens of one request are attended to 2,048 keys, and to 8,192.
    """
    sizes = _SMOKE if is_smoke else KernelSizes()
    flops_per_s = _matrix_rate(sizes)
    without = _backend(paged_attention, None, interpret=is_smoke)
    backends = {"without tiles": without}
    for name, keys in _STEPS.items():
        backends[name] = _backend(prefill_attention, keys, interpret=is_smoke)
    expected = _sample(without, sizes)
    for name, backend in backends.items():
        error = float(np.max(np.abs(_sample(backend, sizes) - expected)))
        if not error <= _TOLERANCE:
            yield f"attention {name}, wrong by {error:.3g}", float("nan")
            continue
        for context, took_s in _measure(backend, sizes):
            start = context - sizes.num_tokens
            num_pairs = sizes.num_tokens * (start + (sizes.num_tokens + 1) / 2)
            limit_s = 4.0 * sizes.head_dim * sizes.num_heads * num_pairs / flops_per_s
            yield f"attention {name}, {context} keys, us", 1e6 * took_s
            yield f"attention {name}, {context} keys, % of the matrix rate", 100 * limit_s / took_s


def _seconds_per_round(run: Callable[[], object], seconds: float) -> float:
    """Times `run`, which does `_ROUNDS` rounds: the median of five batches of calls."""

    def timed(calls: int) -> float:
        start = time.perf_counter()
        # Only the last is waited for: the device never waits for the host.
        jax.block_until_ready([run() for _ in range(calls)][-1])
        return time.perf_counter() - start

    timed(1)
    calls = max(int(seconds / timed(1)), 1)
    return float(np.median([timed(calls) for _ in range(5)])) / (calls * _ROUNDS)


def _matrix_rate(sizes: KernelSizes) -> float:
    """FLOP/s of a bfloat16 product."""
    products = jax.jit(lambda x: lax.fori_loop(0, _ROUNDS, lambda _, y: lax.dot(y, x), x))
    # Scaled so that its powers neither grow nor vanish: what is multiplied decides the clock rate.
    shape = (sizes.matmul, sizes.matmul)
    square = jax.random.normal(jax.random.key(0), shape, jnp.bfloat16) * sizes.matmul**-0.5
    return 2.0 * sizes.matmul**3 / _seconds_per_round(lambda: products(square), sizes.seconds)


def _backend(kernel: Any, keys: int | None, *, interpret: bool) -> Attend:
    """A kernel with that many keys in a step."""

    def attend(
        q_NQDh: jax.Array, layer: LayerKV, tables: BlockTables, options: AttentionOptions
    ) -> jax.Array:
        more = {}
        if keys is not None:
            tiling = choose_prefill_tiling(q_NQDh.shape, layer.k.shape[1])
            more = {"tiling": tiling._replace(keys=keys)}
        return kernel(
            q_NQDh, *layer[:2], *tables[:3], Scores(*options), interpret=interpret, **more
        )

    return attend


def _pages(sizes: KernelSizes, num_pages: int) -> LayerKV:
    """Random pages: a few different ones, repeated."""
    few = min(num_pages, 64)
    shape = (few, sizes.num_kv_heads, _PAGE_SIZE, sizes.head_dim)

    def pages(seed: int) -> jax.Array:
        some = jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)
        return jnp.tile(some, (-(-num_pages // few), 1, 1, 1))[:num_pages]

    return LayerKV(pages(0), pages(1))


def _queries(sizes: KernelSizes, num_blocks: int) -> jax.Array:
    shape = (num_blocks, _BLOCK, sizes.num_heads, sizes.head_dim)
    return jax.random.normal(jax.random.key(2), shape, jnp.bfloat16)


def _sample(backend: Attend, sizes: KernelSizes) -> np.ndarray:
    """Outputs of a few blocks of two requests, one behind earlier keys."""
    ends = np.array([(at + 1) * _BLOCK for at in (*range(9), *range(5, 8))], np.int32)
    num_pages = -(-int(ends.max()) // _PAGE_SIZE)
    table = np.arange(2 * num_pages, dtype=np.int32).reshape(2, num_pages)
    tables = BlockTables(
        jnp.asarray(np.repeat(table, (9, 3), axis=0)),
        jnp.asarray(ends[:, None] - _BLOCK + np.arange(_BLOCK, dtype=np.int32)),
        jnp.asarray(ends),
    )
    layer = _pages(sizes, 2 * num_pages)
    q, attend = _queries(sizes, len(ends)), jax.jit(backend, static_argnums=3)
    return np.asarray(attend(q, layer, tables, AttentionOptions(sizes.head_dim**-0.5)), np.float32)


def _measure(backend: Attend, sizes: KernelSizes) -> Iterator[tuple[int, float]]:
    """Each context, and the seconds of one request's newest tokens behind it."""
    options = AttentionOptions(sizes.head_dim**-0.5)
    num_blocks, num_pages = sizes.num_tokens // _BLOCK, max(sizes.contexts) // _PAGE_SIZE
    layer, q = _pages(sizes, num_pages), _queries(sizes, num_blocks)
    # Pages that are anywhere in the pool.
    table = np.random.default_rng(0).permutation(num_pages).astype(np.int32)

    @jax.jit
    def rounds(q: jax.Array, layer: LayerKV, tables: BlockTables) -> jax.Array:
        def body(_: jax.Array, q: jax.Array) -> jax.Array:
            # Values average towards zero; the next queries are the first ones but for a little.
            return q + backend(q, layer, tables, options) * jnp.asarray(1e-3, q.dtype)

        return lax.fori_loop(0, _ROUNDS, body, q)

    for context in sizes.contexts:
        at = np.arange(context - sizes.num_tokens, context, dtype=np.int32)
        blocks = at.reshape(num_blocks, _BLOCK)
        tables = BlockTables(
            jnp.asarray(np.repeat(table[None], num_blocks, axis=0)),
            jnp.asarray(blocks),
            jnp.asarray(blocks[:, -1] + 1),
        )
        call = functools.partial(rounds, q, layer, tables)
        yield context, _seconds_per_round(call, sizes.seconds)
