"""Paged attention against numpy in float64, with poisoned memory around the live tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sgljax_engine.attention import xla as attention
from sgljax_engine.attention.base import AttentionOptions, BlockTables
from sgljax_engine.attention.registry import PORTABLE
from sgljax_engine.cache.kv_pages import LayerKV, write_kv
from tests.engine.paged_cases import ragged_case, spread
from tests.tiers import tiered

DEFAULT = AttentionOptions(scale=12**-0.5)
OPTIONS = {
    "default": DEFAULT,
    "window-1": DEFAULT._replace(sliding_window=1),
    "window-20": DEFAULT._replace(sliding_window=20),
    "all": AttentionOptions(scale=0.5, sliding_window=70, logit_softcap=2.0),
}


SHAPES = (
    (1, 4, 2, 1),
    (4, 8, 1, 16),
    (16, 3, 3, 1),
    (16, 4, 2, 16),
    (128, 8, 1, 1),
    (128, 3, 3, 16),
    (4, 4, 2, 1),
)


@pytest.mark.parametrize(
    ("shape", "options", "backend"), spread(SHAPES, [*OPTIONS], [*PORTABLE], road="other")
)
def test_ragged_blocks(backend, options, shape):
    page_size, num_heads, num_kv_heads, num_queries = shape
    options = OPTIONS[options]
    case = ragged_case(
        [num_queries, 17, 33, 150],
        page_size=page_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        num_queries=num_queries,
        head_dim=12,
    )
    case.check(case.run(PORTABLE[backend], options), options, atol=2e-5)


NUM_BLOCKS = 12


def blocks_of_one_request(length=330, page_size=16):
    """The last `NUM_BLOCKS` blocks of one request and an unused one; and how to compare them."""
    whole = ragged_case(
        [length],
        page_size=page_size,
        num_heads=4,
        num_kv_heads=2,
        num_queries=NUM_BLOCKS * 16,
        head_dim=12,
    )
    positions = whole.tables.positions[0].reshape(NUM_BLOCKS, 16)
    tables = BlockTables(
        page_table=jnp.pad(
            jnp.repeat(whole.tables.page_table[:1], NUM_BLOCKS, 0), ((0, 1), (0, 0))
        ),
        positions=jnp.pad(positions, ((0, 1), (0, 0))),
        kv_lens=jnp.append(positions[:, -1] + 1, 0),
    )
    queries = whole.queries.reshape(-1, 16, *whole.queries.shape[2:])[: NUM_BLOCKS + 1]
    case = whole._replace(queries=queries, tables=tables)

    def check(out, options):
        assert np.isfinite(out).all()
        out = out[:NUM_BLOCKS].reshape(1, -1, *out.shape[2:])
        whole.check(out, options, atol=2e-5)

    return case, check


@pytest.fixture
def steps(monkeypatch):
    """Grows by one with each step of the loop over keys."""
    steps: list[int] = []
    original = attention._Softmax.add

    def counted(self, *args):
        jax.debug.callback(lambda _: steps.append(1), 0)
        return original(self, *args)

    monkeypatch.setattr(attention._Softmax, "add", counted)
    return steps


@pytest.mark.parametrize("name", tiered(OPTIONS, (), ("default", "all")))
def test_blocks_of_one_request_share_its_keys(name, steps):
    options = OPTIONS[name]
    case, check = blocks_of_one_request()
    check(case.run(PORTABLE["xla_tiles"], options), options)
    jax.effects_barrier()
    assert len(steps) == 2, "all blocks together, 256 keys a step"


@pytest.mark.parametrize("name", tiered(OPTIONS, (), ("all",)))
@pytest.mark.parametrize("change", ["pages", "order"])
def test_blocks_that_are_not_one_request_in_order_share_nothing(change, name, steps):
    options = OPTIONS[name]
    case, check = blocks_of_one_request()
    if change == "pages":  # as another request's, whose keys are the same
        layer = LayerKV(*(jnp.concatenate([pages, pages]) for pages in case.layer))
        table = case.tables.page_table.at[3].add(case.layer.k.shape[0])
        case = case._replace(layer=layer, tables=case.tables._replace(page_table=table))
        check(case.run(PORTABLE["xla_tiles"], options), options)
    else:
        order = np.append(np.arange(NUM_BLOCKS)[::-1], NUM_BLOCKS)
        tables = BlockTables(*(x[order] for x in case.tables))
        case = case._replace(queries=case.queries[order], tables=tables)
        check(case.run(PORTABLE["xla_tiles"], options)[order], options)
    jax.effects_barrier()
    assert len(steps) > 2


@pytest.mark.slow
@pytest.mark.parametrize("backend", PORTABLE)
def test_a_window_skips_the_pages_before_it(backend, steps):
    """Work is bounded by the window: as many steps of the loop at 200 keys as at 20 000."""
    page_size, window = 16, 40

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
        PORTABLE[backend](jnp.ones((1, 1, 1, 4)), LayerKV(zeros, zeros), tables, options)
        jax.effects_barrier()
        return len(steps)

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
