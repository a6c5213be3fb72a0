"""Experts against a plain loop in float64, on every way to compute them."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sgljax_cpu.chain import unavailable
from sgljax_cpu.panels import Panels, pack
from sgljax_engine.layers.experts import Experts, Routing, mix, route, shards_width
from sgljax_engine.layers.kernels import CpuKernels, Kernels, XlaKernels
from sgljax_engine.layers.ragged import block_size
from tests.engine.paged_cases import spread
from tests.tiers import tiered

WAYS: dict[str, Kernels] = {
    "ragged_dot": XlaKernels(has_ragged_dot=True),
    "blocks": XlaKernels(),
    "kernels": CpuKernels(),
}
FAST = ("kernels",)

NUM_DRAWS = 200


class Shape(NamedTuple):
    """Sizes of a layer, and of a batch."""

    num_tokens: int
    num_experts: int
    num_chosen: int
    model_dim: int = 12
    width: int = 20


SHAPES = (
    Shape(num_tokens=9, num_experts=5, num_chosen=3),  # nothing divides anything
    Shape(num_tokens=1, num_experts=7, num_chosen=2, model_dim=17, width=5),
    Shape(num_tokens=33, num_experts=4, num_chosen=1, model_dim=16, width=7),
    Shape(num_tokens=6, num_experts=4, num_chosen=4),  # all experts
    Shape(num_tokens=70, num_experts=3, num_chosen=2, model_dim=8, width=8),  # several blocks each
)


def weights_of(shape: Shape, seed: int = 0) -> Any:
    """`Experts` of numpy arrays, float32, [E, in, out]."""
    rng = np.random.default_rng(seed)
    widening = (shape.num_experts, shape.model_dim, shape.width)
    narrowing = (shape.num_experts, shape.width, shape.model_dim)
    made: Any = [
        rng.standard_normal(size).astype(np.float32) / size[1] ** 0.5
        for size in (widening, widening, narrowing)
    ]
    return Experts(*made)


def expected_mix(x, routing, experts, is_used):
    """A loop over experts, float64."""
    x, gate, up, down = (np.asarray(a, np.float64) for a in (x, *experts[:3]))
    out = np.zeros_like(x)
    for expert in range(len(gate)):
        g = x @ gate[expert]
        made = (g / (1 + np.exp(-g)) * (x @ up[expert])) @ down[expert]
        factor = np.where(routing.ids == expert, routing.weights.astype(np.float64), 0).sum(1)
        out += factor[:, None] * made
    return np.where(is_used[:, None], out, 0)


@functools.cache
def mix_of(way: str):
    if way == "kernels" and unavailable() is not None:
        pytest.skip(f"no JIT-compiled CPU kernels here: {unavailable()}")

    def gated(gate, up):
        return jax.nn.silu(gate) * up

    return jax.jit(functools.partial(mix, kernels=WAYS[way], gated=gated))


def placed(experts: Any, way: str) -> Any:
    if way != "kernels":
        return experts
    packed: Any = [Panels(pack(jnp.asarray(w)), w.shape[-1]) for w in experts[:3]]
    return Experts(*packed)


def draw(shape: Shape, rng: np.random.Generator, kind: int):
    """Tokens, a choice and which tokens are used; of several kinds, also extreme ones."""
    tokens, experts, chosen = shape[:3]
    x = rng.standard_normal((tokens, shape.model_dim)).astype(np.float32)
    ids = np.stack([rng.permutation(experts)[:chosen] for _ in range(tokens)])
    if kind == 1:  # all tokens choose the same experts
        ids = np.broadcast_to(ids[:1], ids.shape)
    if kind == 2:  # each expert is chosen, as far as there are choices
        ids = (np.arange(tokens * chosen) % experts).reshape(tokens, chosen)
    is_used = rng.random(tokens) < rng.choice([0.0, 0.5, 0.9, 1.0])
    weights: Any = rng.random((tokens, chosen)).astype(np.float32)
    numbers: Any = ids.astype(np.int32)
    return x, Routing(weights, numbers), is_used


@pytest.mark.parametrize(
    ("shape", "way"),
    [
        (SHAPES[0], "kernels"),
        pytest.param(SHAPES[1], "ragged_dot", marks=pytest.mark.slow),
        *spread(SHAPES, list(WAYS), road="rare"),
    ],
)
def test_random_choices_against_a_loop(shape, way):
    """200 of each shape."""
    rng = np.random.default_rng(1)
    experts = weights_of(shape)
    run = mix_of(way)
    stored = placed(experts, way)
    num_none = 0
    for index in range(NUM_DRAWS):
        x, routing, is_used = draw(shape, rng, kind=index % 4)
        got = np.asarray(run(x, routing, stored, is_used))
        wanted = expected_mix(x, routing, experts, is_used)
        np.testing.assert_allclose(got, wanted, atol=3e-6, rtol=0)
        num_none += not is_used.any()
    assert num_none > 10  # no expert is hit at all
    x, routing, _ = draw(shape, rng, kind=0)
    everywhere = np.ones(shape.num_tokens, bool)
    got = np.asarray(run(x, routing, stored, None))
    np.testing.assert_allclose(got, expected_mix(x, routing, experts, everywhere), atol=3e-6)


@pytest.mark.parametrize("way", tiered(WAYS, FAST))
def test_unused_tokens_do_no_harm(way):
    """Whatever they hold, and though they choose experts like others."""
    shape = SHAPES[0]
    rng = np.random.default_rng(3)
    experts = weights_of(shape)
    run = mix_of(way)
    x, routing, _ = draw(shape, rng, kind=0)
    is_used = np.arange(shape.num_tokens) < 4
    wanted = np.asarray(run(x, routing, placed(experts, way), is_used))
    x[4:] = np.nan
    got = np.asarray(run(x, routing, placed(experts, way), is_used))
    np.testing.assert_array_equal(got, wanted)
    assert (got[4:] == 0).all()


def test_no_copy_of_an_experts_weights():
    """The kernels read them in place; XLA's loop slices out one at a time, and only in its loop."""
    shape = Shape(num_tokens=4, num_experts=16, num_chosen=2, model_dim=64, width=32)
    run = mix_of("kernels")
    x, routing, is_used = draw(shape, np.random.default_rng(4), kind=0)
    compiled = run.lower(x, routing, placed(weights_of(shape), "kernels"), is_used).compile()
    text = compiled.as_text() or ""
    for wide in ("f32[16,2,64,16]", "f32[16,4,32,16]"):
        made = [line for line in text.splitlines() if f"= {wide}" in line]
        assert made
        assert all("parameter(" in line for line in made), made
    assert "while" not in text


@pytest.mark.soak
def test_the_time_follows_the_experts_that_are_hit():
    """As XLA counts it, a turn of the loop costs one expert; `ragged_dot` on CPUs costs all."""
    shape = Shape(num_tokens=8, num_experts=64, num_chosen=2, model_dim=64, width=32)
    x, routing, is_used = draw(shape, np.random.default_rng(5), kind=0)
    flops = {}
    for way in ("blocks", "ragged_dot"):
        run = mix_of(way)
        arguments = (x, routing, placed(weights_of(shape), way), is_used)
        cost: Any = run.lower(*arguments).compile().cost_analysis()
        flops[way] = cost["flops"] / (2 * 3 * 64 * 32)  # in tokens through one expert
    assert flops["blocks"] < 4  # XLA counts one turn of a loop
    assert flops["ragged_dot"] > 64 * shape.num_tokens


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "size"),
    [(8, 128, 1), (1, 1, 1), (256, 128, 2), (2048, 128, 16), (96, 32, 4), (10**6, 2, 64)],
)
def test_blocks_are_about_as_large_as_an_experts_share(num_tokens, num_experts, size):
    assert block_size(num_tokens, num_experts) == size


@pytest.mark.parametrize(
    ("num_experts", "width", "num_shards", "by_width"),
    [
        (128, 768, 2, True),
        (128, 768, 6, True),
        (128, 768, 8, False),  # 96 channels do not fill the lanes
        (6, 24, 4, True),  # there is no other way
        (8, 22, 4, False),
    ],
)
def test_how_experts_are_sharded(num_experts, width, num_shards, by_width):
    assert shards_width(num_experts, width, num_shards) is by_width


# ------------------------------------------------------------------ the router


def test_the_router_against_float64():
    logits = np.random.default_rng(6).standard_normal((50, 9)).astype(np.float32) * 3
    odds = np.exp(logits.astype(np.float64))
    odds /= odds.sum(1, keepdims=True)
    best = np.argsort(-odds, axis=1, kind="stable")[:, :4]
    wanted = np.take_along_axis(odds, best, 1)
    for is_normalized in (False, True):
        found = route(jnp.asarray(logits), 4, is_normalized=is_normalized)
        np.testing.assert_array_equal(found.ids, best)
        scale = wanted.sum(1, keepdims=True) if is_normalized else 1
        np.testing.assert_allclose(found.weights, wanted / scale, rtol=1e-6)
        assert found.weights.dtype == jnp.float32
        assert found.ids.dtype == jnp.int32


def test_of_equal_logits_the_lower_index_is_chosen():
    found = route(jnp.zeros((3, 6)), 4, is_normalized=True)
    np.testing.assert_array_equal(found.ids, [[0, 1, 2, 3]] * 3)
    np.testing.assert_allclose(found.weights, 0.25)
