"""JIT-compiled attention against numpy in float64, with poison around the live tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sgljax_engine.attention.base import AttentionOptions, BlockTables
from sgljax_engine.attention.cpu import NativeAttention, native_write_kv
from sgljax_engine.cache.kv_pages import LayerKV, write_kv
from tests.engine.native_cases import lanes, needs_machine_code
from tests.engine.paged_cases import ragged_case, spread
from tests.tiers import tiered

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
]
LONG_CASES = [  # as above, of heads that are unrolled into much code
    ("all", 8, 2, 1, 256),
    ("default", 16, 16, 1, 128),
]


@pytest.mark.parametrize(
    ("case", "num_queries"),
    [
        *spread(CASES, [16, 1, 5]),
        # the one pair that the next line lacks
        pytest.param(LONG_CASES[1], 1, marks=pytest.mark.slow),
        *spread(LONG_CASES, [1, 16, 5], road="other"),
    ],
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
    case.check(case.run(NativeAttention().attend, options), options, atol=2e-5)


def write_at(layer, k, v, slots):
    """The layer after `native_write_kv`, in its own memory."""
    run = jax.jit(native_write_kv, donate_argnums=0)
    return run(layer, k, v, jnp.asarray(slots, jnp.int32))


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    spread([(1, 16), (16, 64), (24, 48)], ["bfloat16", "float32", "float16"]),
)
def test_writes_what_the_portable_code_writes(sizes, dtype):
    page_size, head_dim = sizes
    rng = np.random.default_rng(0)
    pages = jnp.asarray(rng.standard_normal((5, 3, page_size, head_dim)), dtype)
    for num_tokens in (1, 7, 40):
        k, v = jnp.asarray(rng.standard_normal((2, num_tokens, 3, head_dim)), "float32")
        slots = rng.permutation(np.arange(-3, 5 * page_size + 4 + num_tokens))[:num_tokens]
        slots[slots < 0] = np.iinfo(np.int32).max
        layer = LayerKV(jnp.copy(pages), jnp.copy(pages))
        wanted = write_kv(LayerKV(pages, pages), k, v, jnp.asarray(slots, jnp.int32))
        found = write_at(layer, k, v, slots)
        for name in ("k", "v"):
            one, other = (np.asarray(getattr(x, name), np.float32) for x in (found, wanted))
            np.testing.assert_array_equal(one, other)


def test_pages_are_written_in_place():
    pages = jnp.zeros((4, 2, 16, 16))
    layer = LayerKV(pages, jnp.zeros_like(pages))
    places = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(layer)]
    after = write_at(layer, jnp.ones((2, 2, 16)), jnp.ones((2, 2, 16)), [3, 20])
    assert [x.unsafe_buffer_pointer() for x in jax.tree.leaves(after)] == places


@pytest.mark.parametrize("dtype", tiered(["bfloat16", "float16"], ["bfloat16"]))
def test_half_width_pages(dtype):
    """The keys and values are rounded, and everything else is as in float32."""
    case = ragged_case(
        [5, 17, 33, 257], page_size=16, num_heads=4, num_kv_heads=2, num_queries=5, head_dim=32
    )
    half = jax.tree.map(lambda x: x.astype(dtype), case.layer)
    wide = jax.tree.map(lambda x: x.astype("float32"), half)
    run = jax.jit(NativeAttention().attend, static_argnums=3)
    found, wanted = (run(case.queries, layer, case.tables, DEFAULT) for layer in (half, wide))
    np.testing.assert_array_equal(found, wanted)


def row_of(tables, row):
    """The tables of a row alone."""
    page_table, positions, kv_lens, _ = tables
    one = slice(row, row + 1)
    return BlockTables(page_table[one], positions[one], kv_lens[one])


LENGTHS, PREFIXES = zip(
    # Ten rows with the pages of a prompt, one of which has only its first ones,
    *((600, 0), (601, 35), (597, 35), (1200, 35), (580, 20), (900, 20), (599, 35)),
    *((560, 35), (777, 35), (590, 35)),
    # rows of another prompt, and rows on their own
    *((300, 0), (310, 18), (290, 17), (17, 0), (16, 1), (1, 0), (530, 0)),
    strict=True,
)


@pytest.mark.parametrize(
    ("options", "sizes", "dtype", "page_size"),
    spread(list(OPTIONS), [(4, 2, 32), (8, 1, 16), (2, 2, 64)], ["float32", "bfloat16"], [16, 4]),
)
@pytest.mark.parametrize("has_sinks", [False, True])
def test_rows_that_share_first_pages(options, sizes, dtype, page_size, has_sinks):
    """Their keys are read together, and their bits are those of each row alone."""
    num_heads, num_kv_heads, head_dim = sizes
    case = ragged_case(
        LENGTHS,
        page_size=page_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        num_queries=1,
        head_dim=head_dim,
        dtype=dtype,
        prefixes=[16 // page_size * count for count in PREFIXES],
    )
    sinks = [np.linspace(-1, 1, num_heads, dtype=np.float32)] if has_sinks else []
    options = OPTIONS[options]
    attend = jax.jit(NativeAttention().attend, static_argnums=3)
    together = case.run(attend, options, *sinks)
    case.check(together, options, 2e-5 if dtype == "float32" else 2e-2, *sinks)
    for row in range(len(LENGTHS)):
        tables = row_of(case.tables, row)
        alone = case._replace(queries=case.queries[row : row + 1], tables=tables)
        np.testing.assert_array_equal(alone.run(attend, options, *sinks)[0], together[row])


@pytest.mark.parametrize("num_rows", tiered([1, 3, 40], [3, 40]))
def test_a_row_has_the_same_bits_in_any_company(num_rows):
    lengths = np.random.default_rng(num_rows).integers(1, 400, num_rows)
    case = ragged_case(
        lengths, page_size=16, num_heads=4, num_kv_heads=2, num_queries=1, head_dim=64
    )
    together = case.run(NativeAttention().attend, DEFAULT)
    for row in range(num_rows):
        tables = row_of(case.tables, row)
        alone = case._replace(queries=case.queries[row : row + 1], tables=tables)
        np.testing.assert_array_equal(
            alone.run(NativeAttention().attend, DEFAULT)[0], together[row]
        )


@pytest.mark.parametrize("options", tiered(OPTIONS, ["all"]))
def test_a_query_has_the_same_bits_in_any_block(options):
    """In blocks of a prefill as alone, in decode."""
    options = OPTIONS[options]
    case = ragged_case(
        [790], page_size=16, num_heads=4, num_kv_heads=2, num_queries=16, head_dim=32
    )
    out = case.run(NativeAttention().attend, options)[0]
    positions = np.asarray(case.tables.positions[0])
    for query, position in enumerate(positions):
        tables = BlockTables(
            case.tables.page_table[:1],
            jnp.asarray([[position]], jnp.int32),
            jnp.asarray([position + 1], jnp.int32),
        )
        alone = case._replace(queries=case.queries[:1, query : query + 1], tables=tables)
        np.testing.assert_array_equal(
            alone.run(NativeAttention().attend, options)[0, 0], out[query]
        )
