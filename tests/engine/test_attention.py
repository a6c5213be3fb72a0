"""Paged attention against numpy in float64, with poisoned memory around the live tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sgljax_engine.cache.kv_pages import LayerKV, write_kv
from sgljax_engine.config import ATTENTION_BACKENDS
from sgljax_engine.layers import attention
from sgljax_engine.layers.attention import (
    BACKENDS,
    AttentionOptions,
    BlockTables,
    dense_attention,
    get_backend,
)

DEFAULT = AttentionOptions(scale=12**-0.5)
OPTIONS = {
    "default": DEFAULT,
    "window-1": DEFAULT._replace(sliding_window=1),
    "window-20": DEFAULT._replace(sliding_window=20),
    "all": AttentionOptions(scale=0.5, sliding_window=70, logit_softcap=2.0),
}


def reference(q, k, v, q_pos, options):
    """softmax(cap(scale q k)) v over the keys that each query sees. q [Q,N,H], k and v [S,K,H]."""
    group = q.shape[1] // k.shape[1]
    k, v = (np.repeat(x.astype(np.float64), group, axis=1) for x in (k, v))
    scores = np.einsum("qnh,snh->nqs", q.astype(np.float64), k) * options.scale
    if options.logit_softcap is not None:
        scores = options.logit_softcap * np.tanh(scores / options.logit_softcap)
    age = q_pos[:, None] - np.arange(len(k))[None]
    seen = (age >= 0) & (age < (options.sliding_window or np.inf))
    scores = np.where(seen[None], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("nqs,snh->qnh", weights / weights.sum(-1, keepdims=True), v)


def as_pages(pool, page_size):
    """[num_slots, K, H] to the cache's [num_pages, K, page_size, H]."""
    return pool.reshape(-1, page_size, *pool.shape[1:]).swapaxes(1, 2)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("page_size", "num_heads", "num_kv_heads", "num_queries"),
    [(1, 4, 2, 1), (4, 8, 1, 16), (16, 3, 3, 1), (16, 4, 2, 16), (128, 8, 1, 1), (128, 3, 3, 16)],
)
def test_ragged_blocks(backend, options, page_size, num_heads, num_kv_heads, num_queries):
    rng = np.random.default_rng(0)
    head_dim = 12
    lengths = np.array([num_queries, 17, 33, 150])
    pages_each = -(-lengths // page_size)
    num_pages = int(pages_each.sum()) + 3
    # Everything that was never written is NaN: using it would show.
    pool_k = np.full((num_pages * page_size, num_kv_heads, head_dim), np.nan, np.float32)
    pool_v = pool_k.copy()
    order = rng.permutation(num_pages)
    table = np.zeros((len(lengths) + 1, pages_each.max() + 2), np.int32)
    keys, values = [], []
    for i, length in enumerate(lengths):
        pages, order = order[: pages_each[i]], order[pages_each[i] :]
        table[i, : len(pages)] = pages
        at = np.arange(length)
        slots = pages[at // page_size] * page_size + at % page_size
        keys.append(rng.normal(size=(length, num_kv_heads, head_dim)).astype(np.float32))
        values.append(rng.normal(size=(length, num_kv_heads, head_dim)).astype(np.float32))
        pool_k[slots], pool_v[slots] = keys[i], values[i]
    queries = rng.normal(size=(len(table), num_queries, num_heads, head_dim)).astype(np.float32)
    positions = np.zeros((len(table), num_queries), np.int32)
    positions[:-1] = lengths[:, None] - num_queries + np.arange(num_queries)
    kv_lens = np.append(lengths, 0).astype(np.int32)  # the last block is unused

    out = BACKENDS[backend](
        jnp.asarray(queries),
        LayerKV(*(jnp.asarray(as_pages(pool, page_size)) for pool in (pool_k, pool_v))),
        BlockTables(jnp.asarray(table), jnp.asarray(positions), jnp.asarray(kv_lens)),
        options,
    )
    for i in range(len(lengths)):
        expected = reference(queries[i], keys[i], values[i], positions[i], options)
        np.testing.assert_allclose(out[i], expected, atol=2e-5)
    assert np.isfinite(out).all()


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("length", [9, 150])
def test_dense_matches_reference(options, length):
    rng = np.random.default_rng(1)
    q, k, v = (rng.normal(size=(2, length, n, 12)).astype(np.float32) for n in (6, 2, 2))
    out = dense_attention(jnp.asarray(q), jnp.asarray(k), jnp.asarray(v), options)
    for row in range(2):
        expected = reference(q[row], k[row], v[row], np.arange(length), options)
        np.testing.assert_allclose(out[row], expected, atol=2e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_window_skips_the_pages_before_it(backend):
    """Work is bounded by the window: as many steps of the loop at 200 keys as at 20 000."""
    page_size, window = 16, 40
    steps = []

    def count(_):
        steps.append(1)

    def run(length):
        pages = -(-length // page_size)
        zeros = jnp.zeros((pages, 1, page_size, 4))
        tables = BlockTables(
            jnp.arange(pages, dtype=jnp.int32)[None],
            jnp.asarray([[length - 1]], jnp.int32),
            jnp.asarray([length], jnp.int32),
        )
        options = AttentionOptions(0.5, sliding_window=window)
        steps.clear()
        BACKENDS[backend](jnp.ones((1, 1, 1, 4)), LayerKV(zeros, zeros), tables, options)
        jax.effects_barrier()
        return len(steps)

    original = attention._Softmax.add

    def counted(self, *args):
        jax.debug.callback(count, 0)
        return original(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention._Softmax, "add", counted)
        assert 1 <= run(20_000) <= 2
        assert 1 <= run(200) <= 2


def test_write_drops_what_has_no_slot():
    layer = LayerKV(jnp.zeros((2, 3, 4, 5)), jnp.zeros((2, 3, 4, 5)))
    new = jnp.arange(3.0 * 3 * 5).reshape(3, 3, 5) + 1
    slots = jnp.asarray([6, np.iinfo(np.int32).max, 0])
    written = write_kv(layer, new, 2 * new, slots)
    expected = np.zeros((2, 3, 4, 5))
    expected[1, :, 2], expected[0, :, 0] = new[0], new[2]
    np.testing.assert_array_equal(written.k, expected)
    np.testing.assert_array_equal(written.v, 2 * expected)


def test_names_of_backends():
    assert set(ATTENTION_BACKENDS) == {"auto", *BACKENDS}
    assert get_backend("auto", "cpu") is BACKENDS["xla_tiles"]
    assert get_backend("auto", "tpu") is BACKENDS["xla"]
