"""Prefill attention of GPUs in whole tiles: interpreted against float64, and lowered for CUDA."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sgljax_engine.attention import pallas
from sgljax_engine.attention.base import AttentionOptions, BlockTables
from sgljax_engine.attention.pallas import PallasAttention
from sgljax_engine.cache.kv_pages import LayerKV
from sgljax_engine.kernels.gpu.paged_attention import HEAD_DIMS, Scores, paged_attention
from sgljax_engine.kernels.gpu.prefill_attention import (
    choose_prefill_tiling,
    fills_gpu,
    make_tiles,
    prefill_attention,
)
from sgljax_engine.layers.fused import FusedProducts
from tests.engine import gpu_interpreted
from tests.engine.paged_cases import (
    OPTIONS,
    RaggedCase,
    greedy_tokens,
    ragged_case,
    reference,
    spread,
)
from tests.engine.test_pallas_attention import lowering_for_a_gpu

QUICK_COMPILE = "interpreted kernels of GPUs, which no user compiles for CPUs"

BLOCK = 16
CHUNKS = ((0, 16), (16, 100), (0, 1), (37, 290), (250, 266))
"""Start and end of the prompt tokens of each request in a batch; keys before are in pages."""

SHAPES = {
    # page_size, num_heads, num_kv_heads, head_dim
    "tiny-pages": (1, 4, 2, 64),
    "mha": (16, 3, 3, 32),
    "mqa": (128, 8, 1, 128),
    "group-of-six": (4, 6, 1, 16),
    "group-of-16": (16, 16, 1, 256),
    "wide": (16, 2, 2, 512),
}


class Prompts:
    """Chunks of prompts in blocks of 16 tokens, as prefill cuts them, over a poisoned page pool.

    Positions of padding are 0, and the last block is unused, as in a batch of the engine.
    """

    def __init__(
        self, shape: tuple[int, ...], dtype: Any, chunks: Sequence[tuple[int, int]] = CHUNKS
    ) -> None:
        page_size, num_heads, num_kv_heads, head_dim = shape
        self.chunks = chunks
        self.case: RaggedCase = ragged_case(
            [end for _, end in chunks],
            page_size=page_size,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            num_queries=1,
            head_dim=head_dim,
            dtype=dtype,
        )
        counts = [-(-(end - start) // BLOCK) for start, end in chunks]
        self.blocks = np.cumsum([0, *counts])
        num_blocks = self.blocks[-1] + 1
        rng = np.random.default_rng(2)
        drawn = rng.normal(size=(num_blocks, BLOCK, num_heads, head_dim))
        self.queries = jnp.asarray(drawn, dtype)
        positions = np.zeros((num_blocks, BLOCK), np.int32)
        kv_lens = np.zeros(num_blocks, np.int32)
        for (start, end), block, count in zip(chunks, self.blocks, counts, strict=False):
            positions[block : block + count].reshape(-1)[: end - start] = np.arange(start, end)
            ends = start + BLOCK * np.arange(1, count + 1)
            kv_lens[block : block + count] = np.minimum(ends, end)
        table = np.repeat(np.asarray(self.case.tables.page_table), [*counts, 1], axis=0)
        self.tables = BlockTables(jnp.asarray(table), jnp.asarray(positions), jnp.asarray(kv_lens))

    def run(self, options: AttentionOptions, blocks: slice = slice(None)) -> np.ndarray:
        """The interpreted kernel's output for a batch of all blocks, or of some."""

        @jax.jit
        def attend(q: jax.Array, layer: LayerKV, tables: BlockTables) -> jax.Array:
            k, v = layer.k, layer.values
            return prefill_attention(q, k, v, *tables[:3], Scores(*options), interpret=True)

        table, positions, kv_lens = (x[blocks] for x in self.tables[:3])
        tables = BlockTables(table, positions, kv_lens)
        out = attend(self.queries[blocks], self.case.layer, tables)
        assert out.dtype == self.queries.dtype
        return np.asarray(out, np.float32)

    def of_request(self, index: int, x: Any) -> np.ndarray:
        """A request's tokens of an array of blocks."""
        start, end = self.chunks[index]
        first, last = self.blocks[index : index + 2]
        return np.asarray(x, np.float32)[first:last].reshape(-1, *x.shape[2:])[: end - start]

    def check(self, out: np.ndarray, options: AttentionOptions, atol: float) -> None:
        """Compares an output with `reference`; it is finite everywhere, and 0 if unused."""
        for i, (keys, values) in enumerate(zip(self.case.keys, self.case.values, strict=True)):
            queries, positions = self.of_request(i, self.queries), np.arange(*self.chunks[i])
            expected = reference(queries, keys, values, positions, options)
            np.testing.assert_allclose(self.of_request(i, out), expected, atol=atol)
        assert np.isfinite(out).all()
        np.testing.assert_array_equal(out[-1], 0)


@pytest.mark.parametrize(
    ("shape", "options"),
    [("group-of-six", "window-20"), *spread(list(SHAPES), list(OPTIONS), road="other")],
)
def test_chunks_of_prompts(shape, options):
    prompts = Prompts(SHAPES[shape], jnp.float32)
    prompts.check(prompts.run(OPTIONS[options]), OPTIONS[options], atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision(dtype):
    """Inputs are rounded before the comparison: what is left is that of weights and outputs."""
    prompts = Prompts(SHAPES["mqa"], dtype)
    prompts.check(prompts.run(OPTIONS["all"]), OPTIONS["all"], atol=2e-2)


def tiles_of(prompts: Prompts, blocks: int) -> list[tuple[int, int]]:
    """First block and number of blocks of each tile, in order."""
    found = make_tiles(*prompts.tables[:3], prompts.case.layer.page_size, blocks)
    pairs = zip(found.first.tolist(), found.num_blocks.tolist(), strict=True)
    return [(first, num_blocks) for first, num_blocks in pairs if num_blocks]


def test_blocks_that_continue_each_other_share_a_tile():
    """Not those of another request whose positions happen to follow; the longest first."""
    prompts = Prompts(SHAPES["mqa"], jnp.float32)
    assert prompts.blocks.tolist() == [0, 1, 7, 8, 24, 25]
    wanted = [(16, 8), (24, 1), (8, 8), (1, 6), (0, 1), (7, 1), (25, 1)]
    assert tiles_of(prompts, 8) == wanted
    assert sum(count for _, count in tiles_of(prompts, 1)) == 26


@pytest.mark.slow
def test_requests_with_the_same_earlier_keys_share_a_tile():
    """The second has the first one's page and goes on where that ends: its keys are the same."""
    prompts = Prompts((16, 8, 1, 128), jnp.float32, ((0, 16), (16, 40)))
    table = np.array(prompts.tables.page_table)
    table[1:3, 0] = table[0, 0]
    prompts.tables = prompts.tables._replace(page_table=jnp.asarray(table))
    for x in (prompts.case.keys, prompts.case.values):
        x[1] = np.concatenate([x[0], x[1][16:]])
    assert tiles_of(prompts, 8) == [(0, 3), (3, 1)]
    prompts.check(prompts.run(OPTIONS["default"]), OPTIONS["default"], atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("options", ["default", "window-20"])
def test_batch_mates_and_chunks_change_no_bit(options):
    """A request among others, alone, and in a chunk that begins elsewhere in a tile."""
    prompts = Prompts((16, 4, 2, 64), jnp.bfloat16, ((5, 33), (0, 290), (0, 61)))
    first, end = prompts.blocks[1:3]
    among = prompts.run(OPTIONS[options])
    for begin in (first, first + 3):
        found = among.copy()
        found[begin:end] = prompts.run(OPTIONS[options], slice(begin, end))
        found = prompts.of_request(1, found)
        np.testing.assert_array_equal(found, prompts.of_request(1, among))


def test_tilings():
    """Tiles of 128 rows without empty ones, and no more state than registers hold."""
    for num_heads, head_dim, expected in (
        (16, 128, (2, 4, 128, 1)),
        (40, 128, (1, 8, 128, 1)),
        (64, 64, (8, 1, 128, 1)),
        (16, 256, (2, 4, 64, 1)),
        (8, 512, (1, 8, 32, 2)),
    ):
        assert choose_prefill_tiling((64, 16, num_heads, head_dim), 8) == expected
    pages: Any = jax.ShapeDtypeStruct((64, 8, 16, 128), jnp.bfloat16)
    assert fills_gpu((32, 16, 16, 128), pages)
    assert not fills_gpu((16, 16, 16, 128), pages), "contexts are split instead"
    assert not fills_gpu((512, 1, 16, 128), pages), "decode"
    assert not fills_gpu((32, 16, 16, 128), pages.update(dtype=jnp.float32))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_lowers_for_cuda(head_dim):
    """The backend's choice for a batch that fills a GPU."""
    half = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    count = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    layer = LayerKV(*[half((64, 4, 16, head_dim))] * 2)  # type: ignore[arg-type]
    tables = BlockTables(count((64, 32)), count((64, BLOCK)), count((64,)))  # type: ignore[arg-type]

    def attend(q: jax.Array, layer: LayerKV, tables: BlockTables) -> jax.Array:
        return PallasAttention(is_fused=True).attend(q, layer, tables, OPTIONS["all"])

    with lowering_for_a_gpu():
        traced = jax.jit(attend).trace(half((64, BLOCK, 8, head_dim)), layer, tables)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@__gpu$xla.gpu.triton") == 1
    assert 'name = "prefill_attention"' in text


@pytest.mark.soak
def test_engine_with_tiles(monkeypatch):
    """Prefill through the kernel: the tokens of the portable backend."""
    expected = greedy_tokens(attention_backend="xla")
    queries_of_blocks = set()

    def fills(q_shape: tuple[int, ...], k: jax.Array) -> bool:
        del k
        queries_of_blocks.add(q_shape[1])
        return True

    gpu_interpreted.use_gpu_kernels(monkeypatch, FusedProducts(joins=False, adds=False))
    monkeypatch.setattr(pallas, "fills_gpu", fills)
    assert greedy_tokens(**gpu_interpreted.OPTIONS) == expected
    assert queries_of_blocks == {BLOCK}


@pytest.mark.gpu
@pytest.mark.skipif(
    jax.default_backend() != "gpu", reason="the compiled kernel needs an NVIDIA GPU"
)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_on_hardware(shape, options):
    """The compiled kernel against the interpreted one's reference and the kernel without tiles."""
    prompts = Prompts(shape, jnp.bfloat16)
    args = (prompts.queries, *prompts.case.layer[:2], *prompts.tables, Scores(*options))
    out = np.asarray(jax.jit(prefill_attention, static_argnums=6)(*args), np.float32)
    prompts.check(out, options, atol=2e-2)
    other = jax.jit(paged_attention, static_argnums=6)(*args)
    for index in range(len(prompts.chunks)):
        np.testing.assert_allclose(
            prompts.of_request(index, out), prompts.of_request(index, other), atol=2e-2
        )
