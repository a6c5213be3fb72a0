"""Attention by machine code against numpy in float64, with poison around the live tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sgljax_engine.attention.base import AttentionOptions, BlockTables
from sgljax_engine.attention.cpu import native_attention, native_decode_attention
from sgljax_engine.cache.kv_pages import LayerKV, write_kv
from tests.engine.native_cases import lanes, needs_machine_code
from tests.engine.paged_cases import ragged_case

COMPARES_BITS = True  # see conftest

__all__ = ["lanes"]
pytestmark = [needs_machine_code, pytest.mark.usefixtures("lanes")]

DEFAULT = AttentionOptions(scale=16**-0.5)
OPTIONS = {
    "default": DEFAULT,
    "window-1": DEFAULT._replace(sliding_window=1),
    "window-20": DEFAULT._replace(sliding_window=20),
    "all": AttentionOptions(scale=0.5, sliding_window=270, logit_softcap=2.0),
}
CASES = [  # options, page size, query heads, kv heads, head_dim
    ("default", 1, 4, 2, 16),
    ("all", 4, 8, 1, 32),
    ("window-20", 16, 3, 3, 16),
    ("default", 24, 4, 2, 48),
    ("window-1", 64, 4, 4, 64),
    ("default", 16, 16, 1, 128),
    ("all", 8, 2, 1, 256),
]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "num_queries",
    [pytest.param(1, marks=pytest.mark.slow), pytest.param(5, marks=pytest.mark.slow), 16],
)
def test_ragged_blocks(case, num_queries):
    name, page_size, num_heads, num_kv_heads, head_dim = case
    options = OPTIONS[name]
    case = ragged_case(
        [num_queries, 17, 33, 257, 600],
        page_size=page_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        num_queries=num_queries,
        head_dim=head_dim,
    )
    case.check(case.run(native_attention, options), options, atol=2e-5)


@pytest.mark.parametrize("case", CASES)
def test_decode_writes_keys_and_values_first(case):
    """And leaves everything else as it is, of unused rows too."""
    name, page_size, num_heads, num_kv_heads, head_dim = case
    options = OPTIONS[name]
    case = ragged_case(
        [1, 17, 33, 257, 600],
        page_size=page_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        num_queries=1,
        head_dim=head_dim,
    )
    lens, table = np.asarray(case.tables.kv_lens), np.asarray(case.tables.page_table)
    rows = np.arange(len(lens) - 1)
    newest = lens[:-1] - 1
    slots = table[rows, newest // page_size] * page_size + newest % page_size
    spoilt = np.full((len(rows), num_kv_heads, head_dim), np.nan, np.float32)
    before = write_kv(case.layer, jnp.asarray(spoilt), jnp.asarray(spoilt), jnp.asarray(slots))

    def newest_of(sequences):
        last = [sequence[-1] for sequence in sequences]
        return np.stack([*last, np.full_like(last[0], np.nan)])

    attend = jax.jit(native_decode_attention, static_argnames="options", donate_argnums=3)
    out, after = attend(
        case.queries[:, 0],
        newest_of(case.keys),
        newest_of(case.values),
        before,
        case.tables,
        options=options,
    )
    case.check(np.asarray(out)[:, None], options, atol=2e-5)
    np.testing.assert_array_equal(out[-1], 0)
    for found, expected in zip(after, case.layer, strict=True):
        np.testing.assert_array_equal(found, expected)


def test_pages_are_written_in_place():
    pages = jnp.zeros((4, 2, 16, 16))
    layer = LayerKV(pages, jnp.zeros_like(pages))
    tables = BlockTables(
        jnp.asarray([[1, 0], [2, 3]], jnp.int32), jnp.zeros((2, 1), jnp.int32), jnp.asarray([3, 20])
    )
    q, k = jnp.ones((2, 4, 16)), jnp.ones((2, 2, 16))
    attend = jax.jit(native_decode_attention, static_argnames="options", donate_argnums=3)
    places = [x.unsafe_buffer_pointer() for x in layer]
    _, after = attend(q, k, k, layer, tables, options=DEFAULT)
    assert [x.unsafe_buffer_pointer() for x in after] == places


@pytest.mark.parametrize("num_rows", [1, 3, 40])
def test_a_row_has_the_same_bits_in_any_company(num_rows):
    lengths = np.random.default_rng(num_rows).integers(1, 400, num_rows)
    case = ragged_case(
        lengths, page_size=16, num_heads=4, num_kv_heads=2, num_queries=1, head_dim=64
    )
    together = case.run(native_attention, DEFAULT)
    for row in range(num_rows):
        tables = BlockTables(*(x[row : row + 1] for x in case.tables))
        alone = case._replace(queries=case.queries[row : row + 1], tables=tables)
        np.testing.assert_array_equal(alone.run(native_attention, DEFAULT)[0], together[row])


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_query_has_the_same_bits_in_any_block(options):
    """In blocks of a prefill as alone, in decode."""
    case = ragged_case(
        [790], page_size=16, num_heads=4, num_kv_heads=2, num_queries=16, head_dim=32
    )
    out = case.run(native_attention, options)[0]
    positions = np.asarray(case.tables.positions[0])
    for query, position in enumerate(positions):
        tables = BlockTables(
            case.tables.page_table[:1],
            jnp.asarray([[position]], jnp.int32),
            jnp.asarray([position + 1], jnp.int32),
        )
        alone = case._replace(queries=case.queries[:1, query : query + 1], tables=tables)
        np.testing.assert_array_equal(alone.run(native_attention, options)[0, 0], out[query])
