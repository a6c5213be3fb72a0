"""JIT-compiled CPU kernels against numpy in float64, and their bits in any batch."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sgljax_cpu.copy import copy
from sgljax_cpu.embed import embed
from sgljax_cpu.linear import linear
from sgljax_cpu.norm import rms_norm
from sgljax_cpu.pack import pack
from sgljax_cpu.panels import pack as portable_pack
from sgljax_cpu.panels import unpack
from sgljax_cpu.rope import rope_tables, rotate
from tests.engine.native_cases import lanes, needs_machine_code
from tests.tiers import tiered

__all__ = ["lanes"]
pytestmark = [needs_machine_code, pytest.mark.usefixtures("lanes")]

SHAPES = [(1, 1), (512, 5), (7, 13), (100, 50), (64, 48), (700, 300)]
"""Inputs and outputs."""

TOKENS = [*range(1, 20), 31, 48, 65, 130]

DTYPES = ("float32", "bfloat16", "float16")


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def multiply(weight, x):
    packed = portable_pack(jnp.asarray(weight))
    return np.asarray(jax.jit(linear, static_argnums=2)(packed, x, weight.shape[1]))


def assert_product(found, weight, x):
    """To what rounding a float32 sum one by one allows."""
    exact = x.astype(np.float64) @ weight.astype(np.float64)
    size = np.abs(x).astype(np.float64) @ np.abs(weight)
    np.testing.assert_array_less(np.abs(found - exact), size * 3e-6 + 1e-30)


class TestLinear:
    @pytest.mark.parametrize("shape", SHAPES)
    def test_a_token_has_the_same_bits_in_any_batch(self, shape):
        weight, x = draw(*shape), draw(130, shape[0], seed=1)
        together = multiply(weight, x)
        assert_product(together, weight, x)
        for count in TOKENS:
            some = np.random.default_rng(count).permutation(130)[:count]
            np.testing.assert_array_equal(multiply(weight, x[some]), together[some])

    @pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
    def test_half_width_weights_are_widened(self, dtype):
        weight, x = draw(100, 50), draw(9, 100, seed=1)
        stored = jnp.asarray(weight).astype(dtype)
        wide = np.asarray(stored.astype("float32"))
        packed = portable_pack(stored)
        found = jax.jit(linear, static_argnums=2)(packed, x, 50)
        np.testing.assert_array_equal(found, multiply(wide, x))

    @pytest.mark.parametrize("value", [np.nan, np.inf])
    def test_what_is_not_a_number_stays_with_its_token(self, value):
        weight = draw(40, 50)
        for num_tokens in (5, 12, 33):
            x = draw(num_tokens, 40)
            x[num_tokens - 1, 3] = value
            found = multiply(weight, x)
            assert not np.isfinite(found[-1]).any()
            assert_product(found[:-1], weight, x[:-1])

    def test_nothing_at_all(self):
        assert multiply(draw(5, 4), draw(0, 5)).shape == (0, 4)
        np.testing.assert_array_equal(multiply(draw(0, 4), draw(20, 0)), np.zeros((20, 4)))


@pytest.mark.parametrize("size", [1, 7, 16, 40, 64, 200])
@pytest.mark.parametrize("offset", [0.0, 1.0, None])
def test_norm(size, offset):
    x, weight = 3 * draw(33, size), draw(size, seed=1)
    used = None if offset is None else jnp.asarray(weight)

    def run(x):
        return np.asarray(jax.jit(lambda x: rms_norm(x, used, 1e-5, offset or 0.0))(x))

    exact = x.astype(np.float64)
    exact /= np.sqrt((exact**2).mean(-1, keepdims=True) + 1e-5)
    exact *= 1.0 if offset is None else weight.astype(np.float64) + offset
    found = run(x)
    np.testing.assert_allclose(found, exact, rtol=1e-6, atol=1e-6)
    for count in (1, 2, 5, 20):
        np.testing.assert_array_equal(run(x[:count]), found[:count])


@pytest.mark.parametrize("head_dim", [8, 16, 20, 64])
def test_rotate(head_dim):
    x, angles = draw(9, 3, head_dim), draw(9, 1, head_dim // 2, seed=1)
    sin, cos = np.sin(angles), np.cos(angles)
    found = np.asarray(jax.jit(rotate)(x, sin, cos))
    left, right = np.split(x.astype(np.float64), 2, axis=-1)
    exact = np.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)
    np.testing.assert_allclose(found, exact, atol=1e-6)
    alone = jax.jit(rotate)(x[4:5], sin[4:5], cos[4:5])
    np.testing.assert_array_equal(alone, found[4:5])


@pytest.mark.parametrize("dtype", DTYPES)
def test_embed(dtype):
    table = jnp.asarray(draw(37, 10)).astype(dtype)
    ids = np.array([0, 36, 15, 16, 3, 3], np.int32)
    found = jax.jit(embed)(portable_pack(table.T), ids)
    np.testing.assert_array_equal(found, table.astype("float32")[ids])


class TestPack:
    SHAPES = ((1, 1), (9, 16), (16, 17), (3, 40, 33), (130, 700))
    CASES = tuple(
        (source, target, (row + column) % 2 == 0)
        for row, source in enumerate(DTYPES)
        for column, target in enumerate(DTYPES)
    )

    @pytest.mark.parametrize("shape", tiered(SHAPES, [(16, 17)]))
    def test_is_the_portable_form(self, shape):
        wide = jnp.asarray(draw(*shape))
        for source, target, is_by_output in self.CASES:
            x = wide.astype(source)
            wanted = portable_pack(x.astype(target))
            np.testing.assert_array_equal(unpack(wanted, shape[-1]), x.astype(target))
            rows = x.swapaxes(-1, -2) if is_by_output else x
            run = functools.partial(pack, dtype=jnp.dtype(target), is_by_output=is_by_output)
            found, is_finite = jax.jit(run)(rows)
            assert is_finite
            assert found.dtype == target
            np.testing.assert_array_equal(found, wanted)

    def test_overflow_is_not_finite(self):
        run = functools.partial(pack, dtype=jnp.dtype("float16"), is_by_output=False)
        assert not jax.jit(run)(np.full((4, 20), 1e6, np.float32))[1]


@pytest.mark.parametrize("shape", [(0,), (1,), (63,), (64, 3), (1 << 15,), (3, 40_001)])
def test_copy(shape):
    x = draw(*shape)
    found, is_finite = jax.jit(copy)(x)
    np.testing.assert_array_equal(found, x)
    assert is_finite


MOVES = {
    "copy": copy,
    "by_input": functools.partial(pack, dtype=jnp.dtype("float32"), is_by_output=False),
    "by_output": functools.partial(pack, dtype=jnp.dtype("float32"), is_by_output=True),
}


@pytest.mark.parametrize("move", MOVES)
def test_moves_bits(move):
    bits = np.random.default_rng(0).integers(0, 2**32, (80, 48), dtype=np.uint32)
    found = jax.jit(MOVES[move])(bits.view(np.float32))[0]
    if move != "copy":
        found = unpack(found, 80 if move == "by_output" else 48)
    found = np.asarray(found).view(np.uint32)
    np.testing.assert_array_equal(found.T if move == "by_output" else found, bits)


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
def test_sees_what_is_not_finite_wherever_it_is(move, value):
    run = jax.jit(MOVES[move])
    x = np.full((37, 99), np.finfo(np.float32).max, np.float32)
    assert run(x)[1]
    for place in np.ndindex(*x.shape):
        if sum(place) % 5 == 0 or 36 in place or 98 in place:
            kept, x[place] = x[place], value
            assert not run(x)[1], place
            x[place] = kept


@pytest.mark.parametrize("move", MOVES)
def test_two_that_are_not_finite_do_not_hide_one_another(move):
    x = np.zeros((200, 20_000), np.float32)  # in several chunks, so of several threads
    x[0, 0], x[-1, -1] = np.inf, -np.inf
    assert not jax.jit(MOVES[move])(x)[1]


@pytest.mark.parametrize("count", [4, 8, 20, 64])
def test_rope_tables(count):
    """Positions in the millions are exact too; a position has the same bits alone."""
    rng = np.random.default_rng(count)
    positions = np.append(rng.integers(0, 5_000_000, 40), [0, 1, 1_000_000]).astype(np.int32)
    timescales = (1e6 ** (np.arange(count) / count)).astype(np.float32)
    timescales[-1] = np.inf
    run = jax.jit(rope_tables)
    sin, cos = map(np.asarray, run(positions, timescales))
    angles = (positions.astype(np.float32)[:, None] / timescales).astype(np.float64)
    np.testing.assert_allclose(sin[:, 0], np.sin(angles), atol=6e-8)
    np.testing.assert_allclose(cos[:, 0], np.cos(angles), atol=6e-8)
    for place in (0, 17, 42):
        for one, together in zip(
            run(positions[place : place + 1], timescales), (sin, cos), strict=True
        ):
            np.testing.assert_array_equal(one[0], together[place])
