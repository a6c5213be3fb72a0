"""Decode attention over rows copied out of pages, against numpy in float64, and in an engine."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sgljax_engine import Engine, InvalidConfigError, SamplingParams
from sgljax_engine.attention import batch_invariant as ordered_attention
from sgljax_engine.attention import contiguous as contiguous_module
from sgljax_engine.attention.base import AttentionOptions
from sgljax_engine.attention.contiguous import contiguous_attention, shared_keys
from sgljax_engine.cache import contiguous_kv as contiguous_kv
from sgljax_engine.cache.contiguous_kv import (
    LayerContiguousKV,
    RowTable,
    contiguous_shapes,
    gather_contiguous_kv,
    write_contiguous_kv,
)
from sgljax_engine.runner.kv import plan as memory
from tests import inside
from tests.engine.models import TINY, random_prompts, spread_weights
from tests.engine.paged_cases import ragged_case, reference, spread
from tests.geometry import SMALL
from tests.tiers import tiered

DEFAULT = AttentionOptions(scale=0.25)
OPTIONS = {
    "default": DEFAULT,
    "window-1": DEFAULT._replace(sliding_window=1),
    "window-70": DEFAULT._replace(sliding_window=70),
    "all": AttentionOptions(scale=0.5, sliding_window=100, logit_softcap=2.0),
}
FREE_BYTES = 1 << 26


@pytest.fixture
def lanes(request, monkeypatch):
    """Vectors of every length that a CPU may have, whatever this one has."""
    for module in (contiguous_kv, ordered_attention, contiguous_module):
        monkeypatch.setattr(module, "LANES", request.param)


@pytest.mark.parametrize(
    ("simd", "expected"),
    [
        ({"baseline": ["X86_V2"], "found": ["X86_V3", "X86_V4"]}, 16),
        ({"baseline": ["SSE", "SSE2"], "found": ["AVX2", "AVX512F", "AVX512_SKX"]}, 16),
        ({"baseline": ["SSE", "AVX512F"]}, 16),
        ({"baseline": ["X86_V2"], "found": ["X86_V3"], "not found": ["X86_V4"]}, 8),
        ({"baseline": ["NEON"], "found": []}, 8),
        ({}, 8),
    ],
)
def test_lanes_fill_a_vector(simd, expected):
    assert contiguous_kv.lanes_for(simd) == expected


def poisoned_rows(num_rows, max_len, num_kv_heads, head_dim, dtype=np.float32):
    """Rows of NaN: using what no dispatch has written would show."""
    shapes = contiguous_shapes(num_rows, max_len, num_kv_heads, head_dim)
    return LayerContiguousKV(*(jnp.full(shape, jnp.nan, dtype) for shape in shapes))


def over_rows(max_len):
    """Row attention as a paged backend for one query a block."""

    def backend(q, layer, tables, options):
        num_kv_heads, head_dim = layer.k.shape[1], layer.k.shape[3]
        rows = poisoned_rows(len(q), max_len, num_kv_heads, head_dim, layer.k.dtype)
        end = jnp.max(tables.kv_lens)
        (rows,) = gather_contiguous_kv(
            (rows,), (layer,), [RowTable(tables.page_table)], tables.kv_lens, end, jnp.int32(0)
        )
        shared = shared_keys(tables.page_table, tables.kv_lens, layer.k.shape[2])
        return contiguous_attention(q[:, 0], rows, tables.kv_lens, shared, options)[:, None]

    return backend


SHAPES = [
    (1, 4, 2, 16),
    (4, 8, 1, 16),
    (16, 4, 2, 64),
    (48, 3, 3, 32),
    (64, 6, 2, 16),
    (128, 8, 1, 16),
]
"""page_size, num_heads, num_kv_heads, head_dim"""


@pytest.mark.parametrize(
    ("shape", "options", "lanes"),
    [((4, 8, 1, 16), "window-70", 8), *spread(SHAPES, list(OPTIONS), [8, 16], road="rare")],
    indirect=["lanes"],
)
@pytest.mark.usefixtures("lanes")
def test_ragged_rows(shape, options):
    page_size, num_heads, num_kv_heads, head_dim = shape
    options = OPTIONS[options]
    case = ragged_case(
        [1, 17, 64, 65, 150],
        page_size=page_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        num_queries=1,
        head_dim=head_dim,
    )
    case.check(case.run(over_rows(200), options), options, atol=2e-5)


@pytest.mark.soak
@pytest.mark.usefixtures("lanes")
@pytest.mark.parametrize(("num_rows", "lanes"), [(16, 8), (40, 16)], indirect=["lanes"])
def test_tiles(num_rows):
    """More rows than a tile holds, in whole tiles and not."""
    lengths = np.random.default_rng(1).integers(1, 200, num_rows - 1)
    case = ragged_case(
        lengths, page_size=16, num_heads=2, num_kv_heads=1, num_queries=1, head_dim=16
    )
    case.check(case.run(over_rows(200), DEFAULT), DEFAULT, atol=2e-5)


@pytest.mark.soak
@pytest.mark.usefixtures("lanes")
@pytest.mark.parametrize("lanes", [16], indirect=True)
def test_bfloat16():
    case = ragged_case(
        [1, 17, 150],
        page_size=16,
        num_heads=4,
        num_kv_heads=2,
        num_queries=1,
        head_dim=32,
        dtype=jnp.bfloat16,
    )
    case.check(case.run(over_rows(160), DEFAULT), DEFAULT, atol=2e-2)


@pytest.mark.soak
@pytest.mark.usefixtures("lanes")
@pytest.mark.parametrize("lanes", [8], indirect=True)
def test_new_tokens_join_the_copied_ones():
    """Step by step across the end of a chunk, as a decode dispatch does it."""
    lengths, num_steps = np.array([60, 1, 127]), 8
    case = ragged_case(
        lengths, page_size=16, num_heads=4, num_kv_heads=2, num_queries=1, head_dim=16
    )
    rng = np.random.default_rng(2)
    rows = poisoned_rows(4, 140, 2, 16)
    end = jnp.max(case.tables.kv_lens) + num_steps
    (rows,) = gather_contiguous_kv(
        (rows,),
        (case.layer,),
        [RowTable(case.tables.page_table)],
        case.tables.kv_lens,
        end,
        jnp.int32(0),
    )
    keys, values = list(case.keys), list(case.values)
    is_used = jnp.asarray([True, True, True, False])
    write, attend = jax.jit(write_contiguous_kv), jax.jit(contiguous_attention, static_argnums=4)
    for step in range(num_steps):
        k, v = (rng.normal(size=(4, 2, 16)).astype(np.float32) for _ in range(2))
        positions = jnp.asarray([*(lengths + step), 0], jnp.int32)
        rows = write(rows, jnp.asarray(k), jnp.asarray(v), positions, is_used)
        q = rng.normal(size=(4, 4, 16)).astype(np.float32)
        lens = jnp.where(is_used, positions + 1, 0)
        nothing = jnp.zeros_like(lens)
        out = attend(jnp.asarray(q), rows, lens, nothing, DEFAULT)
        for i in range(3):
            keys[i], values[i] = (
                np.concatenate([keys[i], k[i : i + 1]]),
                np.concatenate([values[i], v[i : i + 1]]),
            )
            at = np.array([len(keys[i]) - 1])
            expected = reference(q[i : i + 1], keys[i], values[i], at, DEFAULT)
            np.testing.assert_allclose(out[i : i + 1], expected, atol=2e-5)


class TestSharing:
    """Rows of a unit whose first keys are in the same pages."""

    PAGE = 16

    @pytest.mark.parametrize(
        ("tables", "lens", "expected"),
        [
            pytest.param([[1, 2, 3, 4, 5 + i] for i in range(4)], [70] * 4, [64] * 4, id="all"),
            pytest.param([[1, 2, 3, 4, 5]] * 4, [70, 80, 63, 80], [0] * 4, id="one-too-short"),
            pytest.param([[1, 2, 3, 5 + i, 4] for i in range(4)], [80] * 4, [0] * 4, id="48"),
            pytest.param(
                [[1, 2, 3, 4, 5 + i] for i in range(4)], [70, 0, 70, 0], [64] * 4, id="two-used"
            ),
            pytest.param([[1, 2, 3, 4, 5]] * 4, [70, 0, 0, 0], [0] * 4, id="one-used"),
            pytest.param([[1, 2, 3, 4, 5]] * 4, [0, 70, 70, 70], [0] * 4, id="first-unused"),
            pytest.param(
                [*[[1, 2, 3, 4, 5 + i] for i in range(4)], *[[9, 8, 7, 6, i] for i in range(3)]],
                [70] * 4 + [128] * 3,
                [64] * 7,
                id="two-units",
            ),
        ],
    )
    def test_shared_keys(self, tables, lens, expected):
        found = shared_keys(jnp.asarray(tables), jnp.asarray(lens, jnp.int32), self.PAGE)
        assert found.tolist() == expected

    @pytest.mark.parametrize("page_size", tiered([1, 24, 64, 128], [24]))
    def test_shared_keys_of_any_page_size(self, page_size):
        count = 256 // page_size + 1
        table = jnp.arange(4 * count, dtype=jnp.int32).reshape(4, count)
        num_same = 170 // page_size
        table = table.at[:, :num_same].set(table[0, :num_same])
        found = shared_keys(table, jnp.full(4, 250, jnp.int32), page_size)
        assert found.tolist() == [num_same * page_size // 64 * 64] * 4

    @pytest.mark.usefixtures("lanes")
    @pytest.mark.parametrize(
        ("options", "num_rows", "lanes"),
        spread(list(OPTIONS), [4, 8, 24], [8, 16], road="rare"),
        indirect=["lanes"],
    )
    def test_same_bits_as_without(self, options, num_rows):
        options = OPTIONS[options]
        lengths = np.random.default_rng(3).integers(140, 200, num_rows)
        case = ragged_case(
            lengths, page_size=16, num_heads=4, num_kv_heads=2, num_queries=1, head_dim=16
        )
        # Units share 128, 64 and no keys, again and again; the last row of all is unused.
        table = np.array(case.tables.page_table)
        lens = np.array(case.tables.kv_lens)
        for unit in range(num_rows // 4):
            count = (8, 4, 0)[unit % 3]
            table[4 * unit : 4 * unit + 4, :count] = table[4 * unit, :count]
        lens[num_rows - 1] = 0
        tables = case.tables._replace(page_table=jnp.asarray(table), kv_lens=jnp.asarray(lens))
        tables = jax.tree.map(lambda x: x[:num_rows], tables)
        shared = shared_keys(tables.page_table, tables.kv_lens, 16)
        expected = [(128, 64, 0)[row // 4 % 3] for row in range(num_rows)]
        assert shared.tolist() == expected
        rows = poisoned_rows(num_rows, 200, 2, 16)
        (rows,) = gather_contiguous_kv(
            (rows,),
            (case.layer,),
            [RowTable(tables.page_table)],
            tables.kv_lens,
            jnp.int32(200),
            jnp.int32(0),
        )
        q = jnp.asarray(np.random.default_rng(4).normal(size=(num_rows, 4, 16)), jnp.float32)
        attend = jax.jit(contiguous_attention, static_argnums=4)
        found = attend(q, rows, tables.kv_lens, shared, options)
        alone = attend(q, rows, tables.kv_lens, jnp.zeros_like(shared), options)
        np.testing.assert_array_equal(found[:-1], alone[:-1])
        # And the leaders' keys are what is read: others' are not needed.
        spoilt = jax.tree.map(lambda x: x.at[0, 1:4].set(jnp.nan), rows)
        if num_rows == 4 and options.sliding_window is None:
            again = attend(q, spoilt, tables.kv_lens, shared, options)
            np.testing.assert_array_equal(again[1], found[1])


class TestEngine:
    def generate(self, backend):
        prompts = random_prompts(20, 3, 90)
        params = SamplingParams(max_new_tokens=40, temperature=0.0, ignore_eos=True)
        with Engine(
            model_config=TINY,
            weights=spread_weights(),
            attention_backend=backend,
            linear_backend="xla",
            **SMALL,
        ) as engine:
            outputs = engine.generate_requests(prompts, params)
            assert bool(engine.get_internal_state().memory.contiguous_kv_bytes) == (
                backend == "xla_rows"
            )
        return outputs

    @pytest.mark.soak
    def test_backends_agree(self):
        for one, other in zip(self.generate("xla"), self.generate("xla_rows"), strict=True):
            assert one.output_ids == other.output_ids
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            # no engine takes a step
            ({"max_running_requests": 512}, r"'xla_rows' takes \d+ bytes for 512 rows of 256"),
            ({}, rf"needs a head_dim that is a multiple of {contiguous_kv.LANES}, got 4"),
        ],
    )
    def test_what_does_not_fit(self, monkeypatch, options, message):
        """Refused when asked for by name; "auto" reads pages instead."""
        monkeypatch.setattr(memory, "free_bytes", lambda _: FREE_BYTES)
        model = TINY if options else dataclasses.replace(TINY, head_dim=4)
        arguments = {  # no engine takes a step
            "model_config": model,
            "weights": spread_weights(model),
            "num_kv_tokens": 1024,
            **options,
        }
        with pytest.raises(InvalidConfigError, match=message):
            Engine(attention_backend="xla_rows", **arguments)
        with Engine(**arguments) as engine:
            assert engine.get_internal_state().memory.contiguous_kv_bytes == 0
            assert inside.runner(engine).kv_memory.contiguous_kv == ()

    @pytest.mark.soak
    def test_rows_are_allocated_once(self):
        """Every dispatch hands the same memory back."""
        params = SamplingParams(max_new_tokens=20, temperature=0.0, ignore_eos=True)
        with Engine(
            model_config=TINY,
            weights=spread_weights(),
            attention_backend="xla_rows",
            linear_backend="xla",
            **SMALL,
        ) as engine:
            runner = inside.runner(engine)

            def pointers():
                return sorted(
                    x.unsafe_buffer_pointer()
                    for x in jax.tree.leaves(runner.kv_memory.contiguous_kv)
                )

            engine.generate_requests(random_prompts(3, 3, 9), params)
            before = pointers()
            engine.generate_requests(random_prompts(3, 3, 9), params)
            assert len(before) == 2 * TINY.num_layers
            assert pointers() == before
