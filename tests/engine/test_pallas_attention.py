"""The Pallas backend: interpreted against float64, lowered for CUDA, and, with a GPU, run there."""

from __future__ import annotations

import contextlib
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh

from sgljax_engine import InvalidConfigError
from sgljax_engine.attention.base import BlockTables
from sgljax_engine.attention.pallas import PallasAttention
from sgljax_engine.attention.registry import engine_attention
from sgljax_engine.cache.kv_pages import KVPages, LayerKV, PageLayout
from sgljax_engine.kernels.gpu.paged_attention import HEAD_DIMS, choose_tiling
from sgljax_engine.layers.fused import FusedProducts
from sgljax_engine.layers.invariant import InvariantKernels
from sgljax_engine.layers.kernels import XlaKernels
from sgljax_engine.layers.target import Target
from sgljax_engine.models.registry import get_model
from sgljax_engine.models.spec import ModelContext
from sgljax_engine.placement.submeshes import place
from sgljax_engine.runner.batches.batch import build_decode_batch, empty_prefill_batch
from sgljax_engine.runner.batches.packing import pack_scores
from sgljax_engine.runner.batches.sampling import build_sampling_batch
from sgljax_engine.runner.programs.context import ProgramContext
from sgljax_engine.runner.programs.decode import RowOptions, decode
from sgljax_engine.runner.programs.prefill import prefill
from sgljax_engine.runner.programs.score import score
from tests.engine import gpu_interpreted
from tests.engine.gpu_interpreted import PLAIN
from tests.engine.models import TINY
from tests.engine.paged_cases import OPTIONS, case_of, greedy_tokens, needs_gpu, spread

QUICK_COMPILE = "interpreted kernels of GPUs, which no user compiles for CPUs"

SHAPES = {
    # page_size, num_heads, num_kv_heads, num_queries, head_dim
    "decode-tiny-pages": (1, 4, 2, 1, 64),
    "decode-mha": (16, 3, 3, 1, 128),
    "decode-mqa": (128, 8, 1, 1, 64),
    "prefill-gqa": (4, 6, 2, 16, 16),
    "prefill-many-row-tiles": (16, 40, 4, 16, 64),
    "prefill-wide": (128, 2, 1, 16, 256),
}

HOPPER = AbstractDevice("NVIDIA H100 80GB HBM3", None, "gpu")


def lowering_for_a_gpu() -> contextlib.AbstractContextManager[Any]:
    """Pallas asks for the kind of GPU from JAX 0.12 on."""
    axis = AxisType.Auto
    return use_abstract_mesh(AbstractMesh((1,), ("x",), (axis,), abstract_device=HOPPER))


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ("decode-tiny-pages", "all"),
        ("prefill-gqa", "window-20"),
        *spread(list(SHAPES), list(OPTIONS), road="other"),
    ],
)
def test_ragged_blocks(shape, options):
    case = case_of(SHAPES[shape])
    case.check(case.run(PLAIN.attend, OPTIONS[options]), OPTIONS[options], atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((16, 16, 8, 1, 128), jnp.bfloat16), ((16, 8, 4, 16, 64), jnp.float16)],
)
def test_half_precision(shape, dtype):
    """Inputs are rounded before the comparison: what is left is that of weights and outputs."""
    case = case_of(shape, dtype)
    options = OPTIONS["default"]
    case.check(case.run(PLAIN.attend, options), options, atol=1e-2)


@pytest.mark.slow
def test_splits_are_put_together(monkeypatch):
    """One split and many, most of them empty for short contexts, say the same."""
    case = case_of(SHAPES["decode-mqa"], lengths=[1, 17, 1100])
    width = case.tables.page_table.shape[1]
    assert choose_tiling(case.queries.shape, case.layer.k, width).splits == 16
    options = OPTIONS["default"]
    many = case.run(PLAIN.attend, options)
    case.check(many, options, atol=2e-5)
    monkeypatch.setattr("sgljax_engine.kernels.gpu.paged_attention._MAX_SPLITS", 1)
    assert choose_tiling(case.queries.shape, case.layer.k, width).splits == 1
    case.check(case.run(PLAIN.attend, options), options, atol=2e-5)


def test_tilings_fit_the_tensor_cores():
    k: Any = jax.ShapeDtypeStruct((64, 8, 16, 128), jnp.bfloat16)
    decode = choose_tiling((256, 1, 16, 128), k, 64)
    assert (decode.rows, decode.row_tiles, decode.keys, decode.splits) == (16, 1, 64, 1)
    # One request alone: its context is spread over the GPU.
    assert choose_tiling((1, 1, 16, 128), k, 512).splits == 64
    # A block of 16 queries, five heads each: 80 rows in two tiles.
    prefill = choose_tiling((128, 16, 40, 128), k, 64)
    assert (prefill.rows, prefill.row_tiles, prefill.splits) == (64, 2, 1)


@pytest.mark.parametrize(("shape", "dtype"), spread(list(SHAPES), [jnp.float32, jnp.bfloat16]))
def test_lowers_for_cuda(shape, dtype):
    """Through Triton's own checks of shapes and types; what it cannot say needs a GPU."""
    case = case_of(SHAPES[shape], dtype)

    def attend(q: jax.Array, layer: LayerKV, tables: BlockTables) -> jax.Array:
        return PallasAttention().attend(q, layer, tables, OPTIONS["all"])

    queries = jnp.asarray(case.queries, dtype)
    with lowering_for_a_gpu():
        traced = jax.jit(attend).trace(queries, case.layer, case.tables)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@__gpu$xla.gpu.triton") == 1


def num_kernel_calls(text: str, function: str = "main") -> int:
    """Triton kernels that a call of a function of a lowered module runs, loops run once."""
    body = re.search(rf"func\.func \w+ @{function}\(.*?(?=\n  }}\n)", text, re.DOTALL)
    assert body is not None
    callees = re.findall(r"\bcall @(\w+)\(", body[0])
    own = body[0].count("@__gpu$xla.gpu.triton")
    return own + sum(num_kernel_calls(text, callee) for callee in callees)


def test_programs_lower_for_cuda():
    """The engine's own programs, whole: one kernel a layer, in a function that layers share."""
    definition = get_model(TINY.architecture)
    static = ProgramContext(
        model=definition,
        context=ModelContext(TINY, dtype=jnp.dtype("bfloat16")),
        attention=PallasAttention(),
        page_size=16,
        page_layouts=(PageLayout(TINY.num_kv_heads, TINY.head_dim),) * TINY.num_layers,
        max_steps=4,
    )
    params = {
        name: jax.ShapeDtypeStruct(spec.shape, jnp.bfloat16)
        for name, spec in definition.param_specs(TINY).items()
    }
    pages = jax.ShapeDtypeStruct((32, TINY.num_kv_heads, 16, TINY.head_dim), jnp.bfloat16)
    kv = KVPages((LayerKV(pages, pages),) * TINY.num_layers)  # type: ignore[arg-type]

    def num_kernels(program: Any, *args: Any) -> int:
        jitted = jax.jit(functools.partial(program, static=static))
        with lowering_for_a_gpu():
            lowered = jitted.trace(params, *args).lower(lowering_platforms=("cuda",))
        return num_kernel_calls(lowered.as_text())

    rows = build_decode_batch([], [], buckets=[8], table_width=16)
    steps = rows, build_sampling_batch([], 8), RowOptions(), None, np.int32(1), np.int32(1)
    assert num_kernels(decode, kv, *steps) == TINY.num_layers
    # Nobody reads what the last layer attends to in a prefill; JAX finds that from 0.12 on.
    chunks = empty_prefill_batch(64, block=16, table_width=16)
    assert TINY.num_layers - num_kernels(prefill, kv, chunks) in (0, 1)
    sizes = {"buckets": [64], "max_tokens": 64, "block": 16, "table_width": 16}
    (packed,) = pack_scores([[1, 2]], [1], **sizes)
    assert num_kernels(score, packed.batch, np.float32(1), None, None) == TINY.num_layers


def target_of(platform: str) -> Target:
    placement = place(TINY, None, "float32").whole
    return placement.target._replace(platform=platform, is_own_cpu=False)


class TestChoosingIt:
    def test_auto_on_a_gpu(self):
        """Fused kernels come with fused attention, invariant ones with invariant attention."""
        target, fused = target_of("gpu"), FusedProducts()
        wanted = {
            XlaKernels(): PallasAttention(),
            XlaKernels(fused=fused): PallasAttention(is_fused=True),
            InvariantKernels(fused=fused): PallasAttention(is_invariant=True),
        }
        for head_dim in HEAD_DIMS:
            for kernels, attention in wanted.items():
                for name in ("auto", "pallas"):
                    assert engine_attention(name, target, (head_dim,), kernels) == attention
        assert engine_attention("auto", target, (80,), XlaKernels()).name == "xla"
        several = target._replace(num_tensor_shards=2)
        found = engine_attention("auto", several, (64,), XlaKernels())
        assert found == PallasAttention(mesh=target.mesh)

    @pytest.mark.parametrize(
        ("platform", "head_dim", "message"),
        [
            ("cpu", 64, "it is for GPUs, the engine's devices are of kind 'cpu'"),
            ("tpu", 64, "it is for GPUs"),
            ("gpu", 80, "it needs a head_dim of .*, got 80"),
        ],
    )
    def test_where_it_cannot_run(self, platform, head_dim, message):
        with pytest.raises(InvalidConfigError, match=f"'pallas' cannot be had here: {message}"):
            engine_attention("pallas", target_of(platform), (head_dim,), XlaKernels())


@pytest.mark.soak
def test_engine_with_the_interpreted_kernel(monkeypatch):
    """Prefill and decode through the kernel: the tokens of the portable backend."""
    expected = greedy_tokens(attention_backend="xla")
    gpu_interpreted.use_gpu_kernels(monkeypatch, None)
    assert greedy_tokens(**gpu_interpreted.OPTIONS) == expected


@pytest.mark.gpu
@needs_gpu
class TestOnHardware:
    @pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
    @pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
    def test_ragged_blocks(self, shape, options):
        case = case_of(shape)
        case.check(case.run(PallasAttention().attend, options), options, atol=2e-5)

    @pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
    def test_bfloat16(self, shape):
        case = case_of(shape, jnp.bfloat16)
        case.check(case.run(PallasAttention().attend, OPTIONS["all"]), OPTIONS["all"], atol=2e-2)

    def test_long_contexts(self):
        case = case_of(SHAPES["decode-mha"], jnp.bfloat16, lengths=[1, 700, 5000])
        options = OPTIONS["default"]
        case.check(case.run(PallasAttention().attend, options), options, atol=1e-2)

    def test_engine_agrees_with_the_cpu(self):
        """Greedy tokens in float32; TINY's weights are spread, so that no two logits are close."""
        cpu = jax.sharding.Mesh(jax.devices("cpu")[:1], ("tp",))
        # For all threads, the engine's too: float32 products are rounded to TF32 otherwise.
        jax.config.update("jax_default_matmul_precision", "highest")
        try:
            on_gpu = greedy_tokens(attention_backend="pallas")
        finally:
            jax.config.update("jax_default_matmul_precision", None)
        assert on_gpu == greedy_tokens(mesh=cpu)
