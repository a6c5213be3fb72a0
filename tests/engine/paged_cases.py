"""Ragged query blocks over a poisoned page pool, and attention of them in float64."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sgljax_engine import Engine, SamplingParams
from sgljax_engine.attention.base import AttentionOptions, BlockTables
from sgljax_engine.cache.kv_pages import LayerKV
from tests.engine.models import TINY, random_prompts, spread_weights
from tests.geometry import SMALL


def spread(*columns: Sequence[Any], road: Literal["main", "other", "rare"] = "main") -> list[Any]:
    """Combinations that have each value; the slow tier has it once more, in other combinations.

    Both step through all columns together, the slow one with each column shifted by its index. The
    main road is what users' CPUs take. Others are a tier lower: slow, and for the soak. Rare ones
    are for the soak alone.
    """
    rows = range(max(map(len, columns)))
    fast, slow = (
        [
            tuple(column[(row + shift * i) % len(column)] for i, column in enumerate(columns))
            for row in rows
        ]
        for shift in (0, 1)
    )
    others = [row for row in slow if row not in fast]
    ci, soak = pytest.mark.slow, pytest.mark.soak
    tiers = {"main": ((), ci), "other": (ci, soak), "rare": (soak, soak)}[road]
    return [
        pytest.param(*row, marks=marks)
        for rows_of_tier, marks in zip((fast, others), tiers, strict=True)
        for row in rows_of_tier
    ]


OPTIONS = {
    "default": AttentionOptions(scale=0.2),
    "window-1": AttentionOptions(scale=0.2, sliding_window=1),
    "window-20": AttentionOptions(scale=0.2, sliding_window=20),
    "all": AttentionOptions(scale=0.5, sliding_window=70, logit_softcap=2.0),
}
"""Options of a layer, for the tests of the Pallas kernels."""

LENGTHS = (16, 17, 33, 290)

needs_gpu = pytest.mark.skipif(
    jax.default_backend() != "gpu", reason="the compiled kernel needs an NVIDIA GPU"
)


class RaggedCase(NamedTuple):
    """Blocks of queries at the ends of sequences of different lengths; the last one is unused.

    Everything in the pages that no key was written to is NaN: using it would show.
    """

    queries: np.ndarray
    keys: list[np.ndarray]
    values: list[np.ndarray]
    layer: LayerKV
    tables: BlockTables

    def run(self, backend, options, *sinks) -> np.ndarray:
        """The backend's output [N, Q, D, h], as float32."""
        is_int8 = self.layer.k_scale is not None
        queries = jnp.asarray(self.queries, jnp.float32 if is_int8 else self.layer.k.dtype)
        if not isinstance(backend, jax.stages.Wrapped):
            # One program: compiling each operation by itself takes several times as long.
            backend = jax.jit(functools.partial(backend), static_argnums=3)  # traced anew
        out = backend(queries, self.layer, self.tables, options, *sinks)
        assert out.dtype == queries.dtype
        return np.asarray(out, np.float32)

    def check(
        self, out: np.ndarray, options: AttentionOptions, atol: float, sinks: Any = None
    ) -> None:
        """Compares an output of `run` with `reference`."""
        for i, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            positions = np.asarray(self.tables.positions[i])
            expected = reference(self.queries[i], keys, values, positions, options, sinks)
            np.testing.assert_allclose(out[i], expected, atol=atol)
        assert np.isfinite(out).all()


def ragged_case(
    lengths,
    *,
    page_size: int,
    num_heads: int,
    num_kv_heads: int,
    num_queries: int,
    head_dim: int,
    dtype: Any = np.float32,
    prefixes: Sequence[int] = (),
) -> RaggedCase:
    """A block of `num_queries` queries for each length, which must be at least as many.

    `prefixes` has for each sequence how many first pages are those of the one before it.
    """
    rng = np.random.default_rng(0)
    lengths = np.asarray(lengths)
    pages_each = -(-lengths // page_size)
    num_pages = int(pages_each.sum()) + 3
    pool_k = np.full((num_pages * page_size, num_kv_heads, head_dim), np.nan, np.float32)
    pool_v = pool_k.copy()
    order = rng.permutation(num_pages)
    table = np.zeros((len(lengths) + 1, pages_each.max() + 2), np.int32)

    def draw(*shape: int) -> np.ndarray:
        return np.asarray(jnp.asarray(rng.normal(size=shape), dtype), np.float32)

    keys, values = [], []
    for i, length in enumerate(lengths):
        num_shared = prefixes[i] if prefixes else 0
        own, order = np.split(order, [pages_each[i] - num_shared])
        pages = np.concatenate([table[i - 1, :num_shared], own])
        table[i, : len(pages)] = pages
        at = np.arange(length)
        slots = pages[at // page_size] * page_size + at % page_size
        for each in (keys, values):
            drawn = draw(length, num_kv_heads, head_dim)
            shared = each[i - 1][: num_shared * page_size] if num_shared else drawn[:0]
            each.append(np.concatenate([shared, drawn[len(shared) :]]))
        pool_k[slots], pool_v[slots] = keys[i], values[i]
    positions = np.zeros((len(table), num_queries), np.int32)
    positions[:-1] = lengths[:, None] - num_queries + np.arange(num_queries)
    kv_lens = np.append(lengths, 0).astype(np.int32)
    return RaggedCase(
        queries=draw(len(table), num_queries, num_heads, head_dim),
        keys=keys,
        values=values,
        layer=LayerKV(*(jnp.asarray(as_pages(p, page_size), dtype) for p in (pool_k, pool_v))),
        tables=BlockTables(jnp.asarray(table), jnp.asarray(positions), jnp.asarray(kv_lens)),
    )


def case_of(
    shape: tuple[int, ...], dtype: Any = jnp.float32, lengths: Sequence[int] = LENGTHS
) -> RaggedCase:
    """`ragged_case` of (page_size, num_heads, num_kv_heads, num_queries, head_dim)."""
    names = ("page_size", "num_heads", "num_kv_heads", "num_queries", "head_dim")
    return ragged_case(lengths, dtype=dtype, **dict(zip(names, shape, strict=True)))


def greedy_tokens(**options: Any) -> list[list[int]]:
    """What an engine with these options answers: prefill and decode with small pages."""
    prompts = random_prompts(5, 3, 40)
    params = SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True)
    with Engine(
        model_config=TINY,
        weights=spread_weights(),
        **SMALL,
        **options,
    ) as engine:
        return [output.output_ids for output in engine.generate_requests(prompts, params)]


def as_pages(pool: np.ndarray, page_size: int) -> np.ndarray:
    """[num_slots, K, H] to the cache's [num_pages, K, page_size, H]."""
    return pool.reshape(-1, page_size, *pool.shape[1:]).swapaxes(1, 2)


def reference(q, k, v, q_pos, options, sinks=None):
    """softmax(cap(scale q k)) v over the keys that each query sees. q [Q,N,H], k and v [S,K,H].

    With sinks [N] there is a key of that score and without a value.
    """
    group = q.shape[1] // k.shape[1]
    k, v = (np.repeat(x.astype(np.float64), group, axis=1) for x in (k, v))
    scores = np.einsum("qnh,snh->nqs", q.astype(np.float64), k) * options.scale
    if options.logit_softcap is not None:
        scores = options.logit_softcap * np.tanh(scores / options.logit_softcap)
    age = q_pos[:, None] - np.arange(len(k))[None]
    seen = (age >= 0) & (age < (options.sliding_window or np.inf))
    scores = np.where(seen[None], scores, -np.inf)
    beside = np.full(scores.shape[:1], -np.inf) if sinks is None else np.asarray(sinks, np.float64)
    beside = np.broadcast_to(beside[:, None, None], (*scores.shape[:2], 1))
    peak = np.maximum(scores.max(-1, keepdims=True), beside)
    weights = np.exp(scores - peak)
    total = weights.sum(-1, keepdims=True) + np.exp(beside - peak)
    return np.einsum("nqs,snh->qnh", weights / total, v)
