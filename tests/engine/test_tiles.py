"""Tiles of tokens, and the sums and products whose rounding must not depend on their number."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sgljax_engine.layers.basic import (
    SMALL_BATCH,
    Layout,
    linear,
    ordered_sum,
    rms_norm,
    small_batch_linear,
)
from sgljax_engine.layers.tiles import Tiles, Together, tokens_in_tiles
from tests.tiers import tiered


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def bits(x: jax.typing.ArrayLike) -> np.ndarray:
    return np.asarray(x, np.float32).view(np.uint32)


class TestTiles:
    @pytest.mark.parametrize(
        ("num_tokens", "shape"),
        [(1, ()), (7, (3,)), (8, (2, 5)), (9, (0,)), (24, (2, 0)), (31, ())],
    )
    def test_join_undoes_split(self, num_tokens, shape):
        x = draw(num_tokens, *shape)
        tiles = Tiles(8, num_tokens, jnp.int32(num_tokens))
        split = tiles.split(jnp.asarray(x))
        assert split.shape == (max(2, -(-num_tokens // 8)), 8, *shape)
        np.testing.assert_array_equal(tiles.join(split), x)
        flat = np.asarray(split).reshape(split.shape[0] * 8, *shape)
        assert not flat[num_tokens:].any()

    @pytest.mark.parametrize("num_tokens", tiered([1, 8, 29], [29]))
    def test_map_is_the_function(self, num_tokens):
        """Trees go in and out; integers stay integers."""
        x, ids = draw(num_tokens, 3), np.arange(num_tokens, dtype=np.int32)
        tiles = Tiles(8, num_tokens, jnp.int32(num_tokens))

        def function(args):
            values, numbers = args
            return {"twice": values * 2, "next": numbers + 1}

        split = jax.tree.map(tiles.split, (jnp.asarray(x), jnp.asarray(ids)))
        out = jax.tree.map(tiles.join, tiles.map(function, split))
        expected = function((x, ids))
        assert out["next"].dtype == jnp.int32
        for name in expected:
            np.testing.assert_array_equal(out[name], expected[name])

    @pytest.mark.parametrize("num_used", [0, 1, 8, 9, 20])
    def test_unused_tiles_are_zero(self, num_used):
        """They are not computed, and how many are is known on the device alone."""

        @jax.jit
        def run(x, num_used):
            tiles = Tiles(8, 29, num_used)
            return tiles.join(tiles.map(lambda x: x + 1, tiles.split(x)))

        x = draw(29, 3)
        out = np.asarray(run(x, num_used))
        end = min(-(-num_used // 8) * 8, 29)
        np.testing.assert_array_equal(out[:end], x[:end] + 1)
        assert not out[end:].any()

    def test_together_is_the_function(self):
        x, together = jnp.asarray(draw(5, 3)), Together()
        out = together.join(together.map(lambda x: x + 1, together.split(x)))
        np.testing.assert_array_equal(out, x + 1)

    @pytest.mark.parametrize(
        ("num_tokens", "width"), [(1, 16), (16, 16), (17, 64), (64, 64), (65, 256), (300, 256)]
    )
    def test_the_narrowest_that_holds_all_is_taken(self, num_tokens, width):
        tokens = tokens_in_tiles((16, 64, 256), num_tokens, jnp.int32(1))
        assert isinstance(tokens, Tiles)
        assert (tokens.width, tokens.num_tokens) == (width, num_tokens)

    def test_without_widths_all_go_together(self):
        assert tokens_in_tiles((), 5, jnp.int32(5)) == Together()

    @pytest.mark.parametrize("num_tokens", tiered([1, 16, 40], [1]))
    def test_bits_depend_on_neither_number_nor_place(self, num_tokens):
        """A product, a norm and a softmax: all that may round otherwise with the shape."""
        x, weight = draw(200, 48), draw(48, 64, seed=1)
        scale = jnp.asarray(draw(48, seed=2))

        @functools.partial(jax.jit, static_argnames="width")
        def run(x, width):
            tiles = Tiles(width, len(x), jnp.int32(len(x)))

            def function(x):
                return jax.nn.softmax(rms_norm(x, scale, 1e-6, is_ordered=True) @ weight)

            return tiles.join(tiles.map(function, tiles.split(x)))

        for width in (16, 64):
            whole = bits(run(x, width))
            np.testing.assert_array_equal(bits(run(x[:num_tokens], width)), whole[:num_tokens])
            np.testing.assert_array_equal(bits(run(x[::-1], width)), whole[::-1])


class TestOrderedSum:
    @pytest.mark.parametrize("axis", [0, 1, -1])
    @pytest.mark.parametrize("size", tiered([1, 15, 16, 17, 254, 1024], [15, 254]))
    def test_is_the_sum(self, size, axis):
        x = np.moveaxis(draw(size, 3, 4), 0, axis)
        out = jax.jit(ordered_sum, static_argnames="axis")(x, axis=axis)
        expected = np.sum(x.astype(np.float64), axis=axis, keepdims=True)
        assert out.shape == expected.shape
        np.testing.assert_allclose(out, expected, atol=1e-6 * size)

    @pytest.mark.slow
    @pytest.mark.parametrize("size", [37, 256])
    def test_order_depends_on_the_size_alone(self, size):
        """Same bits whatever the batch, along either axis, compiled or not."""
        x = draw(300, size)
        run = jax.jit(ordered_sum, static_argnames="axis")
        whole = bits(run(x, axis=1))
        for count in (1, 17, 64):
            np.testing.assert_array_equal(bits(run(x[:count], axis=1)), whole[:count])
            transposed = bits(run(x[:count].T, axis=0))
            np.testing.assert_array_equal(transposed, whole[:count].reshape(1, -1))
        np.testing.assert_array_equal(bits(ordered_sum(jnp.asarray(x), 1)), whole)

    def test_order(self):
        """Up to 16 slices, one after another."""
        x = draw(32)
        parts = x[:2].copy()
        for i in range(2, 32, 2):
            parts = parts + x[i : i + 2]
        out = ordered_sum(jnp.asarray(x), 0)
        np.testing.assert_array_equal(bits(out), bits(parts[:1] + parts[1:]))


@pytest.mark.parametrize("layout", [Layout.TOKENS_FIRST, Layout.FEATURES_FIRST])
@pytest.mark.parametrize("num_tokens", [1, 16, SMALL_BATCH])
def test_narrow_linear_is_linear(layout, num_tokens):
    x, weight = draw(num_tokens, 48), draw(48, 32, seed=1)
    expected = x.astype(np.float64) @ weight
    if layout is Layout.FEATURES_FIRST:
        x, weight, expected = x.T, weight.T, expected.T
    for multiply in (linear, small_batch_linear):
        out = jax.jit(multiply, static_argnames="layout")(x, weight, layout=layout)
        np.testing.assert_allclose(out, expected, atol=1e-4)


@pytest.mark.parametrize(
    ("num_out", "num_in"), [(1, 1), (3, 2), (97, 2048), (384, 512), (4096, 512)]
)
def test_a_matrix_vector_product_in_parts_is_the_product(num_out, num_in):
    """One part, as many as divide the outputs, and the most there are."""
    x, weight = draw(num_in, 1), draw(num_out, num_in, seed=1)
    out = jax.jit(linear, static_argnames="layout")(x, weight, layout=Layout.FEATURES_FIRST)
    np.testing.assert_allclose(out, weight.astype(np.float64) @ x, rtol=1e-5, atol=1e-4)


def test_an_ordered_norm_is_a_norm():
    x, weight = jnp.asarray(draw(5, 48)), jnp.asarray(draw(48, seed=1))
    norm = jax.jit(rms_norm, static_argnums=2, static_argnames="is_ordered")
    ordered, plain = (norm(x, weight, 1e-6, is_ordered=each) for each in (True, False))
    np.testing.assert_allclose(ordered, plain, rtol=1e-6)
