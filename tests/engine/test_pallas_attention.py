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
from sgljax_engine.attention.batch_invariant import ordered_backend

from sgljax_engine import Engine, InvalidConfigError
from sgljax_engine.attention import pallas
from sgljax_engine.attention.base import AttentionBackend, BlockTables
from sgljax_engine.attention.pallas import PallasAttention, gpu_backend
from sgljax_engine.attention.registry import pick_attention
from sgljax_engine.cache.kv_pages import KVPages, LayerKV
from sgljax_engine.kernels.gpu.paged_attention import HEAD_DIMS, choose_tiling
from sgljax_engine.layers.basic import default_layout
from sgljax_engine.layers.target import Target
from sgljax_engine.models.registry import get_model
from sgljax_engine.models.spec import ModelContext
from sgljax_engine.placement.submeshes import place
from sgljax_engine.runner.batches.batch import build_decode_batch, empty_prefill_batch
from sgljax_engine.runner.batches.sampling import build_sampling_batch
from sgljax_engine.runner.programs import forward
from sgljax_engine.runner.programs.context import ProgramContext
from tests.engine.models import TINY
from tests.engine.paged_cases import OPTIONS, case_of, greedy_tokens, needs_gpu, spread

QUICK_COMPILE = "interpreted kernels of GPUs, which no user compiles for CPUs"

INTERPRETED = PallasAttention(interpret=True)
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
    case.check(case.run(INTERPRETED, OPTIONS[options]), OPTIONS[options], atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(16, 16, 8, 1, 128), (16, 8, 4, 16, 64)])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision(shape, dtype):
    """Inputs are rounded before the comparison: what is left is that of weights and outputs."""
    case = case_of(shape, dtype)
    options = OPTIONS["default"]
    case.check(case.run(INTERPRETED, options), options, atol=1e-2)


@pytest.mark.slow
def test_splits_are_put_together(monkeypatch):
    """One split and many, most of them empty for short contexts, say the same."""
    case = case_of(SHAPES["decode-mqa"], lengths=[1, 17, 1100])
    width = case.tables.page_table.shape[1]
    assert choose_tiling(case.queries.shape, case.layer.k, width).splits == 16
    options = OPTIONS["default"]
    many = case.run(INTERPRETED, options)
    case.check(many, options, atol=2e-5)
    monkeypatch.setattr("sgljax_engine.kernels.gpu.paged_attention._MAX_SPLITS", 1)
    assert choose_tiling(case.queries.shape, case.layer.k, width).splits == 1
    case.check(case.run(INTERPRETED, options), options, atol=2e-5)


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
        return PallasAttention()(q, layer, tables, OPTIONS["all"])

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


def test_decode_and_prefill_lower_for_cuda():
    """The engine's own programs, whole: one kernel a layer, in a function that layers share."""
    definition = get_model(TINY.architecture)
    static = ProgramContext(
        model=definition,
        context=ModelContext(TINY, default_layout("gpu")),
        attention=PallasAttention(),
        page_size=16,
        max_steps=4,
    )
    params = {
        name: jax.ShapeDtypeStruct(spec.shape, jnp.bfloat16)
        for name, spec in definition.param_specs(TINY).items()
    }
    pages = jax.ShapeDtypeStruct((32, TINY.num_kv_heads, 16, TINY.head_dim), jnp.bfloat16)
    kv = KVPages((LayerKV(pages, pages),) * TINY.num_layers)  # type: ignore[arg-type]

    def num_kernels(program: Any, *args: Any) -> int:
        jitted = jax.jit(functools.partial(program, static=static), donate_argnums=1)
        with lowering_for_a_gpu():
            lowered = jitted.trace(params, kv, *args).lower(lowering_platforms=("cuda",))
        return num_kernel_calls(lowered.as_text())

    rows = build_decode_batch([], [], buckets=[8], table_width=16)
    sampling = build_sampling_batch([], 8)
    no_rows: Any = ()
    decode = (no_rows, rows, sampling, forward.RowOptions(), np.int32(1), np.int32(1))
    assert num_kernels(forward.decode, *decode) == TINY.num_layers
    prefill = empty_prefill_batch(64, block=16, table_width=16)
    # Nobody reads what the last layer attends to in a prefill; JAX finds that from 0.12 on.
    assert TINY.num_layers - num_kernels(forward.prefill, prefill) in (0, 1)


def target_of(platform: str) -> Target:
    placement = place(TINY, None, "float32").whole
    return placement.target._replace(platform=platform, is_own_cpu=False)


class TestChoosingIt:
    def test_auto_on_a_gpu(self):
        for head_dim in HEAD_DIMS:
            found = pick_attention("auto", target_of("gpu"), (head_dim,))
            assert found == pick_attention("pallas", target_of("gpu"), (head_dim,))
            assert (found.name, found.attend) == ("pallas", PallasAttention(joins_blocks=False))
            assert found.fused is not None
            assert found.fused.attend == PallasAttention()
        assert pick_attention("auto", target_of("gpu"), (80,)).name == "xla"

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
            gpu_backend(target_of(platform), (head_dim,))

    @pytest.mark.skipif(jax.default_backend() == "gpu", reason="there it is allowed")
    def test_an_engine_elsewhere_is_refused(self):
        with pytest.raises(InvalidConfigError, match="'pallas' cannot be had here: it is for GPUs"):
            Engine(model_config=TINY, load_format="dummy", attention_backend="pallas")


@pytest.mark.soak
def test_engine_with_the_interpreted_kernel(monkeypatch):
    """Prefill and decode through the kernel: the tokens of the portable backend."""
    expected = greedy_tokens(attention_backend="xla")
    used = []

    def interpreted(target: Target, head_dims: tuple[int, ...]) -> AttentionBackend:
        used.append((target.platform, head_dims))
        return AttentionBackend("pallas", INTERPRETED, ordered_backend("cpu"))

    monkeypatch.setattr(pallas, "gpu_backend", interpreted)
    assert greedy_tokens(attention_backend="pallas") == expected
    assert used == [("cpu", TINY.head_dims)]


@pytest.mark.gpu
@needs_gpu
class TestOnHardware:
    @pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
    @pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
    def test_ragged_blocks(self, shape, options):
        case = case_of(shape)
        case.check(case.run(PallasAttention(), options), options, atol=2e-5)

    @pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
    def test_bfloat16(self, shape):
        case = case_of(shape, jnp.bfloat16)
        case.check(case.run(PallasAttention(), OPTIONS["all"]), OPTIONS["all"], atol=2e-2)

    def test_long_contexts(self):
        case = case_of(SHAPES["decode-mha"], jnp.bfloat16, lengths=[1, 700, 5000])
        case.check(case.run(PallasAttention(), OPTIONS["default"]), OPTIONS["default"], atol=1e-2)

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
