"""The fused kernels of GPUs, interpreted against float64: products, and decode attention."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sgljax_engine.attention.base import NewTokens, Prologue
from sgljax_engine.cache.kv_pages import LayerKV
from sgljax_engine.kernels.gpu.linear import (
    MAX_TOKENS,
    Scaled,
    gated,
    is_served,
    linear_add,
    linears,
)
from sgljax_engine.layers import fused
from sgljax_engine.layers.rope import rope_tables, rope_timescales
from sgljax_engine.runner.programs.attend import slots_at
from tests.engine.gpu_interpreted import FUSED, INVARIANT, use_gpu_kernels
from tests.engine.gpu_interpreted import OPTIONS as GPU
from tests.engine.paged_cases import OPTIONS, RaggedCase, case_of, greedy_tokens, spread
from tests.engine.test_pallas_attention import needs_gpu

QUICK_COMPILE = "interpreted kernels of GPUs, which no user compiles for CPUs"

SHAPES = {
    # page_size, num_heads, num_kv_heads, num_queries, head_dim
    "grouped": (16, 4, 2, 1, 64),
    "small": (4, 3, 3, 1, 16),
    "wide": (128, 8, 1, 1, 128),
}
TOLERANCES = {jnp.float32: 2e-5, jnp.bfloat16: 3e-2}


def exact(x) -> np.ndarray:
    return np.asarray(x, np.float64)


def exact_weight(weight) -> np.ndarray:
    if isinstance(weight, Scaled):
        return exact(weight.values) * exact(weight.scale)
    return exact(weight)


def normed(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


@pytest.mark.parametrize("is_int8", [False, True])
@pytest.mark.parametrize(
    ("num_tokens", "dtype"),
    spread([1, 20, MAX_TOKENS - 1], [jnp.float32, jnp.bfloat16], road="other"),
)
def test_products(num_tokens, dtype, is_int8):
    check_products(num_tokens, dtype, is_int8, interpret=True)


def check_products(num_tokens, dtype, is_int8, *, interpret) -> None:
    rng = np.random.default_rng(0)

    def draw(*shape: int, scale: float = 1.0) -> jax.Array:
        return jnp.asarray(scale * rng.normal(size=shape), dtype)

    x, residual = draw(num_tokens, 256, scale=3.0), draw(num_tokens, 96)
    weights = [draw(256, size, scale=1 / 16) for size in (96, 32, 32)]
    if is_int8:
        weights = [
            Scaled(
                jnp.asarray(rng.integers(-127, 128, weight.shape), jnp.int8),
                jnp.asarray(rng.uniform(1e-4, 1e-3, weight.shape[1]), jnp.float32),
            )
            for weight in weights
        ]
    assert is_served(x, weights)
    outs = linears(x, weights, interpret=interpret)
    for out, weight in zip(outs, weights, strict=True):
        expected = exact(x) @ exact_weight(weight)
        np.testing.assert_allclose(exact(out), expected, atol=3 * TOLERANCES[dtype])
    gate, up = (exact(x) @ exact_weight(weight) for weight in weights[1:])
    found = gated(x, weights[1], weights[2], jax.nn.silu, interpret=interpret)
    np.testing.assert_allclose(
        exact(found), gate / (1 + np.exp(-gate)) * up, atol=6 * TOLERANCES[dtype]
    )
    added = linear_add(x, weights[0], residual, interpret=interpret)
    expected = exact(residual) + exact(x) @ exact_weight(weights[0])
    np.testing.assert_allclose(exact(added), expected, atol=3 * TOLERANCES[dtype])


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("is_int8", [False, True])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("num_tokens", [1, 20, 100, MAX_TOKENS - 1])
def test_products_on_hardware(num_tokens, dtype, is_int8):
    with jax.default_matmul_precision("highest"):
        check_products(num_tokens, dtype, is_int8, interpret=False)


def test_what_is_not_served():
    x, weight = jnp.zeros((8, 256)), jnp.zeros((256, 64))
    assert is_served(x, [weight, weight])
    many = jnp.zeros((MAX_TOKENS + 1, 256))
    assert not fused.FusedProducts().serves([weight], many)
    assert fused.FusedProducts(is_fixed=True).serves([weight], many)
    assert not is_served(x, [weight, jnp.zeros((256, 40))])
    assert not is_served(x[:, :80], [weight[:80]])
    assert not is_served(x, [weight.astype(jnp.bfloat16)])
    assert not is_served(x, [weight.astype(jnp.int8)])
    assert is_served(x, [Scaled(weight.astype(jnp.int8), jnp.ones(64))])
    assert not is_served(x, [Scaled(jnp.zeros((256, 40), jnp.int8), jnp.ones(40))])
    assert not is_served(x.astype(jnp.float16), [weight.astype(jnp.float16)])


def before(case: RaggedCase, *, has_norms: bool) -> tuple[list[jax.Array], Prologue, LayerKV]:
    """Projections of the newest tokens of a case, and the cache without their keys, which is NaN.

    The case's own queries, keys and values of these are what the prologue should make of them.
    """
    rng, dtype = np.random.default_rng(1), case.layer.k.dtype
    tables, head_dim = case.tables, case.queries.shape[-1]
    num_rows, num_kv_heads = len(case.queries), case.layer.k.shape[1]
    sin, cos = rope_tables(tables.positions[:, 0], rope_timescales(head_dim, 1e4))
    shapes = [(num_rows, count, head_dim) for count in (case.queries.shape[2], *[num_kv_heads] * 2)]
    q, k, v = (jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)
    norms = [1 + 0.1 * rng.normal(size=head_dim) if has_norms else np.ones(1) for _ in "qk"]

    def prepare(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        x = normed(x, weight, 1e-6) if has_norms else x
        first, second = np.split(x, 2, axis=-1)
        s, c = exact(sin), exact(cos)
        return np.concatenate([first * c - second * s, second * c + first * s], axis=-1)

    case.queries[:, 0] = prepare(exact(q), norms[0])
    new_keys, nan = prepare(exact(k), norms[1]), np.full((num_kv_heads, head_dim), np.nan)
    pages_k, pages_v = (np.array(each, np.float32) for each in case.layer[:2])
    for i, (keys, values) in enumerate(zip(case.keys, case.values, strict=True)):
        page, offset = divmod(len(keys) - 1, case.layer.page_size)
        at = np.asarray(tables.page_table)[i, page]
        pages_k[at, :, offset], pages_v[at, :, offset] = nan, nan
        keys[-1], values[-1] = new_keys[i], exact(v)[i]
    prologue = Prologue(sin, cos)
    if has_norms:
        prologue = Prologue(sin, cos, *map(jnp.float32, norms), eps=1e-6)
    layer = LayerKV(jnp.asarray(pages_k, dtype), jnp.asarray(pages_v, dtype))
    return [q, k, v], prologue, layer


@pytest.mark.parametrize(
    ("shape", "options", "has_norms", "dtype", "attention"),
    spread(
        list(SHAPES),
        list(OPTIONS),
        [True, False],
        [jnp.float32, jnp.bfloat16],
        [FUSED, INVARIANT, FUSED],
        road="other",
    ),
)
def test_attention_of_projections(shape, options, has_norms, dtype, attention):
    """Outputs, the new keys and values in their pages, and nothing else changed there."""
    lengths = (1, 16, 17, 33, 290)
    case = case_of(SHAPES[shape], dtype, lengths)
    copies = [[np.array(each) for each in arrays] for arrays in (case.keys, case.values)]
    case = case._replace(queries=np.array(case.queries), keys=copies[0], values=copies[1])
    new, prologue, layer = before(case, has_norms=has_norms)

    tables = case.tables
    slots = slots_at(tables.page_table, tables.positions[:, 0], tables.kv_lens > 0, layer.page_size)

    @jax.jit
    def attend(new, layer, tables):
        tokens = NewTokens(new[0], new[1], new[2], prologue)
        return attention.write_and_attend(tokens, layer, tables, slots, OPTIONS[options])

    out, found = attend(new, layer, tables)
    case.check(np.asarray(out, np.float32)[:, None], OPTIONS[options], atol=2 * TOLERANCES[dtype])
    expected = [np.array(each, np.float32) for each in layer[:2]]
    for i, (keys, values) in enumerate(zip(case.keys, case.values, strict=True)):
        page, offset = divmod(len(keys) - 1, layer.page_size)
        at = np.asarray(case.tables.page_table)[i, page]
        expected[0][at, :, offset], expected[1][at, :, offset] = keys[-1], values[-1]
    for pages, wanted in zip(found[:2], expected, strict=True):
        np.testing.assert_allclose(np.asarray(pages, np.float32), wanted, atol=TOLERANCES[dtype])


@pytest.mark.soak
@pytest.mark.parametrize("rounded", [None, "quantization", "kv_cache_dtype"])
def test_engine_with_the_interpreted_kernels(monkeypatch, rounded):
    """Decode through all kernels, fused but for keys of 8 bits: the portable backend's tokens."""
    options = {} if rounded is None else {rounded: "int8"}
    common = {"linear_backend": "xla", **options}
    expected = greedy_tokens(attention_backend="xla", **common)
    traced = []

    class Counted(fused.FusedProducts):
        def serves(self, weights, x):
            traced.append(super().serves(weights, x))
            return traced[-1]

    use_gpu_kernels(monkeypatch, Counted(interpret=True))
    assert greedy_tokens(**GPU, **options) == expected
    assert len(traced) >= 3
    assert all(traced)
