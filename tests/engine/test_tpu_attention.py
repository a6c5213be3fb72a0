"""The kernel for TPUs, interpreted as a TPU would run it, against float64."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu

from sgljax_engine import InvalidConfigError
from sgljax_engine.attention import tpu
from sgljax_engine.attention.base import AttentionOptions, BlockTables, NewTokens
from sgljax_engine.attention.registry import engine_attention
from sgljax_engine.attention.tpu import TpuAttention, heads_per_row
from sgljax_engine.cache.kv_pages import LayerKV, PageLayout
from sgljax_engine.kernels.tpu import paged_attention as kernel
from sgljax_engine.kernels.tpu.paged_sizes import Sizes
from sgljax_engine.layers.kernels import XlaKernels
from sgljax_engine.placement.submeshes import place
from tests.engine.models import TINY
from tests.engine.page_layouts import pack, unpack
from tests.engine.paged_cases import (
    OPTIONS,
    as_pages,
    case_of,
    greedy_tokens,
    reference,
    spread,
)

QUICK_COMPILE = "interpreted kernels of TPUs, which no user compiles for CPUs"

SHAPES = {
    # page_size, num_heads, num_kv_heads, num_queries, head_dim
    "decode-gqa-2": (16, 4, 2, 1, 128),
    "decode-mha": (8, 3, 3, 1, 128),
    "decode-mqa-16": (32, 16, 1, 1, 256),
    "prefill-gqa-3": (8, 6, 2, 16, 128),
    "prefill-wide": (16, 2, 1, 16, 256),
    "prefill-small-pages": (4, 4, 2, 16, 128),
    "decode-very-wide": (8, 8, 1, 1, 512),
    "prefill-very-wide": (8, 4, 2, 16, 512),
}
PACKED = {
    "decode-two-heads-a-row": (16, 8, 4, 1, 64),
    "decode-an-odd-head": (8, 6, 3, 1, 64),
    "decode-one-head": (16, 4, 1, 1, 32),
    "prefill-two-heads-a-row": (16, 8, 4, 16, 64),
    "prefill-an-odd-head": (8, 6, 3, 16, 64),
}
"""Heads narrower than a row of a page."""

SIMPLE = TpuAttention(interpret=True)
RACING = TpuAttention(interpret=pltpu.InterpretParams(detect_races=True))
"""Copies and grid steps as a TPU may order them; notes two that touch memory at the same time."""


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    """Several chunks even for short contexts."""
    monkeypatch.setattr(kernel, "_MAX_CHUNK_TOKENS", 64)


@pytest.mark.parametrize(
    ("shape", "options"), spread([*SHAPES, *PACKED], list(OPTIONS), road="other")
)
def test_reading(shape, options):
    case = case_of({**SHAPES, **PACKED}[shape])
    case.check(case.run(SIMPLE.attend, OPTIONS[options]), OPTIONS[options], atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape", [(16, 4, 2, 1, 128), pytest.param((16, 4, 2, 16, 128), marks=pytest.mark.soak)]
)
def test_bfloat16(shape):
    case = case_of(shape, jnp.bfloat16)
    case.check(case.run(SIMPLE.attend, OPTIONS["all"]), OPTIONS["all"], atol=2e-2)


class Writing:
    """Pages without the newest tokens, which the kernel is to write."""

    def __init__(self, shape: tuple[int, ...], blocks: list[list[int]], seed: int = 0) -> None:
        """Makes requests of several blocks, each block with so many tokens; 0 is unused.

        The first number of a request is how many tokens its pages hold already.
        """
        page_size, num_heads, num_kv_heads, num_queries, head_dim = shape
        self.page_size = page_size
        rng = np.random.default_rng(seed)
        lengths = [sum(request) for request in blocks]
        pages_each = [-(-length // page_size) for length in lengths]
        order = rng.permutation(sum(pages_each) + 2)
        width = max(pages_each) + 1
        self.requests, self.tables, self.queries, self.new = [], [], [], []
        pools = np.full((2, len(order) * page_size, num_kv_heads, head_dim), np.nan, np.float32)
        for request, length, count in zip(blocks, lengths, pages_each, strict=True):
            pages, order = order[:count], order[count:]
            at = np.arange(length)
            slots = pages[at // page_size] * page_size + at % page_size if length else at
            kv = rng.normal(size=(2, length, num_kv_heads, head_dim)).astype(np.float32)
            pools[:, slots[: request[0]]] = kv[:, : request[0]]
            self.requests.append((slots, kv))
            start = request[0]
            for num_tokens in request[1:]:
                table = np.zeros(width, np.int32)
                table[:count] = pages
                end = start + num_tokens if num_tokens else 0
                self.tables.append((table, start + np.arange(num_queries), end))
                self.queries.append(rng.normal(size=(num_queries, num_heads, head_dim)))
                block = rng.normal(size=(2, num_queries, num_kv_heads, head_dim))
                block[:, :num_tokens] = kv[:, start : start + num_tokens]
                self.new.append(block)
                start += num_tokens
        self.layer = LayerKV(*(jnp.asarray(as_pages(pool, page_size)) for pool in pools))
        self.owners = [i for i, request in enumerate(blocks) for _ in request[1:]]

    def check(
        self, attention: Any, options: AttentionOptions, *, is_read_again: bool = False
    ) -> None:
        """Compares outputs and pages with what they must be, and what reads the pages then."""
        table, positions, kv_lens = (
            jnp.asarray(np.stack(x), jnp.int32) for x in zip(*self.tables, strict=True)
        )
        tables = BlockTables(table, positions, kv_lens)
        queries, new = (np.asarray(x, np.float32) for x in (self.queries, self.new))
        call = jax.jit(attention.write_and_attend, static_argnums=4)
        num_kv_heads, head_dim = new.shape[3:]
        layout = PageLayout(num_kv_heads, head_dim, heads_per_row(head_dim))
        pages = LayerKV(*(jnp.asarray(pack(layout, np.asarray(part))) for part in self.layer[:2]))
        parts = queries, new[:, 0], new[:, 1]
        q, k, v = (jnp.asarray(x.reshape(-1, *x.shape[2:])) for x in parts)
        out, layer = call(NewTokens(q, k, v), pages, tables, None, options)
        out = out.reshape(queries.shape)
        layer = [unpack(layout, np.asarray(part)) for part in layer[:2]]
        self.check_outputs(out, queries, options)
        for which, pages in enumerate(layer):
            want = np.asarray(self.layer[which]).swapaxes(1, 2).reshape(-1, *new.shape[3:]).copy()
            for slots, kv in self.requests:
                want[slots] = kv[which]
            np.testing.assert_array_equal(pages, as_pages(want, self.page_size))
        if is_read_again:
            read = jax.jit(attention.attend, static_argnums=3)
            out = read(queries, LayerKV(*map(jnp.asarray, layer)), tables, options)
            self.check_outputs(out, queries, options)

    def check_outputs(self, out: Any, queries: np.ndarray, options: AttentionOptions) -> None:
        for n, (owner, (_, positions, end)) in enumerate(
            zip(self.owners, self.tables, strict=True)
        ):
            used = max(end - positions[0], 0)
            if not used:
                continue
            _, kv = self.requests[owner]
            want = reference(queries[n, :used], kv[0][:end], kv[1][:end], positions[:used], options)
            np.testing.assert_allclose(out[n, :used], want, atol=2e-5)


DECODE = [[40, 1], [0, 1], [63, 1], [5, 0], [64, 1], [150, 1], [0, 0], [7, 1]]
PREFILL = [[0, 16, 16, 5], [37, 16, 9], [8, 0], [70, 3], [0, 1], [127, 16]]
STEPS = [[0, 16, 3], [70, 3], [0, 0], [21, *[16] * 11, 9]]
"""Two steps of eight blocks; the second one is a part of one request."""


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ("decode-gqa-2", "all"),
        ("prefill-wide", "window-20"),
        pytest.param("prefill-an-odd-head", "all", marks=pytest.mark.slow),
        *spread([*SHAPES, *PACKED], list(OPTIONS), road="rare"),
    ],
)
def test_writing(shape, options):
    blocks = DECODE if shape.startswith("decode") else PREFILL
    Writing({**SHAPES, **PACKED}[shape], blocks).check(SIMPLE, OPTIONS[options])


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        pytest.param("prefill-gqa-3", "default", marks=pytest.mark.slow),
        *spread([x for x in SHAPES | PACKED if "prefill" in x], list(OPTIONS), road="rare"),
    ],
)
def test_steps_of_several_blocks(shape, options):
    sizes = {**SHAPES, **PACKED}[shape]
    queries = jnp.zeros((16, 16, sizes[1], max(sizes[4], 128)))
    assert kernel.step_blocks(queries, sizes[2]) == 8
    is_read_again = (shape, options) == ("prefill-gqa-3", "default")
    Writing(sizes, STEPS).check(SIMPLE, OPTIONS[options], is_read_again=is_read_again)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "blocks"),
    [
        ("decode-gqa-2", DECODE),
        ("prefill-gqa-3", PREFILL),
        pytest.param("prefill-small-pages", STEPS, marks=pytest.mark.soak),
    ],
)
def test_no_copies_race(shape, blocks):
    """Copies that run beside one another, and beside arithmetic, touch different memory."""
    pltpu.reset_tpu_interpret_mode_state()
    Writing(SHAPES[shape], blocks).check(RACING, OPTIONS["window-20"])
    races = interpret_pallas_call.races
    assert races is not None
    assert not races.races_found


@pytest.mark.parametrize(
    ("step_blocks", "lengths"),
    [(8, [2, 0, 1, 2, 0, 1, 1, 1]), (2, [2, 0, 1, 1, 1, 1, 1, 1]), (1, [1] * 8)],
)
def test_blocks_that_share_their_reads(step_blocks, lengths):
    """A block goes on with those before it whose keys it has, as blocks that are scored may."""
    paths = [[0], [0, 1], [0, 2], [0, 1, 3], [0, 1, 3, 4], [0, 1, 3, 4, 5], [], []]
    lens = [16, 32, 32, 48, 50, 66, 0, 0]
    starts = [0, 16, 16, 32, 48, 50, 0, 0]
    table = np.array([path + [0] * (6 - len(path)) for path in paths], np.int32)
    sizes = Sizes(step_blocks=step_blocks, num_queries=16, chunk_pages=1, page_size=16)
    found = kernel._run_lengths(jnp.array(table), jnp.array(starts), jnp.array(lens), sizes)
    assert found.tolist() == lengths


@pytest.mark.parametrize(
    ("num_blocks", "heads", "dtype", "count"),
    [
        (256, (16, 8, 128), "bfloat16", 8),
        (256, (32, 8, 128), "bfloat16", 4),
        (256, (16, 1, 256), "bfloat16", 2),
        (20, (4, 1, 128), "bfloat16", 4),
        (9, (4, 1, 128), "bfloat16", 1),
    ],
    ids=["qwen3-0.6b", "qwen3-8b", "mqa-16", "a few blocks", "an odd number"],
)
def test_blocks_of_a_step(num_blocks, heads, dtype, count):
    num_heads, num_kv_heads, head_dim = heads
    queries = jnp.zeros((num_blocks, 16, num_heads, head_dim), dtype)
    assert kernel.step_blocks(queries, num_kv_heads) == count
    assert kernel.step_blocks(queries[:, :1], num_kv_heads) == 1


def test_costs_count_what_a_window_shows():
    """Compares 64 rows of 4,096 keys, with a window of 512 and without."""

    def cost(window: int | None) -> Any:
        rows, pages = (64, 1, 8, 256), (16, 1, 16, 256)
        arrays: Any = (jax.ShapeDtypeStruct(pages, jnp.bfloat16),) * 2
        layer = LayerKV(*arrays)
        ints: Any = [jax.ShapeDtypeStruct(x, jnp.int32) for x in ((64, 256), (64, 1), (64,))]
        options = AttentionOptions(scale=1.0, sliding_window=window)
        queries = jax.ShapeDtypeStruct(rows, jnp.bfloat16)
        traced = jax.make_jaxpr(TpuAttention().attend, static_argnums=3)(
            queries, layer, BlockTables(*ints), options
        )
        (call,) = (eqn for eqn in traced.eqns if eqn.primitive.name == "pallas_call")
        return call.params["cost_estimate"]

    full, windowed = cost(None), cost(512)
    queries = 2 * 64 * 8 * 256 * 2
    a_page = 2 * 16 * 256 * 2
    assert full.bytes_accessed == 64 * 256 * a_page + queries
    assert windowed.bytes_accessed == 64 * (513 // 16 + 2) * a_page + queries
    assert (full.flops, windowed.flops) == (4 * 64 * 8 * 4096 * 256, 4 * 64 * 8 * 512 * 256)


@pytest.mark.soak
def test_rows_with_drafts():
    """A block for each row: its newest token and some drafts, in pages that have others."""
    blocks = [[40, 1], [0, 3], [63, 16], [5, 0], [64, 8], [150, 13], [0, 0], [7, 2]]
    Writing(SHAPES["prefill-gqa-3"], blocks).check(SIMPLE, OPTIONS["default"])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"speculation": "always", "speculative_num_draft_tokens": 1},
    ],
    ids=["plain", "drafts"],
)
@pytest.mark.soak
def test_engine_with_the_interpreted_kernel(monkeypatch, options):
    """Prefill and decode through the kernel: the tokens of the portable backend."""
    expected = greedy_tokens(attention_backend="xla")
    interpreted = functools.partial(tpu.tpu_attention, interpret=True)
    monkeypatch.setattr(tpu, "tpu_problem", lambda *_: None)
    monkeypatch.setattr(tpu, "tpu_attention", interpreted)
    assert greedy_tokens(attention_backend="tpu", **options) == expected


class TestChoosingIt:
    target = place(TINY, None, "bfloat16").engines[0].target

    def test_on_a_tpu(self):
        target = self.target._replace(platform="tpu", is_own_cpu=False)
        for head_dim, heads_a_row in ((32, 4), (64, 2), (128, 1), (256, 1)):
            for name in ("auto", "tpu"):
                found = engine_attention(name, target, (head_dim,), XlaKernels())
                assert found == TpuAttention(heads_per_row=heads_a_row)
        # A head_dim that the kernel has no tiles for takes the portable path.
        assert engine_attention("auto", target, (80,), XlaKernels()).name == "xla"

    @pytest.mark.parametrize(
        ("platform", "head_dim", "message"),
        [
            ("cpu", 128, "'tpu' cannot be had here: it is for TPUs, .* are of kind 'cpu'"),
            ("tpu", 80, "it needs a head_dim that is a multiple or a divisor of 128, got 80"),
        ],
    )
    def test_where_it_cannot_run(self, platform, head_dim, message):
        target = self.target._replace(platform=platform)
        with pytest.raises(InvalidConfigError, match=message):
            engine_attention("tpu", target, (head_dim,), XlaKernels())
