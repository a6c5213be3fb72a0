"""Paged attention against numpy in float64, with poisoned memory around the live tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sgljax_engine.attention import xla
from sgljax_engine.attention.base import AttentionOptions, BlockTables
from sgljax_engine.cache.kv_pages import LayerKV, write_kv
from tests.engine.paged_cases import ragged_case, spread

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


@pytest.mark.parametrize(("shape", "options"), spread(SHAPES, [*OPTIONS], road="other"))
def test_ragged_blocks(options, shape):
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
    case.check(case.run(xla.xla_attention, options), options, atol=2e-5)


@pytest.mark.slow
def test_a_window_skips_the_pages_before_it(monkeypatch):
    """Work is bounded by the window: as many steps of the loop at 200 keys as at 20 000."""
    page_size, window = 16, 40
    steps: list[int] = []
    original = xla._Softmax.add

    def counted(self, *args):
        jax.debug.callback(lambda _: steps.append(1), 0)
        return original(self, *args)

    monkeypatch.setattr(xla._Softmax, "add", counted)

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
        xla.xla_attention(jnp.ones((1, 1, 1, 4)), LayerKV(zeros, zeros), tables, options)
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
