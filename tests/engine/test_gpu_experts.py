"""The product of GPUs for experts, interpreted against float64, and where it is used."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sgljax_engine.kernels.gpu.ragged_linear import (
    choose_ragged_tile,
    is_served,
    make_row_tiles,
    ragged_linear,
)
from sgljax_engine.layers.experts import Experts, mix, route
from sgljax_engine.layers.fused import FusedProducts
from sgljax_engine.layers.kernels import XlaKernels
from tests.engine.test_pallas_attention import lowering_for_a_gpu, needs_gpu

QUICK_COMPILE = "interpreted kernels of GPUs, which no user compiles for CPUs"

SIZES = {
    "ragged": [3, 0, 17, 16, 1, 0],
    "one-has-all": [0, 0, 0, 64, 0, 0],
    "none": [0] * 6,
    "many": [200, 1, 0, 70, 129, 30],
}


def exact(x) -> np.ndarray:
    return np.asarray(x, np.float64)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_products_of_each_expert(sizes, dtype):
    check_products(sizes, dtype, interpret=True)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_products_on_hardware(sizes, dtype):
    with jax.default_matmul_precision("highest"):
        check_products(sizes, dtype, interpret=False)


def check_products(sizes, dtype, *, interpret) -> None:
    """Tokens behind the last expert's are NaN: reading them for another would show."""
    rng, num_tokens = np.random.default_rng(0), sum(sizes)
    drawn = rng.normal(size=(num_tokens + 5, 96))
    drawn[num_tokens:] = np.nan
    x = jnp.asarray(drawn, dtype)
    weights = jnp.asarray(rng.normal(size=(len(sizes), 96, 48)) / 10, dtype)
    assert is_served(x, weights)
    run = jax.jit(functools.partial(ragged_linear, interpret=interpret))
    out = exact(run(weights, x, jnp.asarray(sizes, jnp.int32)))[:num_tokens]
    experts = np.repeat(np.arange(len(sizes)), sizes)
    expected = np.einsum("td,tdn->tn", exact(x)[:num_tokens], exact(weights)[experts])
    np.testing.assert_allclose(out, expected, atol=1e-5 if dtype == jnp.float32 else 2e-2)


def test_no_tile_reads_a_weight_in_vain():
    sizes = jnp.asarray(SIZES["ragged"], jnp.int32)
    tiles = [x.tolist() for x in make_row_tiles(sizes, 37, 16)]
    used = [tile for tile in zip(*tiles, strict=True) if tile[1] < tile[2]]
    assert used == [(0, 0, 3), (2, 3, 20), (2, 19, 20), (3, 20, 36), (4, 36, 37)]


def test_tiles_follow_the_tokens_of_an_expert():
    def rows(num_tokens: int, dtype: jnp.dtype) -> int:
        x = jax.ShapeDtypeStruct((num_tokens, 2048), dtype)
        weights = jax.ShapeDtypeStruct((128, 2048, 768), dtype)
        return choose_ragged_tile(x, weights).rows  # type: ignore[arg-type]

    half, single = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
    assert [rows(count, half) for count in (8, 1024, 4096, 65536)] == [16, 16, 32, 128]
    assert rows(65536, single) == 32


@pytest.mark.slow
def test_a_layer_of_experts():
    """The bits of XLA's products up to rounding; zeros for unused tokens."""
    rng = np.random.default_rng(1)

    def draw(*shape: int) -> jax.Array:
        return jnp.float32(rng.normal(size=shape) / 4)

    experts = Experts(draw(8, 64, 32), draw(8, 64, 32), draw(8, 32, 64))
    routing, x = route(draw(20, 8), 2, is_normalized=True), draw(20, 64)
    is_used = jnp.arange(20) < 17

    def mixed(fused: FusedProducts | None) -> jax.Array:
        kernels = XlaKernels(fused=fused)
        run = functools.partial(mix, kernels=kernels, gated=lambda gate, up: jax.nn.silu(gate) * up)
        return jax.jit(run)(x, routing, experts, is_used)

    ours = mixed(FusedProducts(interpret=True))
    np.testing.assert_allclose(ours, mixed(None), atol=1e-6)
    np.testing.assert_array_equal(ours[17:], 0)


def test_lowers_for_cuda():
    half = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    sizes = jax.ShapeDtypeStruct((8,), jnp.int32)
    with lowering_for_a_gpu():
        traced = jax.jit(ragged_linear).trace(half((8, 64, 96)), half((40, 64)), sizes)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@__gpu$xla.gpu.triton") == 1
