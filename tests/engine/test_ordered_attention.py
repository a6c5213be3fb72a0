"""Attention in a fixed order: against numpy in float64, and bit against bit among its forms."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sgljax_engine.attention.base import AttentionOptions, BlockTables
from sgljax_engine.attention.batch_invariant import (
    ordered_attention,
    ordered_backend,
    ordered_tiles_attention,
)
from sgljax_engine.cache.contiguous_kv import CHUNK
from sgljax_engine.cache.kv_pages import LayerKV
from sgljax_engine.xla_options import compiler_options
from tests.engine.paged_cases import RaggedCase, as_pages, ragged_case
from tests.engine.test_row_attention import over_rows
from tests.tiers import tiered

DEFAULT = AttentionOptions(scale=0.25)
OPTIONS = {
    "default": DEFAULT,
    "window-1": DEFAULT._replace(sliding_window=1),
    "window-70": DEFAULT._replace(sliding_window=70),
    "softcap": DEFAULT._replace(logit_softcap=2.0),
    "all": AttentionOptions(scale=0.5, sliding_window=100, logit_softcap=2.0),
}
BACKENDS = {"blocks": ordered_attention, "tiles": ordered_tiles_attention}
LENGTHS = (17, 63, 64, 65, 150, 193)
BLOCK = 16


def jitted(backend):
    """Compiled as an engine compiles it."""
    options = compiler_options(jax.default_backend() == "cpu")
    return jax.jit(backend, static_argnums=3, compiler_options=options)


def make_case(lengths=LENGTHS, page_size=16, num_queries=1, **shape) -> RaggedCase:
    sizes = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 32} | shape
    return ragged_case(lengths, page_size=page_size, num_queries=num_queries, **sizes)


@pytest.mark.parametrize("options", tiered(OPTIONS, ["all"]))
def test_options(options):
    options = OPTIONS[options]
    case = make_case(num_queries=16, head_dim=16)
    case.check(case.run(jitted(ordered_tiles_attention), options), options, atol=2e-5)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("backend", "page_size", "num_queries", "shape"),
    [
        (ordered_tiles_attention, 1, 1, {}),
        (ordered_attention, 4, 16, {"num_heads": 8, "num_kv_heads": 1, "head_dim": 16}),
        (ordered_tiles_attention, 48, 16, {"num_heads": 3, "num_kv_heads": 3, "head_dim": 24}),
        (ordered_attention, 64, 5, {}),
        (ordered_tiles_attention, 128, 1, {"head_dim": 5}),
    ],
)
def test_shapes(backend, page_size, num_queries, shape):
    options = OPTIONS["all"]
    case = make_case(page_size=page_size, num_queries=num_queries, **shape)
    case.check(case.run(jitted(backend), options), options, atol=2e-5)


@pytest.mark.soak
def test_bfloat16():
    case = make_case(num_queries=16, dtype=jnp.bfloat16)
    case.check(case.run(jitted(ordered_tiles_attention), DEFAULT), DEFAULT, atol=2e-2)


def test_backends_of_platforms():
    assert ordered_backend("cpu") is ordered_tiles_attention
    assert ordered_backend("gpu") is ordered_backend("tpu") is ordered_attention


def in_pages_of(case: RaggedCase, page_size: int) -> RaggedCase:
    """The same queries, keys and values, in pages of another size and elsewhere."""
    pages_each = [-(-len(keys) // page_size) for keys in case.keys]
    order = np.random.default_rng(page_size).permutation(sum(pages_each) + 2)
    table = np.zeros((len(case.keys) + 1, max(pages_each) + 1), np.int32)
    pools = [
        np.full((len(order) * page_size, *case.keys[0].shape[1:]), np.nan, np.float32)
        for _ in range(2)
    ]
    for row, count in enumerate(pages_each):
        pages, order = order[:count], order[count:]
        table[row, :count] = pages
        at = np.arange(len(case.keys[row]))
        slots = pages[at // page_size] * page_size + at % page_size
        pools[0][slots], pools[1][slots] = case.keys[row], case.values[row]
    return case._replace(
        layer=LayerKV(*(jnp.asarray(as_pages(pool, page_size)) for pool in pools)),
        tables=case.tables._replace(page_table=jnp.asarray(table)),
    )


def alone(case: RaggedCase, row: int) -> RaggedCase:
    """One of its blocks."""
    return case._replace(
        queries=case.queries[row : row + 1],
        tables=BlockTables(*(table[row : row + 1] for table in case.tables)),
    )


def amid_requests(case: RaggedCase) -> RaggedCase:
    """Its queries a block before the ends of their requests."""
    kv_lens = jnp.maximum(case.tables.kv_lens - BLOCK, 0)
    tables = case.tables._replace(kv_lens=kv_lens, positions=jnp.maximum(kv_lens - 1, 0)[:, None])
    return case._replace(tables=tables)


def amid_a_block(case: RaggedCase, offset: int) -> RaggedCase:
    """Its queries at some place of blocks of 16, among others; later ones see later keys."""
    rng, tables = np.random.default_rng(offset), case.tables
    queries = rng.standard_normal((len(case.queries), BLOCK, *case.queries.shape[2:]))
    queries[:, offset] = case.queries[:, 0]
    positions = tables.positions - offset + jnp.arange(BLOCK, dtype=jnp.int32)
    kv_lens = jnp.where(tables.kv_lens > 0, positions[:, -1] + 1, 0)
    return case._replace(
        queries=queries.astype(np.float32),
        tables=tables._replace(positions=jnp.maximum(positions, 0), kv_lens=kv_lens),
    )


def bits(out: np.ndarray) -> np.ndarray:
    return out.view(np.uint32)


@pytest.mark.soak
def test_rows_pages_and_blocks_have_the_same_bits():
    """Decode over rows of any number; pages of any size and place; a query amid a block."""
    options = OPTIONS["all"]
    case = amid_requests(make_case([length + BLOCK for length in LENGTHS]))
    used = len(LENGTHS)
    rows = jitted(over_rows(200))
    expected = bits(case.run(rows, options))[:used, 0]

    for row in range(used):
        np.testing.assert_array_equal(
            bits(alone(case, row).run(rows, options))[0, 0], expected[row]
        )
    for backend in map(jitted, BACKENDS.values()):
        for page_size in (1, 48):
            paged = in_pages_of(case, page_size)
            np.testing.assert_array_equal(bits(paged.run(backend, options))[:used, 0], expected)
        for offset in (0, 7, 15):
            out = amid_a_block(case, offset).run(backend, options)
            np.testing.assert_array_equal(bits(out)[:used, offset], expected)


@pytest.mark.soak
def test_bits_do_not_depend_on_how_many_rows():
    """Nor on their lengths: tiles go as far as their longest row."""
    lengths = (40, 17, *np.random.default_rng(1).integers(1, 200, 39))
    many = make_case(lengths, page_size=16)
    for backend in (over_rows(200), *BACKENDS.values()):
        run = jitted(backend)
        together = bits(many.run(run, DEFAULT))
        for row in range(2):
            one = alone(many, row).run(run, DEFAULT)
            np.testing.assert_array_equal(bits(one)[0], together[row])


@functools.cache
def long_case() -> RaggedCase:
    return make_case((3 * CHUNK + 1, 3 * CHUNK, 3 * CHUNK - 1), head_dim=16)


@pytest.mark.soak
@pytest.mark.parametrize("window", [None, CHUNK])
def test_ends_of_chunks(window):
    options = DEFAULT._replace(sliding_window=window)
    case = long_case()
    case.check(case.run(jitted(ordered_tiles_attention), options), options, atol=2e-5)
    expected = bits(case.run(jitted(over_rows(256)), options))[:3]
    for backend in BACKENDS.values():
        np.testing.assert_array_equal(bits(case.run(jitted(backend), options))[:3], expected)
