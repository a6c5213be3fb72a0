"""Products by machine code against numpy in float64."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

from sgljax_engine.kernels.cpu.copy import copy
from sgljax_engine.kernels.cpu.linear import linear
from sgljax_engine.kernels.cpu.small_batch_linear import SMALL_BATCH, small_batch_linear
from sgljax_engine.kernels.cpu.transpose import transpose
from tests.engine.native_cases import lanes, needs_machine_code

COMPARES_BITS = True  # see conftest

__all__ = ["lanes"]
pytestmark = [needs_machine_code, pytest.mark.usefixtures("lanes")]

SHAPES = [(1, 1), (5, 512), (13, 7), (50, 100), (300, 700)]
TOKENS = [1, 3, 8, 9, 17, 31, 48, 65, 130]


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def assert_product(found, weight, x):
    """To what rounding a float32 sum one by one allows."""
    exact = weight.astype(np.float64) @ x.astype(np.float64)
    size = np.abs(weight).astype(np.float64) @ np.abs(x)
    np.testing.assert_array_less(np.abs(found - exact), size * 3e-6 + 1e-30)


@pytest.mark.parametrize("shape", SHAPES)
def test_all_numbers_of_tokens(shape):
    weight = draw(*shape)
    for num_tokens in TOKENS:
        x = draw(shape[1], num_tokens, seed=num_tokens)
        for is_deterministic in (False, True):
            options = {"is_deterministic": is_deterministic}
            found = np.asarray(jax.jit(functools.partial(linear, **options))(weight, x))
            assert_product(found, weight, x)
            run = jax.jit(functools.partial(linear, is_token_major=True, **options))
            np.testing.assert_array_equal(run(weight, x), found.T)
        of_few = np.asarray(jax.jit(small_batch_linear)(weight, x.T))
        assert_product(of_few, weight, x)
        by_token = jax.jit(functools.partial(small_batch_linear, is_token_major=True))
        np.testing.assert_array_equal(by_token(weight, x.T), of_few.T)


@pytest.mark.parametrize("num_rows", [100, 150])
def test_a_token_has_the_same_bits_in_any_company(num_rows):
    weight, x = draw(num_rows, 300), draw(300, 130)
    run = jax.jit(functools.partial(linear, is_deterministic=True))
    together = np.asarray(run(weight, x))
    np.testing.assert_array_equal(jax.jit(linear)(weight, x), together)
    by_token = jax.jit(functools.partial(linear, is_token_major=True, is_deterministic=True))
    np.testing.assert_array_equal(by_token(weight, x), together.T)
    for count in (1, 2, 5, SMALL_BATCH, 16, 40, 64, 129):
        some = np.random.default_rng(count).permutation(130)[:count]
        found = np.asarray(run(weight, np.ascontiguousarray(x[:, some])))
        np.testing.assert_array_equal(found, together[:, some])
        found = np.asarray(by_token(weight, np.ascontiguousarray(x[:, some])))
        np.testing.assert_array_equal(found, together.T[some])


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_a_number_stays_with_its_token(value):
    """Vectors that are filled up, and rows that are taken twice, must not spread it."""
    weight = draw(50, 40)
    for num_tokens in (5, 12, 33):
        x = draw(40, num_tokens)
        x[3, num_tokens - 1] = value
        found = np.asarray(jax.jit(linear)(weight, x))
        by_token = jax.jit(functools.partial(linear, is_token_major=True))
        np.testing.assert_array_equal(by_token(weight, x), found.T)
        assert not np.isfinite(found[:, -1]).any()
        assert_product(found[:, :-1], weight, x[:, :-1])


def test_nothing_at_all():
    assert jax.jit(linear)(draw(0, 5), draw(5, 20)).shape == (0, 20)
    assert jax.jit(linear)(draw(4, 5), draw(5, 0)).shape == (4, 0)
    by_token = jax.jit(functools.partial(linear, is_token_major=True))
    assert by_token(draw(0, 5), draw(5, 20)).shape == (20, 0)
    np.testing.assert_array_equal(jax.jit(linear)(draw(4, 0), draw(0, 20)), np.zeros((4, 20)))


@pytest.mark.parametrize(
    "shape", [(1, 1), (1, 9), (16, 16), (17, 3), (33, 64), (64, 70), (100, 130), (512, 48)]
)
def test_transpose(shape):
    x = draw(*shape)
    found, is_finite = jax.jit(transpose)(x)
    np.testing.assert_array_equal(found, x.T)
    assert is_finite


@pytest.mark.parametrize("shape", [(0,), (1,), (63,), (64, 3), (1 << 15,), (3, 40_001)])
def test_copy(shape):
    x = draw(*shape)
    found, is_finite = jax.jit(copy)(x)
    np.testing.assert_array_equal(found, x)
    assert is_finite


@pytest.mark.parametrize("move", [transpose, copy])
def test_moves_bits(move):
    bits = np.random.default_rng(0).integers(0, 2**32, (80, 48), dtype=np.uint32)
    found = np.asarray(jax.jit(move)(bits.view(np.float32))[0])
    np.testing.assert_array_equal(found.view(np.uint32), bits.T if move is transpose else bits)


@pytest.mark.parametrize("move", [transpose, copy])
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
def test_sees_what_is_not_finite_wherever_it_is(move, value):
    run = jax.jit(move)
    x = np.full((37, 99), np.finfo(np.float32).max, np.float32)
    assert run(x)[1]
    for place in np.ndindex(*x.shape):
        if sum(place) % 5 == 0 or 36 in place or 98 in place:
            kept, x[place] = x[place], value
            assert not run(x)[1], place
            x[place] = kept


def test_two_that_are_not_finite_do_not_hide_one_another():
    x = np.zeros((200, 20_000), np.float32)  # in several chunks, so of several threads
    x[0, 0], x[-1, -1] = np.inf, -np.inf
    assert not jax.jit(transpose)(x)[1]
    assert not jax.jit(copy)(x)[1]
