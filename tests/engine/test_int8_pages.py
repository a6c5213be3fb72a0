"""Attention to keys and values of 8 bits against numpy in float64, and how they are rounded."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sgljax_engine.attention.base import BlockTables, NewTokens
from sgljax_engine.attention.cpu import NativeAttention, native_write_kv
from sgljax_engine.attention.pallas import PallasAttention
from sgljax_engine.attention.xla import XlaAttention
from sgljax_engine.cache.kv_pages import LayerKV, PageLayout, stored_tokens, write_kv
from sgljax_engine.kernels.runs import find_runs
from tests.engine.native_cases import needs_machine_code
from tests.engine.paged_cases import OPTIONS, RaggedCase, as_pages, case_of, ragged_case
from tests.tiers import tiered

BACKENDS: dict[str, Any] = {
    "xla": XlaAttention(),
    "native": NativeAttention(),
    "pallas": PallasAttention(interpret=True),
}
WRITERS = {"xla": write_kv, "native": native_write_kv, "pallas": write_kv}
SHAPES = [
    # page_size, num_heads, num_kv_heads, num_queries, head_dim
    (4, 6, 2, 1, 64),
    (16, 6, 3, 16, 16),
    (24, 8, 1, 5, 48),
    (1, 4, 4, 1, 32),
]
BY_BACKEND = [pytest.param("native", marks=needs_machine_code), "xla", "pallas"]


def empty_layer(num_pages: int, num_kv_heads: int, page_size: int, head_dim: int) -> LayerKV:
    """Pages that nothing was written to, whose scales are NaN."""

    def make(shape: tuple[int, ...], dtype: Any) -> jax.Array:
        return jnp.full(shape, 77 if dtype == jnp.int8 else jnp.nan, dtype)

    layout = PageLayout(num_kv_heads, head_dim, is_int8=True)
    return layout.make_layer(num_pages, page_size, jnp.dtype(jnp.float32), make)


def in_int8(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Whole numbers and scales of heads [..., h], computed here by numpy."""
    scale = np.abs(x).max(-1) * np.float32(1 / 127)
    return np.round(x / np.where(scale > 0, scale, 1)[..., None]).clip(-127, 127), scale


def rounded(x: np.ndarray) -> np.ndarray:
    """Heads [..., h] as int8 holds them."""
    numbers, scale = in_int8(x)
    return numbers * scale[..., None]


def int8_case(shape: tuple[int, ...], lengths: tuple[int, ...] = (16, 17, 33, 290)) -> RaggedCase:
    """`case_of` with pages of 8 bits, whose keys and values are the rounded ones.

    What no key was written to has a scale of NaN.
    """
    return in_8_bits(case_of(shape, lengths=lengths))


def in_8_bits(case: RaggedCase) -> RaggedCase:
    """The case with pages of 8 bits, see `int8_case`."""
    num_pages, num_kv_heads, page_size, head_dim = case.layer.k.shape
    layer = empty_layer(num_pages, num_kv_heads, page_size, head_dim)
    for table, keys, values in zip(case.tables.page_table, case.keys, case.values, strict=False):
        at = np.arange(len(keys))
        slots = table[at // page_size] * page_size + at % page_size
        layer = write_kv(layer, jnp.asarray(keys), jnp.asarray(values), slots)
    keys, values = (list(map(rounded, each)) for each in (case.keys, case.values))
    return case._replace(keys=keys, values=values, layer=layer)


def shapes_of(backend: str) -> list[Any]:
    """Those of `SHAPES` that a backend takes: Triton's sizes are powers of two."""
    marks = [needs_machine_code] if backend == "native" else []
    shapes = [shape for shape in SHAPES if backend != "pallas" or shape[4] != 48]
    return [
        pytest.param(backend, shape, marks=[*marks, *([] if i < 2 else [pytest.mark.slow])])
        for i, shape in enumerate(shapes)
    ]


@pytest.mark.parametrize("options", tiered(["default", "window-20", "all"], ["all"]))
@pytest.mark.parametrize(
    ("backend", "shape"), [each for backend in BACKENDS for each in shapes_of(backend)]
)
def test_ragged_blocks(backend, shape, options):
    case = int8_case(shape)
    case.check(case.run(BACKENDS[backend].attend, OPTIONS[options]), OPTIONS[options], 3e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("backend", BY_BACKEND)
def test_half_precision(backend, dtype):
    """Queries are rounded before the comparison: what is left is that of weights and outputs."""
    case = int8_case(SHAPES[1])
    queries, options = jnp.asarray(case.queries, dtype), OPTIONS["default"]
    attend = jax.jit(functools.partial(BACKENDS[backend].attend), static_argnums=3)
    out = attend(queries, case.layer, case.tables, options)
    assert out.dtype == dtype
    case = case._replace(queries=np.asarray(queries, np.float32))
    case.check(np.asarray(out, np.float32), options, 2e-2)


@pytest.mark.parametrize("num_kv_heads", [1, 3])
@pytest.mark.parametrize("backend", tiered([*WRITERS], ["xla", "native"]))
def test_tokens_are_rounded_where_they_are_written(backend, num_kv_heads):
    rng = np.random.default_rng(num_kv_heads)
    page_size, head_dim, count = 12, 32, 21
    layer = empty_layer(5, num_kv_heads, page_size, head_dim)
    sizes = 10.0 ** rng.integers(-44, 38, (2, count, num_kv_heads, 1))
    k, v = np.asarray(rng.normal(size=(2, count, num_kv_heads, head_dim)) * sizes, np.float32)
    k[3], v[4] = 0, 0
    slots = rng.permutation(5 * page_size)[:count].astype(np.int32)
    slots[:3] = np.iinfo(np.int32).max, 5 * page_size, np.iinfo(np.int32).max
    write = jax.jit(WRITERS[backend])
    after = write(layer, jnp.asarray(k), jnp.asarray(v), jnp.asarray(slots))
    for pages, scales, untouched, new in (
        (after.k, after.k_scale, layer.k, k),
        (after.v, after.v_scale, layer.v, v),
    ):
        numbers, scale = in_int8(new)
        expected = np.asarray(untouched).swapaxes(1, 2).reshape(-1, num_kv_heads, head_dim).copy()
        expected_scales = np.full(expected.shape[:2], np.nan, np.float32)
        expected[slots[3:]], expected_scales[slots[3:]] = numbers[3:], scale[3:]
        wanted, wanted_scales = (as_pages(x, page_size) for x in (expected, expected_scales))
        np.testing.assert_allclose(scales, wanted_scales, rtol=1e-6, atol=1e-37)
        is_normal = ~(wanted_scales < 1e-37)[..., None]  # other scales may be flushed to 0
        np.testing.assert_array_equal(np.where(is_normal, pages, 0), np.where(is_normal, wanted, 0))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("is_key", [True, False])
@pytest.mark.parametrize("backend", tiered(["native", "xla", "pallas"], ["native", "xla"]))
def test_an_overflowed_token_spoils_those_that_see_it(backend, is_key, bad):
    """It is no plausible number, and the tokens before it in its block are as without it."""
    page_size, head_dim, count, at = 4, 16, 16, 9
    rng = np.random.default_rng(0)
    q, k, v = np.asarray(rng.normal(size=(3, count, 2, head_dim)), np.float32)
    tables = BlockTables(
        jnp.arange(4, dtype=jnp.int32)[None],
        jnp.arange(count, dtype=jnp.int32)[None],
        jnp.asarray([count], jnp.int32),
    )
    slots = jnp.arange(count, dtype=jnp.int32)
    run = jax.jit(functools.partial(BACKENDS[backend].write_and_attend), static_argnums=4)

    def outputs() -> np.ndarray:
        layer = empty_layer(4, 2, page_size, head_dim)
        new = NewTokens(jnp.asarray(q), jnp.asarray(k), jnp.asarray(v))
        return np.asarray(run(new, layer, tables, slots, OPTIONS["default"])[0])

    sound = outputs()
    (k if is_key else v)[at, 1, 3] = bad
    spoiled = outputs()
    np.testing.assert_array_equal(spoiled[:at], sound[:at])
    np.testing.assert_array_equal(spoiled[:, 0], sound[:, 0])
    assert np.isnan(spoiled[at:, 1]).all()


@needs_machine_code
@pytest.mark.parametrize("options", tiered(["default", "window-20", "all"], ["all"]))
def test_a_query_has_the_same_bits_in_any_block(options):
    """In blocks of a prefill as alone, in decode, and beside other rows."""
    case = int8_case((16, 4, 2, 16, 32), (16, 290, 600))
    out = case.run(NativeAttention().attend, OPTIONS[options])
    for row in range(3):
        for query in (0, 7, 15):
            position = int(case.tables.positions[row, query])
            tables = BlockTables(
                case.tables.page_table[row : row + 1],
                jnp.asarray([[position]], jnp.int32),
                jnp.asarray([position + 1], jnp.int32),
            )
            queries = case.queries[row : row + 1, query : query + 1]
            alone = case._replace(queries=queries, tables=tables)
            found = alone.run(NativeAttention().attend, OPTIONS[options])
            np.testing.assert_array_equal(found[0, 0], out[row, query])


@pytest.mark.parametrize(
    ("attention", "same_bits"),
    [
        pytest.param(NativeAttention(), True, marks=needs_machine_code),
        (PallasAttention(interpret=True, is_invariant=True), True),
        (PallasAttention(interpret=True), False),
    ],
)
def test_rows_that_share_first_pages(attention, same_bits):
    """Six samples of a prompt; the kernel of CPUs finds them, that of GPUs is told."""
    case = in_8_bits(
        ragged_case(
            (600, 601, 577, 900, 599, 560),
            page_size=16,
            num_heads=4,
            num_kv_heads=2,
            num_queries=1,
            head_dim=32,
            prefixes=(0, 35, 35, 35, 35, 34),
        )
    )
    options, (page_table, positions, kv_lens, _) = OPTIONS["default"], case.tables
    runs = None
    if attention.shares_prompts:
        runs = find_runs(page_table, kv_lens - 1, 16, jnp.int32(128), 16)
    tables = BlockTables(page_table, positions, kv_lens, runs)
    together = case._replace(tables=tables).run(attention.attend, options)
    case.check(together, options, 3e-5)
    for row in range(6):
        one = slice(row, row + 1)
        own = BlockTables(page_table[one], positions[one], kv_lens[one])
        alone = case._replace(queries=case.queries[row : row + 1], tables=own)
        found = alone.run(attention.attend, options)[0]
        if same_bits:
            np.testing.assert_array_equal(found, together[row])


def test_values_of_a_layer_without_scales_are_stored_as_they_are():
    zeros = jnp.zeros((2, 1, 4, 8))
    k = jnp.full((3, 1, 8), jnp.nan)
    assert stored_tokens(LayerKV(zeros, zeros), k, k) == LayerKV(k, k)
    assert stored_tokens(LayerKV(zeros, None), k, None) == LayerKV(k, None)
