"""An MLP's products on one GPU by XLA, our kernels and JAX's; see gpu_ladder.py."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.lib.turns import timed
from sgljax_engine.kernels.gpu import linear
from sgljax_engine.layers.basic import linear as xla_linear
from sgljax_engine.layers.basic import rms_norm
from sgljax_engine.layers.fused import HOPPER
from sgljax_engine.layers.int8 import Int8Weight, int8_linear

NUM_LAYERS = 8
"""Weights that take turns, so that no cache holds them: 151 MB of them in Qwen3-0.6B's shape."""

NORM_EPS = 1e-6

GATED_TILES = (
    linear.GATED,
    linear.FEW_GATED,
    linear.Tile(64, 64, 64, 8),
    linear.Tile(128, 32, 64),
    linear.Tile(128, 64, 64, 8),
)
INT8_GATED_TILES = (
    linear.GATED,
    linear.FEW_GATED,
    linear.Tile(64, 64, 64, 8),
    linear.Tile(128, 64, 64, 8),
)
ADDED_TILES = (
    linear.ADDED,
    linear.Tile(64, 32, 128),
    linear.Tile(64, 16, 128),
    linear.Tile(64, 16, 256, 4, 3),
    linear.Tile(128, 16, 128),
)
INT8_ADDED_TILES = (
    linear.ADDED_INT8,
    linear.ADDED,
    linear.Tile(64, 32, 128),
    linear.Tile(64, 16, 128),
)

HOPPER_TILES = ((64, 64, 64, 6, "N"), (64, 64, 128, 4, "M"), (64, 128, 64, 4, "M"))
"""Rows, outputs and inputs of a tile, steps in flight, and what two groups of warps share."""


class NotHereError(Exception):
    """The device cannot run what is to be measured."""


class Layer(NamedTuple):
    """An MLP's weights: gate and up [D, N], down [N, D]; of `Int8Weight`s their values alone.

    In int8 they are `linear.Scaled`.
    """

    gate: Any
    up: Any
    down: Any


class Variant(NamedTuple):
    """A way to compute `x + down(silu(gate(norm(x))) * up(norm(x)))`.

    Attributes:
        name: For the report.
        gated: Of x, gate and up; None for XLA's.
        added: Of the product, down and x; None for XLA's.
        prepare: Brings a layer's weights into the layout of these.
    """

    name: str
    gated: Callable[..., jax.Array] | None = None
    added: Callable[..., jax.Array] | None = None
    prepare: Callable[[Layer], Layer] = lambda layer: layer


def tiles(*, is_int8: bool, is_smoke: bool) -> list[Variant]:
    """Our kernels, one of the two at a time, in each tile."""
    options = {"interpret": is_smoke}
    gated = INT8_GATED_TILES if is_int8 else GATED_TILES
    added = INT8_ADDED_TILES if is_int8 else ADDED_TILES
    return [
        *(
            Variant(f"gated {tuple(tile)}", functools.partial(_gated, tile=tile, **options))
            for tile in gated
        ),
        *(
            Variant(
                f"linear_add {tuple(tile)}",
                added=functools.partial(linear.linear_add, tile=tile, **options),
            )
            for tile in added
        ),
    ]


def hopper() -> list[Variant]:
    """JAX's own kernel for Hopper GPUs; those of its tiles that rows do not fill fail.

    Raises:
        NotHereError: on other devices; it cannot be interpreted.
    """
    _require_hopper()
    from jax.experimental.pallas.ops.gpu import hopper_matmul_mgpu as ops

    def variant(rows: int, outputs: int, inputs: int, steps: int, shared: str) -> Variant:
        config = ops.TuningConfig(
            rows, outputs, inputs, steps, wg_dimension=ops.MatmulDimension[shared]
        )

        def gated(x: jax.Array, gate: jax.Array, up: jax.Array) -> jax.Array:
            h = _normed(x)
            gates, ups = (ops.matmul(h, weight, None, config) for weight in (gate, up))
            return jax.nn.silu(gates) * ups

        def added(h: jax.Array, down: jax.Array, x: jax.Array) -> jax.Array:
            return ops.matmul(h, down, x, config)

        return Variant(f"JAX's matmul {(rows, outputs, inputs, steps, shared)}", gated, added)

    return list(itertools.starmap(variant, HOPPER_TILES))


def hopper_int8() -> list[Variant]:
    """JAX's product of int8 with bfloat16, which takes weights as [out, in].

    Raises:
        NotHereError: as `hopper`.
    """
    _require_hopper()
    from jax.experimental.pallas.ops.gpu import hopper_mixed_type_matmul_mgpu as ops

    def transposed(layer: Layer) -> Layer:
        return Layer(*(each._replace(values=each.values.T) for each in layer))

    def variant(outputs: int, rows: int, inputs: int, steps: int) -> Variant:
        config = ops.TuningConfig(outputs, rows, inputs, steps, wg_dimension=ops.MatmulDimension.M)

        def product(x: jax.Array, weight: linear.Scaled) -> jax.Array:
            found = ops.mixed_matmul_kernel(weight.values, x.T, out_dtype=x.dtype, config=config)
            return found.T * weight.scale.astype(x.dtype)

        def gated(x: jax.Array, gate: linear.Scaled, up: linear.Scaled) -> jax.Array:
            h = _normed(x)
            return jax.nn.silu(product(h, gate)) * product(h, up)

        def added(h: jax.Array, down: linear.Scaled, x: jax.Array) -> jax.Array:
            return x + product(h, down)

        name = f"JAX's mixed matmul {(outputs, rows, inputs, steps)}"
        return Variant(name, gated, added, transposed)

    return [variant(64, 64, 128, 4), variant(64, 128, 128, 4)]


def measure(
    shape: tuple[int, int],
    rows: int,
    variants: Sequence[Variant],
    *,
    is_int8: bool,
    is_smoke: bool,
) -> Iterator[tuple[str, float | str]]:
    """Microseconds of an MLP, by XLA and then each variant; why not, where one is wrong or fails.

    A call goes through all layers, each product's result an input of the next.

    Args:
        shape: D and N.
        rows: Tokens.
        variants: What to measure beside XLA.
        is_int8: Whether the weights are.
        is_smoke: Whether one call is enough.
    """
    dim, wide = shape
    num_layers = 2 if is_smoke else NUM_LAYERS
    keys = iter(jax.random.split(jax.random.key(0), 3 * num_layers + 1))

    def draw(*shape: int) -> Any:
        x = (0.02 * jax.random.normal(next(keys), shape)).astype(jnp.bfloat16)
        if not is_int8:
            return x
        scale = jnp.max(jnp.abs(x), axis=0).astype(jnp.float32) / 127
        return linear.Scaled(jnp.round(x / scale).astype(jnp.int8), scale)

    layers = [Layer(draw(dim, wide), draw(dim, wide), draw(wide, dim)) for _ in range(num_layers)]
    x = jax.random.normal(next(keys), (rows, dim)).astype(jnp.bfloat16)
    expected = None
    for variant in (Variant("MLP by XLA"), *variants):
        run = _program(variant)
        try:
            prepared = jax.block_until_ready([variant.prepare(layer) for layer in layers])
            out = run(x, prepared, 1).block_until_ready()
        except Exception as error:
            if expected is None:
                raise
            reason = next(iter(str(error).splitlines()), "")
            yield variant.name, f"failed: {type(error).__name__}: {reason[:150]}"
            continue
        expected = out if expected is None else expected
        error = float(jnp.max(jnp.abs((out - expected).astype(jnp.float32))))
        if not error <= 0.05 * float(jnp.max(jnp.abs(expected))):
            yield variant.name, f"wrong by {error:.3g}, not timed"
            continue
        yield variant.name, _time_us(run, x, prepared, 1 if is_smoke else 32)


def _time_us(
    run: Callable[..., jax.Array], x: jax.Array, layers: Sequence[Layer], rounds: int
) -> float:
    """Microseconds of a layer. The device repeats all: a dispatch takes as long as they do."""
    took = [timed(lambda: run(x, layers, rounds).block_until_ready()) for _ in range(5)]
    return 1e6 * float(np.median(took)) / (rounds * len(layers))


def _program(variant: Variant) -> Callable[..., jax.Array]:
    gated, added = variant.gated or _gated_by_xla, variant.added or _added_by_xla

    @jax.jit
    def run(x: jax.Array, layers: Sequence[Layer], rounds: int) -> jax.Array:
        def go_through(_: jax.Array, x: jax.Array) -> jax.Array:
            for gate, up, down in layers:
                x = added(gated(x, gate, up), down, x)
            return x

        return jax.lax.fori_loop(0, rounds, go_through, x)

    return run


def _require_hopper() -> None:
    device = jax.devices()[0]
    if str(getattr(device, "compute_capability", "")) != HOPPER:
        raise NotHereError(f"it needs a Hopper GPU, the device is of kind {device.device_kind!r}")


def _normed(x: jax.Array) -> jax.Array:
    return rms_norm(x, None, NORM_EPS)


def _product(x: jax.Array, weight: Any) -> jax.Array:
    """As the engine has XLA compute it."""
    if isinstance(weight, linear.Scaled):
        return int8_linear(x, Int8Weight(*weight))
    return xla_linear(x, weight)


def _gated_by_xla(x: jax.Array, gate: Any, up: Any) -> jax.Array:
    h = _normed(x)
    return jax.nn.silu(_product(h, gate)) * _product(h, up)


def _added_by_xla(h: jax.Array, down: Any, x: jax.Array) -> jax.Array:
    return x + _product(h, down)


def _gated(x: jax.Array, gate: Any, up: Any, **options: Any) -> jax.Array:
    return linear.gated(_normed(x), gate, up, jax.nn.silu, **options)
