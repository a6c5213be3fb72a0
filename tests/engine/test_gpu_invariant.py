"""Kernels of GPUs for deterministic sampling, interpreted: values in float64, and bits."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sgljax_engine import InvalidConfigError
from sgljax_engine.attention.base import AttentionOptions, BlockTables
from sgljax_engine.attention.pallas import PallasAttention
from sgljax_engine.builder.group import build_shapes
from sgljax_engine.config import EngineConfig
from sgljax_engine.kernels.gpu import invariant
from sgljax_engine.kernels.gpu.decode_attention import HeadNorms
from sgljax_engine.kernels.gpu.invariant import Slots, linear, prepare_heads, rms_norm, unembed
from sgljax_engine.kernels.gpu.linear import gated, linear_add, linears
from sgljax_engine.kernels.gpu.paged_attention import invariant_tiling
from sgljax_engine.layers import fused
from sgljax_engine.layers import invariant as layers
from sgljax_engine.layers.rope import rope_tables, rope_timescales
from sgljax_engine.models.spec import ModelContext
from sgljax_engine.runner.batches.page_ids import NO_SLOT
from sgljax_engine.runner.compile import compiled
from tests import inside
from tests.engine.determinism_cases import ALONE, MODEL, Way, make_engine, requests, run, using
from tests.engine.exactness_checks import check_bits
from tests.engine.gpu_interpreted import INVARIANT, OPTIONS, PLAIN, use_gpu_kernels
from tests.engine.models import HYBRID, MIXED_HEADS, TINY_MOE
from tests.engine.paged_cases import OPTIONS as ATTENTION_OPTIONS
from tests.engine.paged_cases import case_of, needs_gpu, spread
from tests.geometry import CHUNKED, RETRACTING, SMALL

QUICK_COMPILE = "interpreted kernels of GPUs, which no user compiles for CPUs"

TOLERANCES = {jnp.float32: 2e-5, jnp.bfloat16: 3e-2}
SERVED = dataclasses.replace(MODEL, hidden_size=64)
NUM_TOKENS = 150


def exact(x) -> np.ndarray:
    return np.asarray(x, np.float64)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [pytest.param(jnp.float32, marks=pytest.mark.soak), jnp.bfloat16])
def test_products_and_norms(dtype):
    """Values, and the bits of some tokens among others and among many."""
    rng, eps = np.random.default_rng(0), 1e-5

    def draw(*shape: int, scale: float = 1.0) -> jax.Array:
        return jnp.asarray(scale * rng.normal(size=shape), dtype)

    x, residual = draw(NUM_TOKENS, 96, scale=3.0), draw(NUM_TOKENS, 96)
    weight, other = (draw(96, 96, scale=1 / 16) for _ in "ab")
    table, norm = draw(201, 96, scale=1 / 16), jnp.float32(0.1 * rng.normal(size=96))
    how: dict[str, Any] = {"is_fixed": True, "interpret": True}
    h = exact(x) / np.sqrt(np.mean(exact(x) ** 2, axis=-1, keepdims=True) + eps)
    gate, up = (exact(x) @ exact(each) for each in (weight, other))
    cases = {
        "linear": (lambda x, _: linear(x, weight, interpret=True), exact(x) @ exact(weight)),
        "unembed": (lambda x, _: unembed(x, table, interpret=True), exact(x) @ exact(table).T),
        "norm": (
            lambda x, _: rms_norm(x, norm, eps, 1.0, interpret=True),
            h * (exact(norm) + 1.0),
        ),
        "norm of ones": (lambda x, _: rms_norm(x, None, eps, 0.0, interpret=True), h),
        "linears": (lambda x, _: linears(x, [weight, other], **how)[1], up),
        "gated": (
            lambda x, _: gated(x, weight, other, jax.nn.silu, **how),
            gate / (1 + np.exp(-gate)) * up,
        ),
        "linear_add": (
            lambda x, r: linear_add(x, weight, r, **how),
            exact(residual) + exact(x) @ exact(weight),
        ),
    }
    order = rng.permutation(NUM_TOKENS)
    for name, (function, expected) in cases.items():
        everything = jax.jit(function)(x, residual)
        assert everything.dtype == (jnp.float32 if name == "unembed" else dtype)
        np.testing.assert_allclose(
            exact(everything), expected, atol=3 * TOLERANCES[dtype], err_msg=name
        )
        for number in (1, 17, NUM_TOKENS):
            some = order[:number]
            found = jax.jit(function)(x[some], residual[some])
            np.testing.assert_array_equal(exact(found), exact(everything[some]), err_msg=name)


@pytest.mark.parametrize(
    ("heads", "has_norms", "dtype"),
    spread([(4, 2), (20, 3)], [True, False], [jnp.float32, jnp.bfloat16], road="other"),
)
def test_heads(heads, has_norms, dtype):
    """Norms and rotary embedding; what has a slot is written and nothing else."""
    rng, head_dim, page_size = np.random.default_rng(0), 32, 4
    shapes = [(5, count, head_dim) for count in (heads[0], heads[1], heads[1])]
    q, k, v = (jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)
    positions = jnp.asarray(rng.integers(0, 1000, 5), jnp.int32)
    sin, cos = rope_tables(positions, rope_timescales(head_dim, 1e4))
    weights = [jnp.float32(1 + 0.1 * rng.normal(size=head_dim)) for _ in "qk"]
    norms = HeadNorms(weights[0], weights[1], 1e-6, 0.0) if has_norms else None

    def prepared(x: jax.Array, weight: jax.Array) -> np.ndarray:
        x64, s, c = exact(x), exact(sin), exact(cos)
        if has_norms:
            scale = np.sqrt(np.mean(x64 * x64, axis=-1, keepdims=True) + 1e-6)
            x64 = x64 / scale * exact(weight)
        a, b = np.split(x64, 2, axis=-1)
        return np.concatenate([a * c - b * s, b * c + a * s], axis=-1)

    pool = jnp.asarray(rng.normal(size=(3, heads[1], page_size, head_dim)), dtype)
    slots = jnp.array([7, NO_SLOT, 0, -3, 9], jnp.int32)

    @jax.jit
    def prepare(pool):
        into, rope = Slots(pool, pool + 1, slots), (sin[:, 0], cos[:, 0])
        return prepare_heads(q, k, v, rope, norms, into, interpret=True)

    new_q, found = prepare(pool)
    atol = TOLERANCES[dtype]
    np.testing.assert_allclose(exact(new_q), prepared(q, weights[0]), atol=atol)
    wanted = (pool, prepared(k, weights[1]), atol), (pool + 1, exact(v), 0)
    for pages, (before, new, atol) in zip(found, wanted, strict=True):
        expected = np.array(exact(before))
        for token in (0, 2, 4):
            page, place = divmod(int(slots[token]), page_size)
            expected[page, :, place] = new[token]
        np.testing.assert_allclose(exact(pages), expected, atol=atol, rtol=0)


@pytest.mark.parametrize(
    ("shape", "options", "dtype"),
    spread(
        [(16, 4, 2, 5, 64), (4, 3, 3, 11, 16), (32, 20, 1, 3, 32)],
        list(ATTENTION_OPTIONS),
        [jnp.float32, jnp.bfloat16],
        road="other",
    ),
)
def test_attention(shape, options, dtype, monkeypatch):
    """Values; and the bits of each query in a block of its own, in a batch of one."""
    check_attention(INVARIANT, shape, options, dtype, monkeypatch)


def check_attention(attention, shape, options, dtype, monkeypatch) -> None:
    module = "sgljax_engine.kernels.gpu.paged_attention"
    monkeypatch.setattr(f"{module}._INVARIANT_SPLIT_KEYS", 128)
    case, wanted = case_of(shape, dtype), ATTENTION_OPTIONS[options]
    width = case.tables.page_table.shape[1]
    assert invariant_tiling(case.queries.shape, case.layer.k, width).splits >= 2
    out = case.run(attention.attend, wanted)
    case.check(out, wanted, atol=TOLERANCES[dtype])

    @jax.jit
    def attend(query, tables):
        return attention.attend(query, case.layer, tables, wanted)

    for row, query in ((0, 0), (1, shape[3] - 1), (3, 0), (3, 2)):
        position = case.tables.positions[row, query]
        alone = BlockTables(
            case.tables.page_table[row : row + 1], position[None, None], position[None] + 1
        )
        found = attend(jnp.asarray(case.queries[row, query], dtype)[None, None], alone)
        np.testing.assert_array_equal(np.asarray(found[0, 0], np.float32), out[row, query])
    monkeypatch.setattr(f"{module}._MAX_SPLIT_BYTES", 1)  # one block after another
    np.testing.assert_array_equal(case.run(attention.attend, wanted), out)


@pytest.mark.gpu
@needs_gpu
class TestOnHardware:
    @pytest.mark.parametrize("options", list(ATTENTION_OPTIONS))
    @pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
    def test_attention(self, options, dtype, monkeypatch):
        attention = PallasAttention(is_invariant=True)
        check_attention(attention, (16, 4, 2, 5, 64), options, dtype, monkeypatch)

    def test_an_engine(self):
        """Alone, in batches and scored, with the products of the GPU."""
        options = {"attention_backend": "pallas", "linear_backend": "pallas"}
        check_engine(options | {"dtype": "bfloat16", "enable_deterministic_sampling": True}, "off")


@pytest.mark.slow
def test_attention_of_others_is_not_invariant(monkeypatch):
    """The comparison finds what depends on the batch: there, splits follow from it."""
    case, options = case_of((16, 4, 2, 1, 64)), AttentionOptions(scale=0.2)
    backends = PLAIN, INVARIANT
    few = [case.run(backend.attend, options) for backend in backends]
    # As if there were many more blocks than it takes long to interpret.
    monkeypatch.setattr("sgljax_engine.kernels.gpu.paged_attention._TARGET_PROGRAMS", 1)
    many = [case.run(backend.attend, options) for backend in backends]
    assert (few[0] != many[0]).any()
    np.testing.assert_array_equal(few[1], many[1])


def context_of(model, options) -> ModelContext:
    given = {"enable_deterministic_sampling": True, "dtype": "float32", **OPTIONS, **options}
    runner, _ = build_shapes(model, EngineConfig.from_options(given), given["dtype"], None)
    return runner._static.context


def test_what_is_served(monkeypatch):
    use_gpu_kernels(monkeypatch, fused.FusedProducts(interpret=True))
    assert context_of(SERVED, {}).kernels == layers.InvariantKernels.make()


@pytest.mark.parametrize(
    ("model", "options", "problem"),
    [
        (SERVED, {"dtype": "float16"}, "projections of these sizes and this dtype"),
        (dataclasses.replace(SERVED, hidden_size=48), {}, "projections of these sizes"),
        (SERVED, {"quantization": "int8"}, "quantization 'int8'"),
        (SERVED, {"max_loras": 1}, r"adapters \(max_loras\)"),
        (TINY_MOE, {}, "experts"),
        (HYBRID, {}, "recurrent states"),
        (MIXED_HEADS, {}, "keys that several layers share, or that are values too"),
    ],
)
def test_what_is_refused(monkeypatch, model, options, problem):
    use_gpu_kernels(monkeypatch, fused.FusedProducts(interpret=True))
    problem = f"the kernels with a fixed order do not take {problem}"
    message = f"enable_deterministic_sampling cannot be had here: {problem}"
    with pytest.raises(InvalidConfigError, match=message):
        context_of(model, options)


ASKED = [
    each._replace(
        prompt=each.prompt[:40],
        params=dataclasses.replace(each.params, max_new_tokens=20, min_new_tokens=0),
    )
    for each in requests(24, MODEL.vocab_size)
    if not each.params.changes_logits
][:8]


ASKED_FOR = {"enable_deterministic_sampling": True}


def check_close(found: Sequence[np.ndarray], expected: Sequence[Any]) -> None:
    """Compares log-probs. XLA's exponentials on CPUs depend on the number of rows."""
    tolerance = 0.0 if jax.default_backend() == "gpu" else 1e-6
    for got, bits in zip(found, expected, strict=True):
        np.testing.assert_allclose(got, np.frombuffer(bits.logprobs, np.float32), 0, tolerance)


def check_engine(options: dict[str, Any], speculation: str) -> None:
    """The bits of requests alone; in one prefill; in chunks and retracted; and scored."""
    options = {**options, **ASKED_FOR}
    with make_engine(ALONE | options, SERVED) as engine:
        static = inside.runner(engine)._static
        assert static.context.kernels == layers.InvariantKernels.make()
        expected = run(engine, ASKED, Way({}))
    for geometry in (SMALL, RETRACTING):
        given = {**geometry, **options, "speculation": speculation}
        with make_engine(given, SERVED) as engine:
            found = run(engine, ASKED, Way({}))
            if speculation == "off":
                check_bits(found, expected)
            assert [bits.tokens for bits in found] == [bits.tokens for bits in expected]
            check_close([np.frombuffer(bits.logprobs, np.float32) for bits in found], expected)
            num_retractions = engine.get_internal_state().counters.num_retractions
            assert (num_retractions > 0) == (geometry is RETRACTING)
            texts = [
                [*asked.prompt, *bits.tokens] for asked, bits in zip(ASKED, expected, strict=True)
            ]
            scores = engine.score(texts, start_lens=[len(asked.prompt) for asked in ASKED])
    check_close(scores, expected)
    assert len({bits.tokens for bits in expected}) > 5


class TestEngine:
    @pytest.mark.soak
    def test_the_portable_code_agrees(self, monkeypatch):
        with using("portable"):
            with make_engine(SMALL, SERVED) as engine:
                portable = run(engine, ASKED, Way({}))
            use_gpu_kernels(monkeypatch, fused.FusedProducts(interpret=True))
            with make_engine({**CHUNKED, **OPTIONS, **ASKED_FOR}, SERVED) as engine:
                found = run(engine, ASKED, Way({}))
        assert [bits.tokens for bits in found] == [bits.tokens for bits in portable]

    @pytest.mark.soak
    @pytest.mark.parametrize("speculation", ["off", "always"])
    def test_no_bit_differs(self, monkeypatch, speculation):
        """Alone; in one prefill; in chunks and retracted; and scored."""
        use_gpu_kernels(monkeypatch, fused.FusedProducts(interpret=True))
        with using("portable"):
            check_engine(OPTIONS, speculation)

    @pytest.mark.soak
    def test_kernels_that_are_not_invariant_are_found(self, monkeypatch):
        use_gpu_kernels(monkeypatch, fused.FusedProducts(interpret=True))
        real = invariant.unembed

        def unembed(x, table, **options):
            return real(x, table, **options) + 1e-3 * (len(x) == 1)

        monkeypatch.setattr(invariant, "unembed", unembed)
        # Programs apart from those of equal engines, which do not have the fault.
        monkeypatch.setattr(compiled, "_jitted", functools.cache(compiled._jitted.__wrapped__))
        with using("portable"), pytest.raises(AssertionError):
            check_engine(OPTIONS, "off")
